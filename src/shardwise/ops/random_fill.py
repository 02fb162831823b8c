"""Ops that fill a tensor with random numbers: each rank computes those of its block."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.schema import op_info
from shardwise.comm import PerRank, coord_of, first_rank, is_simulated, map_ranks, members_of
from shardwise.comm.recording import recorders
from shardwise.layout import Axes, Factor, Layout, owned
from shardwise.layout.spec_pattern import open_dim, open_dims
from shardwise.ops.traced_draws import define_numbers, traced_numbers
from shardwise.random import (
    BlockIndices,
    bernoulli,
    cauchy,
    exponential,
    geometric,
    integers,
    log_normal,
    normal,
    random_range,
    uniform,
)
from shardwise.random.philox import Draw
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import to_layout
from shardwise.tensor.seeding import draw_from
from shardwise.torch_internals.tracing import is_recorded, needs_concrete_values

__all__ = [
    "FILLS",
    "UNUSED",
    "Generate",
    "Numbers",
    "check_all",
    "describe_draw",
    "fill",
    "fill_block",
    "is_off_mesh",
    "traced_draw",
    "value_of",
]

aten = torch.ops.aten

Generate = Callable[..., Tensor]
"""Computes numbers for some elements of a tensor: `generate(draw, cells, dtype, device, *others, out=None)`.

`others` are blocks of other tensors, of the shape of these elements; `out` is memory to write to and to return.
"""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers from a distribution with constant parameters: what an op that fills a tensor generates."""

    op: str
    given: tuple[Any, ...]
    distribution: Callable[..., Tensor]

    def __post_init__(self) -> None:
        _BY_NAME.setdefault(self.op, self.distribution)

    def __call__(self, *where: Any, out: Tensor | None = None) -> Tensor:
        """Compute the numbers of some elements."""
        return self.distribution(*where, *self.given, out=out)


def describe_draw(numbers: Numbers, shape: Sequence[int], cells: Sequence[Sequence[int]]) -> str:
    """The numbers of a block as text: the op, its parameters, the shape of the tensor and the indices in the block."""
    dims = [[i.start, i.stop, i.step] if isinstance(i, range) else {"at": [*map(int, i)]} for i in cells]
    return json.dumps({"op": numbers.op, "given": numbers.given, "shape": [*shape], "cells": dims})


def traced_draw(mesh: DeviceMesh, numbers: Numbers, layout: Layout, block: Tensor, *read: Tensor) -> Tensor:
    """The numbers of one draw for the block of this rank, as ops of the graph that is being traced."""
    coord = coord_of(mesh) or ()
    if not layout.is_symbolic:
        return traced_numbers(mesh, describe_draw(numbers, layout.shape, owned(layout, coord)), block, read)
    # the shape is known when the program runs: the text says how axes split it, and where the block is
    said = {"op": numbers.op, "given": numbers.given, "axes": layout.axes.sizes, "coord": coord}
    text = json.dumps(said | {"dims": open_dims(layout)})
    return traced_numbers(mesh, text, block, read, layout.shape)


@lru_cache(maxsize=4096)
def _parse_draw(text: str, sizes: tuple[int, ...] = ()) -> tuple[Numbers, BlockIndices]:
    said = json.loads(text)
    numbers = Numbers(said["op"], tuple(said["given"]), _BY_NAME[said["op"]])
    if "dims" in said:
        dims: list[Any] = [
            (tuple(axes), *([Factor(n, tuple(on)) for n, on in some] for some in rest))
            for axes, *rest in said["dims"]
        ]
        layout = Layout(
            Axes(tuple(said["axes"])), [open_dim(n, *d) for n, d in zip(sizes, dims, strict=True)]
        )
        return numbers, BlockIndices(sizes, owned(layout, said["coord"]))
    cells = [range(*c) if isinstance(c, list) else c["at"] for c in said["cells"]]
    return numbers, BlockIndices(said["shape"], cells)


_BY_NAME: dict[str, Callable[..., Tensor]] = {}
"""The distribution of each op that `Numbers` were constructed for."""


def _numbers_at(
    position: Tensor, text: str, like: Tensor, read: Sequence[Tensor], sizes: Sequence[int]
) -> Tensor:
    """The numbers of a traced draw, at a position of the stream that is known when the program runs."""
    numbers, cells = _parse_draw(text, tuple(sizes))
    seed, number = position.tolist()
    block = torch.empty_like(like, memory_format=torch.contiguous_format)
    _write(block, cells, numbers, Draw(seed % 2**64, number), read)
    return block


