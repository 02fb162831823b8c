"""The keyword arguments that all factories share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, cast, get_type_hints

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.local_mode import outside_local_mode
from shardwise.layout import Placement
from shardwise.torch_internals.graph_calls import call_in_graph

__all__ = ["TensorOptions", "factory"]

_Factory = TypeVar("_Factory", bound=Callable[..., Any])


class TensorOptions(TypedDict, total=False):
    """The keyword arguments of every factory, whose docstrings end as this one does.

    Args:
        dtype: the dtype; by default that of the torch function of the same name.
        layout: the memory layout of the blocks, which can only be `torch.strided`.
        requires_grad: whether the new tensor, which is a leaf, requires a gradient.
        device_mesh: the mesh; by default the one of the `with mesh:` around the call.
        placements: one `Replicate()` or `Shard(dim)` per mesh axis; by default all `Replicate()`.

    Raises:
        LayoutError: there is no mesh, the placements do not fit the shape or the mesh or contain `Partial`, a size is negative,
            or `layout` is not `torch.strided`.

    Invalid arguments of its own raise as in the torch function of the same name. Each rank creates its own block; only a random
    factory on a mesh without a common seed communicates: its ranks agree on a seed first.
    """

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    device_mesh: DeviceMesh | None
    placements: Sequence[Placement] | None


_DEFAULTS: dict[str, Any] = {
    "dtype": None, "layout": torch.strided, "requires_grad": False, "device_mesh": None, "placements": None,
}  # fmt: skip


def factory(func: _Factory) -> _Factory:
    """Replace the `**options` of a factory by the keyword arguments of `TensorOptions`, with their defaults.

    They appear in its signature and docstring, and an unknown one is a TypeError as for any function.
    """
    kinds, signature = get_type_hints(TensorOptions), inspect.signature(func)
    *own, _ = signature.parameters.values()
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in _DEFAULTS.items()
    ]
    signature = signature.replace(parameters=[*own, *shared])

    @outside_local_mode
    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - signature.parameters.keys():
            raise TypeError(f"{func.__name__}() got an unexpected keyword argument {name!r}")
        return func(*args, **_DEFAULTS | kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    _, _, shared_doc = (inspect.getdoc(TensorOptions) or "").partition("\n\n")
    checked.__doc__ = f"{inspect.getdoc(func)}\n\n{shared_doc}"
    return cast("_Factory", call_in_graph(checked))
