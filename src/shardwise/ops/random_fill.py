"""Ops that fill a tensor with random numbers: each rank makes those of its block, and they are the whole's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardwise.comm import PerRank, coord_of, is_simulated, members_of
from shardwise.layout import Layout, LayoutError, owned
from shardwise.random import (
    Cells,
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
from shardwise.tensor.autograd import redistributed
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import policy
from shardwise.tensor.seeding import draw_from

__all__ = ["FILLS", "Make", "check_all", "fill", "is_elsewhere"]

aten = torch.ops.aten

Make = Callable[..., Tensor]
"""Numbers for some cells of a tensor: `make(draw, cells, dtype, device, *others, out=None)`.

`others` are blocks of other tensors, of the shape of these cells; `out` is memory to write to and to return.
"""


def fill(func: Any, x: Tensor, make: Make, generator: Any, *others: Tensor) -> Tensor:
    """Write the numbers of one call into a tensor, plain or distributed; `others` are read, in blocks that match its own."""
    if not isinstance(x, DTensor):
        draw = draw_from(generator)
        if x.device.type != "meta":
            _write(x, Cells(x.shape), make, draw, [t.expand(x.shape) for t in others])
        return x
    _check_whole(func, x)
    _check_real(func, x._local_tensor)
    draw = draw_from(generator, x.device_mesh)
    read = [_like(t, x) for t in others]
    block = x._local_tensor
    if block.device.type == "meta":
        return x
    if isinstance(block, PerRank):
        _write_all(block, x, make, draw, read)
    elif (coord := coord_of(x.device_mesh)) is not None:
        _write(block, Cells(x.shape, owned(x.layout, coord)), make, draw, read)
    return x


def _write(block: Tensor, cells: Cells, make: Make, draw: Draw, others: Sequence[Tensor]) -> None:
    if block.is_contiguous() and not block.is_conj() and not block.is_neg():
        made = make(draw, cells, block.dtype, block.device, *others, out=block)
    else:
        made = make(draw, cells, block.dtype, block.device, *others)
    if made is not block:
        block.copy_(made)


def _write_all(block: PerRank, x: DTensor, make: Make, draw: Draw, others: Sequence[Tensor]) -> None:
    """The same on each rank that is played here; those that hold copies copy."""
    first: dict[Any, Tensor] = {}
    for rank, coord in members_of(x.device_mesh).items():
        here = owned(x.layout, coord)
        key = tuple(i if isinstance(i, range) else tuple(i) for i in here)
        if key in first:
            block.of_rank(rank).copy_(first[key])
            continue
        read = [t.of_rank(rank) if isinstance(t, PerRank) else t for t in others]
        _write(block.of_rank(rank), Cells(x.shape, here), make, draw, read)
        first[key] = block.of_rank(rank)


def _like(t: Tensor, x: DTensor) -> Tensor:
    """The block of a tensor that matches another's, which it is broadcast to."""
    if not isinstance(t, DTensor):
        layout = Layout.replicated(t.shape, x.layout.axes)
        t = DTensor.from_local(t, x.device_mesh, layout.placements, run_check=False)
    wide = t.expand(x.shape)
    return redistributed(wide, x.layout)._local_tensor  # type: ignore[arg-type]


def _check_whole(func: Any, x: DTensor) -> None:
    if not x.layout.partial:
        return
    raise LayoutError(
        f"{func} cannot fill {x._spec}.",
        why="what is pending on an axis is a part of a value; a random number is drawn whole",
        fix="redistribute it to Replicate() or Shard(dim) first, or fill a new tensor: torch.empty_like(x)",
    )


def _check_real(func: Any, block: Tensor) -> None:
    """Where code is traced there are no numbers yet, and a place in the stream must not become a constant.

    `torch.compile` takes this error as a reason to break the graph here and to run the op as it stands.
    """
    if isinstance(block, FakeTensor) or get_proxy_mode() is not None:
        raise DataDependentOutputException(func)


def _check(func: Any, x: Tensor, *args: Any) -> None:
    """Have torch check the arguments, on one number that nobody sees."""
    func(torch.empty(1, dtype=x.dtype), *args, generator=_nobodys)


_nobodys = torch.Generator()


def _filling(func: Any, number: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An op that fills a tensor with numbers of one kind, which its other arguments describe."""
    names = [a.name for a in func._schema.arguments[1:-1]]
    defaults = [a.default_value for a in func._schema.arguments[1:-1]]

    def run(x: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        given = [*args, *(kwargs.get(n, d) for n, d in list(zip(names, defaults, strict=True))[len(args) :])]
        _check(func, x, *given)
        return fill(func, x, _with(number, given), generator)

    return run


def _with(number: Callable[..., Tensor], args: Sequence[Any]) -> Make:
    def make(draw: Draw, cells: Cells, dtype: torch.dtype, device: Any, out: Tensor | None = None) -> Tensor:
        return number(draw, cells, dtype, device, *args, out=out)

    return make


def _any_integers(
    draw: Draw,
    cells: Cells,
    dtype: torch.dtype,
    device: Any,
    *bounds: int | None,
    out: Tensor | None = None,
) -> Tensor:
    """Whole numbers up to a bound, or between two, or in the range that torch has for the dtype."""
    low, high = (None, *bounds)[-2:] if bounds else (None, None)
    return integers(draw, cells, dtype, device, *random_range(dtype, low, high), out=out)


def _by_chances(x: Tensor, p: Tensor, generator: Any = None) -> Tensor:
    """Ones with the chances that another tensor says."""
    check_all((p >= 0) & (p <= 1), "Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    return fill(aten.bernoulli_.Tensor, x, bernoulli, generator, p)


def check_all(fits: Tensor, why: str) -> None:
    """Raise on all ranks if there is an element anywhere that does not fit; who asks for the op asks for this too."""
    if not fits.numel() or is_elsewhere(fits):
        return
    with policy(implicit="allow"):
        if not bool(fits.all()):
            raise RuntimeError(why)


def is_elsewhere(x: Tensor) -> bool:
    """Whether this rank is not on the mesh of a tensor: it knows no values, and passes."""
    return isinstance(x, DTensor) and not is_simulated() and coord_of(x.device_mesh) is None


_NUMBERS: dict[Any, Callable[..., Tensor]] = {
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

FILLS: dict[Any, Callable[..., Tensor]] = {
    **{func: _filling(func, number) for func, number in _NUMBERS.items()},
    aten.bernoulli_.Tensor: _by_chances,
}
"""By op that writes to its first argument and returns it."""