define_numbers(_numbers_at)


def fill_block(block: Tensor, state: Tensor, number: int, text: str) -> None:
    """Fill a block with the numbers that a text of `describe_draw` says.

    Args:
        block: the memory to fill.
        state: the seed and the position of the stream.
        number: the position of the draw, from there.
        text: what is drawn.
    """
    numbers, cells = _parse_draw(text)
    seed, position = state.tolist()
    _write(block, cells, numbers, Draw(seed % 2**64, position + number), ())


def fill(func: Any, x: Tensor, generate: Generate, generator: Any, *others: Tensor) -> Tensor:
    """Write the numbers of one call into a tensor, plain or distributed.

    Args:
        func: the op, for errors.
        x: the tensor to fill.
        generate: computes the numbers.
        generator: a torch generator that the caller passed, or None to draw from the stream.
        *others: tensors that `generate` reads, broadcast to `x` and redistributed to its layout.
    """
    if recorders and isinstance(x, DTensor) and not x._spec.layout.partial:
        return _record(func, x, generate, generator, others)
    if x.device.type == "meta":
        return x  # nothing is drawn, so the stream does not advance, as with torch's own generator
    if not isinstance(x, DTensor):
        draw = draw_from(generator)
        _write(x, BlockIndices(x.shape), generate, draw, [t.expand(x.shape) for t in others])
        return x
    if x._spec.layout.partial:
        return _fill_pending(func, x, generate, generator, others)
    if is_recorded(x._local_tensor):
        return _trace(func, x, generate, generator, others)
    draw = draw_from(generator, x.device_mesh)
    read = [_matching_block(func, t, x) for t in others]
    block = x._local_tensor
    if isinstance(block, PerRank):
        _write_all(block, x, generate, draw, read)
    elif (coord := coord_of(x.device_mesh)) is not None:
        _write(block, BlockIndices(x.shape, owned(x._spec.layout, coord)), generate, draw, read)
    return x


def _trace(func: Any, x: DTensor, generate: Generate, generator: Any, others: Sequence[Tensor]) -> DTensor:
    """Have a compiler trace the draw: a position in the stream must not become a constant of the graph."""
    if generator is not None or not isinstance(generate, Numbers):
        raise needs_concrete_values(func)
    if coord_of(x.device_mesh) is not None:
        read = [_matching_block(func, t, x) for t in others]
        block = x._local_tensor
        block.copy_(traced_draw(x.device_mesh, generate, x._spec.layout, block, *read))
    return x


def _record(func: Any, x: DTensor, generate: Generate, generator: Any, others: Sequence[Tensor]) -> DTensor:
    """Have a capture record the draw: its position in the stream is known when the program runs."""
    if generator is not None or not isinstance(generate, Numbers) or others:
        raise needs_concrete_values(func)
    if (coord := coord_of(x.device_mesh)) is not None:
        read = [_matching_block(func, t, x) for t in others]
        text = describe_draw(generate, x.shape, owned(x._spec.layout, coord))
        recorders[-1].fill(x._local_tensor, text, x.device_mesh, read)
    return x


def _write(
    block: Tensor, cells: BlockIndices, generate: Generate, draw: Draw, others: Sequence[Tensor]
) -> None:
    if block.is_contiguous() and not block.is_conj() and not block.is_neg():
        numbers = generate(draw, cells, block.dtype, block.device, *others, out=block)
    else:
        numbers = generate(draw, cells, block.dtype, block.device, *others)
    if numbers is not block:
        block.copy_(numbers)


def _write_all(block: PerRank, x: DTensor, generate: Generate, draw: Draw, others: Sequence[Tensor]) -> None:
    """Fill the blocks of all simulated ranks; ranks with the same elements copy them."""
    first: dict[Any, Tensor] = {}
    for rank, coord in members_of(x.device_mesh).items():
        here = owned(x._spec.layout, coord)
        key = tuple(i if isinstance(i, range) else tuple(i) for i in here)
        if key in first:
            block.of_rank(rank).copy_(first[key])
            continue
        read = [t.of_rank(rank) if isinstance(t, PerRank) else t for t in others]
        _write(block.of_rank(rank), BlockIndices(x.shape, here), generate, draw, read)
        first[key] = block.of_rank(rank)


