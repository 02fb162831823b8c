"""What `sanitize` needs to know of calls that take one route, computed once for all of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.call.arguments import tensors_in
from shardwise.call.schema import op_info
from shardwise.comm import axes_of, coord_of, is_simulated, members_of
from shardwise.comm.simulate import at_simulation_end
from shardwise.layout import Spec, block_shape
from shardwise.tensor.dtensor import DTensor

__all__ = ["CallFacts", "Held", "facts_of", "held"]

_READS_NO_VALUES = frozenset(
    {
        "aten::is_same_size",
        "aten::_has_same_storage_numel",
        "aten::_new_zeros_with_same_feature_meta",
        "aten::_shape_as_tensor",
    }
)
"""Ops that only compare or return sizes; their operands may be without values. So may those of `empty_like` and `new_zeros`."""
_OVERWRITE = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ bernoulli_ exponential_ random_ cauchy_ geometric_ log_normal_ _foreach_copy_ _foreach_zero_".split()
)
"""Ops after which nothing is left of what a tensor held."""
_KEPT_CODES = 64
Code = tuple[int, str]
Read = tuple[int, "Held | None", Any]
"""The place of a tensor, how the ranks hold it and their mesh; None for a plain tensor, which is compared on the mesh of the call."""
_NUMBERS = (int, float, complex, bool, str, type(None), torch.dtype)


class Held(NamedTuple):
    """How the ranks hold a tensor.

    Attributes:
        split: the axes along which their values may differ: those that split it, or along which it is pending.
        is_replicated: whether there is another axis, along which they may not.
        order: the dims by decreasing stride.
        shapes: the shape of the block of each rank; of this rank alone on processes, under its rank None.
        dtype: the dtype of the blocks.
        text: the spec.
        code: a number for it.
    """

    split: tuple[int, ...]
    is_replicated: bool
    order: tuple[int, ...] | None
    shapes: dict[int | None, tuple[int, ...]]
    dtype: Any
    text: str
    code: int


@lru_cache(maxsize=4096)
def held(spec: Spec) -> Held:
    """How the ranks of its mesh hold a tensor of this spec."""
    layout, axes = spec.layout, axes_of(spec.mesh)
    split = sorted({*layout.sharded, *(a for a, _ in layout.partial)})
    others = math.prod(n for a, n in enumerate(axes.sizes) if a not in split)
    order = None
    shapes: dict[int | None, tuple[int, ...]] = {}
    if spec.stride is not None:
        order = tuple(sorted(range(len(spec.shape)), key=lambda d: (-spec.stride[d], d)))  # type: ignore[index]
        if is_simulated():
            shapes.update({rank: block_shape(layout, coord) for rank, coord in members_of(spec.mesh).items()})
        elif (me := coord_of(spec.mesh)) is not None:
            shapes[None] = block_shape(layout, me)
    order = None if order is None or order == tuple(range(len(order))) else order
    return Held(
        tuple(split), others > 1, order, shapes, spec.dtype, str(spec), zlib.crc32(str(spec).encode())
    )


at_simulation_end(held.cache_clear)


class CallFacts(NamedTuple):
    """Facts about the calls of one op that take one route.

    Attributes:
        mesh: the mesh of the first DTensor; None if this rank is not on it.
        text: the op and the specs of its operands.
        code: a number for the text.
        positions: the places of the tensors among the arguments; None if some are in lists or passed by name.
        reads: the tensors whose values the op reads and ranks may disagree on, or whose blocks may not fit: their places among the
            tensors, and how they are held.
        writes: those that it writes to.
        numbers: the places of arguments that are numbers or the like.
        codes: results of `code_of`, by the numbers among the arguments.
        is_local: whether a rank may run it alone: a view, or reading a number that every rank has.
        leaves_unset: whether its results have no values yet.
        overwrites: whether nothing is left of what it writes to.
    """

    mesh: Any
    text: str
    code: int
    positions: tuple[int, ...] | None
    reads: tuple[Read, ...]
    writes: tuple[int, ...]
    numbers: tuple[int, ...]
    codes: dict[Any, Code]
    is_local: bool
    leaves_unset: bool
    overwrites: bool

    def tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call, in order."""
        if self.positions is not None:
            return [args[i] for i in self.positions]
        return tensors_in([*args, *kwargs.values()])

    def code_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Code:
        """A number for the op, the specs of its operands and the numbers among its arguments, and these numbers as text."""
        if not self.numbers and not kwargs:
            return self.code, ""
        key: Any
        try:
            if len(self.numbers) == 1 and not kwargs:
                value = args[self.numbers[0]]
                key = value, type(value)  # 1 is not True
            else:
                values = (*[args[i] for i in self.numbers], *kwargs.values())
                key = *values, *map(type, values), *kwargs
            found = self.codes.get(key)
        except TypeError:  # a list
            return self._new_code(args, kwargs)
        if found is None:
            found = self._new_code(args, kwargs)
            # tensors among the values would be kept
            if self.positions is not None and len(self.codes) < _KEPT_CODES:
                self.codes[key] = found
        return found

    def _new_code(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Code:
        values: list[Any] = [args[i] for i in self.numbers]
        values += [f"{k}={v!r}" for k, v in kwargs.items() if _is_number(v)]
        text = ", ".join(map(str, values))
        return zlib.crc32(text.encode(), self.code), f" with {text}" if text else ""


def _reads_no_values(name: str) -> bool:
    return name in _READS_NO_VALUES or name.endswith("_like") or name.startswith("aten::new_")


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or (
        isinstance(value, list | tuple) and all(isinstance(v, _NUMBERS) for v in value)
    )


def facts_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFacts:
    """The facts about a call, which hold for all calls that take the same route."""
    info = op_info(func)
    tensors = tensors_in([*args, *kwargs.values()])
    flat = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor))
    first = next(t for t in tensors if isinstance(t, DTensor))
    mesh = first.device_mesh
    named = info.bind(args, kwargs)
    written = {id(t) for i in info.written for t in tensors_in([named[info.arguments[i].name]])}
    specs = [str(t._spec) if isinstance(t, DTensor) else f"a plain {_plain_text(t)}" for t in tensors]
    text = f"{func} of {', '.join(specs)}"
    is_here = is_simulated() or coord_of(mesh) is not None
    return CallFacts(
        mesh if is_here else None,
        text,
        zlib.crc32(text.encode()),
        flat if len(flat) == len(tensors) else None,
        # what is written to may have no values yet
        ()
        if _reads_no_values(info.qualified_name)
        else tuple(
            read
            for i, t in enumerate(tensors)
            if id(t) not in written and _can_differ(read := _read(i, t, mesh))
        ),
        tuple(i for i, t in enumerate(tensors) if id(t) in written),
        tuple(i for i, a in enumerate(args) if _is_number(a)),
        {},
        info.is_view or (info.qualified_name == "aten::_local_scalar_dense" and not held(first._spec).split),
        "empty" in info.qualified_name or info.qualified_name.startswith("aten::resize"),
        bool(info.out_names) or info.qualified_name.rpartition("::")[2] in _OVERWRITE,
    )


def _read(place: int, t: Tensor, mesh: Any) -> Read:
    return (place, held(t._spec), t._spec.mesh) if isinstance(t, DTensor) else (place, None, mesh)


def _can_differ(read: Read) -> bool:
    how = read[1]
    return how is None or how.is_replicated or bool(how.shapes)


def _plain_text(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
