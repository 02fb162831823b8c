"""torch's `LocalTensorMode`: one process has the tensors of all ranks, each as a `LocalTensor` of one tensor per rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.distributed import _local_tensor as _module
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from shardwise.torch_internals.rng import announce_seed, unobserved

__all__ = [
    "LocalTensor",
    "concrete_int",
    "for_each_rank",
    "is_active",
    "local_modes",
    "local_tensor",
    "ranks_of_mode",
    "support_local_mode",
    "tensors_of",
    "without_local_mode",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

local_modes: list[Any] = _module._PROCESS_LOCAL_TENSOR_MODE
"""The modes that the program is inside of, the innermost last."""


def is_active() -> bool:
    """Whether a mode is on: factories return LocalTensors, and a mesh has a coordinate of each rank."""
    return bool(local_modes) and not local_modes[-1]._disable


def ranks_of_mode() -> tuple[int, ...]:
    """The ranks of the innermost mode."""
    return tuple(sorted(local_modes[-1].ranks))


def tensors_of(x: Any) -> dict[int, Tensor]:
    """The tensor of each rank of a LocalTensor.

    >>> import torch
    >>> tensors_of(local_tensor({0: torch.zeros(1), 1: torch.ones(1)}))
    {0: tensor([0.]), 1: tensor([1.])}
    """
    return x._local_tensors  # type: ignore[no-any-return]


def local_tensor(tensors: Mapping[int, Tensor]) -> Tensor:
    """The LocalTensor of one tensor per rank, none of which may require a gradient."""
    return LocalTensor(dict(tensors))


def for_each_rank(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, which inside a mode is called for each rank if its arguments differ between them, as do its results.

    >>> import torch
    >>> double = for_each_rank(lambda n: 2 * n)
    >>> with LocalTensorMode(2):
    ...     double(torch.SymInt(_module.LocalIntNode({0: 3, 1: 4})))
    LocalIntNode({0: 6, 1: 8})
    """
    mapped = _module.maybe_run_for_local_tensor(fn)

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return mapped(*args, **kwargs) if local_modes else fn(*args, **kwargs)

    return call


def concrete_int(value: Any, rank: int) -> int:
    """An integer that may differ between ranks, as it is on one of them.

    >>> import torch
    >>> concrete_int(torch.SymInt(_module.LocalIntNode({0: 3, 1: 4})), 1), concrete_int(5, 1)
    (4, 5)
    """
    return int(_module._map_to_rank_local_val(value, rank))


@contextmanager
def without_local_mode() -> Iterator[None]:
    """Inside, a mode changes nothing: factories return plain tensors, and a mesh has the coordinate of this process."""
    if not is_active():
        yield
        return
    with local_modes[-1].disable():
        yield


def support_local_mode(kind: type, run: Callable[..., Any], prepare: Callable[[], None]) -> None:
    """Have ops on tensors of a class call `run(func, types, args, kwargs)` inside a mode, which knows no other classes.

    Args:
        kind: the class.
        run: called with the mode off, as if the program were not inside it.
        prepare: called once, before the first mode begins.
    """
    enter, dispatch = LocalTensorMode.__enter__, LocalTensorMode.__torch_dispatch__
    prepare = functools.cache(prepare)

    def prepare_and_enter(self: Any) -> Any:
        prepare()
        return enter(self)

    def run_or_dispatch(
        self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, kind) for t in types):
            with self.disable():
                return run(func, types, args, kwargs or {})
        return dispatch(self, func, types, args, kwargs)

    LocalTensorMode.__enter__ = prepare_and_enter  # type: ignore[method-assign]
    LocalTensorMode.__torch_dispatch__ = run_or_dispatch  # type: ignore[method-assign]
    seed = _module._LocalRandom.torch_manual_seed

    def torch_manual_seed(value: Any) -> Any:
        generator = seed(value)
        # the last rank was seeded last, but ranks that have different seeds agree on that of the first
        announce_seed(concrete_int(value, min(local_modes[-1].ranks)) if local_modes else int(value))
        return generator

    _module._LocalRandom.torch_manual_seed = staticmethod(torch_manual_seed)  # type: ignore[assignment]
    for name in ("_get_rng_state", "_set_rng_state"):
        # a mode sets torch's generator for each rank of each op, which is none of the program's business
        setattr(_module, name, unobserved(getattr(_module, name)))