def _matching_block(func: Any, t: Tensor, x: DTensor) -> Tensor:
    """The block of `t`, broadcast to `x`, with the elements that the block of `x` has."""
    if not isinstance(t, DTensor):
        layout = Layout.replicated(t.shape, x._spec.layout.axes)
        t = DTensor.from_local(t, x.device_mesh, layout.placements, run_check=False)
    return to_layout(func, t.expand(x.shape), x._spec.layout)._local_tensor  # type: ignore[arg-type]


def _fill_pending(
    func: Any, x: DTensor, generate: Generate, generator: Any, others: Sequence[Tensor]
) -> DTensor:
    """Write the numbers as terms of the pending reduction: those of one rank, and the identity of the reduction elsewhere."""
    layout = x._spec.layout.with_partial({})
    numbers = DTensor(map_ranks(torch.empty_like, x._local_tensor), x._spec.with_layout(layout))
    fill(func, numbers, generate, generator, *others)
    terms = to_layout(func, numbers, x._spec.layout)._local_tensor
    map_ranks(aten.copy_.default, x._local_tensor, terms)
    return x


def _check(func: Any, x: Tensor, *args: Any) -> None:
    """Have torch check the arguments, on a tensor of one element; each combination once."""
    key = (func, x.dtype, args)
    if key not in _checked:
        func(torch.empty(1, dtype=x.dtype), *args, generator=UNUSED)
        if len(_checked) < 4096:
            _checked.add(key)


_checked: set[Any] = set()
UNUSED = torch.Generator()
"""For calls that only check arguments, so that they do not advance torch's default generator."""


def _filling(func: Any, distribution: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An op that fills a tensor from a distribution, whose parameters are its other arguments."""
    parameters = op_info(func).arguments[1:-1]

    def run(x: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        given = (*args, *(kwargs.get(a.name, a.default) for a in parameters[len(args) :]))
        _check(func, x, *given)
        return fill(func, x, Numbers(str(func), given, distribution), generator)

    return run


def _any_integers(
    draw: Draw,
    cells: BlockIndices,
    dtype: torch.dtype,
    device: Any,
    *bounds: int | None,
    out: Tensor | None = None,
) -> Tensor:
    """Integers up to a bound, between two bounds, or in the range that torch has for the dtype."""
    low, high = (None, *bounds)[-2:] if bounds else (None, None)
    return integers(draw, cells, dtype, device, *random_range(dtype, low, high), out=out)


def _bernoulli_by_tensor(x: Tensor, p: Tensor, generator: Any = None) -> Tensor:
    func = aten.bernoulli_.Tensor
    check_all(func, (p >= 0) & (p <= 1), "Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    return fill(func, x, Numbers(str(func), (), bernoulli), generator, p)


def check_all(func: Any, valid: Tensor, why: str) -> None:
    """Raise on all ranks alike if an element of an op's parameters is invalid on any of them."""
    if not valid.numel() or is_off_mesh(valid):
        return
    found = _on_all_ranks(func, valid.all())
    if is_recorded(found):
        aten._assert_async.msg(found, why)
    elif not found.item():
        raise RuntimeError(why)


def value_of(func: Any, x: Tensor) -> Any:
    """The value of a tensor with one element, on all ranks, as a parameter of an op."""
    return _on_all_ranks(func, x).item()


def _on_all_ranks(func: Any, x: Tensor) -> Tensor:
    if isinstance(x, DTensor):
        x = first_rank(to_layout(func, x, Layout.replicated((), x._spec.layout.axes))._local_tensor)
    return x


def is_off_mesh(x: Tensor) -> bool:
    """Whether this rank is not on the mesh of a tensor, and so has no values to check."""
    return isinstance(x, DTensor) and not is_simulated() and coord_of(x.device_mesh) is None


_DISTRIBUTIONS: dict[Any, Callable[..., Tensor]] = {
    aten.uniform_.default: uniform,
    aten.normal_.default: normal,
    aten.bernoulli_.float: bernoulli,
    aten.exponential_.default: exponential,
    aten.cauchy_.default: cauchy,
    aten.log_normal_.default: log_normal,
    aten.geometric_.default: geometric,
    aten.random_.default: _any_integers,
    aten.random_.to: _any_integers,
    getattr(aten.random_, "from"): _any_integers,
}

_BY_NAME.update({str(func): distribution for func, distribution in _DISTRIBUTIONS.items()})

FILLS: dict[Any, Callable[..., Tensor]] = {
    **{func: _filling(func, distribution) for func, distribution in _DISTRIBUTIONS.items()},
    aten.bernoulli_.Tensor: _bernoulli_by_tensor,
}
"""By op; each writes to its first argument and returns it."""
