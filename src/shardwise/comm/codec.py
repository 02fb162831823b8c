"""How values of any dtype go over a wire: as bits where they only move, as numbers where they are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.layout import LayoutError

__all__ = [
    "Codec",
    "bytes_of",
    "check_reducible",
    "divided",
    "identity_value",
    "move_codec",
    "reduce_all",
    "reduce_codec",
    "reduce_rows",
    "scaled",
]


class Codec(NamedTuple):
    """What to do with a flat tensor before and after the wire; `scale` is how many wire elements one makes."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    op: str = ""
    scale: int = 1

    @property
    def is_identity(self) -> bool:
        return self.encode is _same


def _same(t: Tensor) -> Tensor:
    return t


_AS_IS = Codec(_same, _same)
# Dtypes that every backend moves; all others go as bytes.
_CARRIED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64}
)


def move_codec(dtype: torch.dtype) -> Codec:
    """For values that are moved and never looked at."""
    if dtype in _CARRIED:
        return _AS_IS
    return Codec(bytes_of, lambda t: t.view(dtype), scale=dtype.itemsize)


def bytes_of(t: Tensor) -> Tensor:
    """The bits of a flat tensor, as bytes.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)[1:, 1])
    tensor([4, 0], dtype=torch.uint8)
    """
    row = _plain(t).contiguous()
    # a single element lies in a row whatever its stride, but a view as bytes wants the stride to say so
    return (row if row.stride(0) == 1 else row.as_strided(row.shape, (1,))).view(torch.uint8)


def _plain(t: Tensor) -> Tensor:
    """The value itself: conjugation and negation are flags that bits do not show."""
    return t.resolve_conj().resolve_neg()


def check_reducible(dtype: torch.dtype, op: str) -> None:
    """Raise if values of a dtype cannot be pending under `op`."""
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise LayoutError(
            f"Partial(avg) of {dtype} is not a value of {dtype}.",
            why="the mean of integers is not an integer",
            fix="use Partial(sum), or a floating-point tensor",
        )
    if dtype.is_complex and op in ("max", "min", "product"):
        raise LayoutError(
            f"Partial({op}) of {dtype} cannot be reduced.",
            why="complex numbers have no order"
            if op != "product"
            else "backends reduce the parts one by one",
            fix="use Partial(sum) or Partial(avg)",
        )
    if dtype is torch.float8_e8m0fnu:
        raise LayoutError(
            f"Partial({op}) of {dtype} cannot be reduced.",
            why="it is a dtype of scales, powers of two without a zero",
            fix="x.to(torch.float32) first",
        )


# What to compute in where the backend cannot add the dtype itself.
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
_BOOL_OPS = {"sum": "max", "max": "max", "product": "min", "min": "min"}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def reduce_codec(dtype: torch.dtype, op: str) -> Codec:
    """For values that are reduced by `op` (sum, max, min or product) on the way."""
    if dtype is torch.bool:
        return Codec(lambda t: t.to(torch.uint8), lambda t: t.to(torch.bool), _BOOL_OPS[op])
    if dtype.is_complex:
        check_reducible(dtype, op)  # real and imaginary parts go as numbers of their own, which only add
        return Codec(
            lambda t: torch.view_as_real(_plain(t)).flatten(), lambda t: _as_complex(t, dtype), op, 2
        )
    wider = _WIDER.get(dtype)
    if op in ("max", "min") and dtype.is_floating_point:
        return _ordered_codec(dtype, op)
    if wider is not None:
        return Codec(lambda t: t.to(wider), lambda t: t.to(dtype), op)
    if dtype is torch.uint64:
        # no backend reduces these; signed ones add and multiply alike, and order alike from the other end
        first = torch.iinfo(torch.int64).min if op in ("max", "min") else 0
        return Codec(lambda t: t.view(torch.int64) ^ first, lambda t: (t ^ first).view(dtype), op)
    return Codec(_same, _same, op)


def _as_complex(t: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(t.view(-1, 2)).to(dtype)


def _ordered_codec(dtype: torch.dtype, op: str) -> Codec:
    """Floats as integers of the same order, NaN outermost.

    Backends disagree on max(NaN, x), so ranks could be left with different values; integers have one answer,
    and it is torch's: NaN wins.
    """
    wide = dtype if dtype in _BITS else torch.float32
    bits = _BITS[wide]
    mask = torch.iinfo(bits).max
    nan = torch.iinfo(bits).max if op == "max" else torch.iinfo(bits).min

    def encode(t: Tensor) -> Tensor:
        t = t.to(wide)
        raw = t.view(bits)
        return torch.where(t.isnan(), nan, torch.where(raw < 0, raw ^ mask, raw))

    def decode(t: Tensor) -> Tensor:
        raw = torch.where(t < 0, t ^ mask, t).view(wide)
        return torch.where(t == nan, float("nan"), raw).to(dtype)

    return Codec(encode, decode, op)


def scaled(t: Tensor, by: float) -> Tensor:
    """A tensor times a number, in its own dtype."""
    wide = _compute(t.dtype)
    return t * by if wide is t.dtype else (t.to(wide) * by).to(t.dtype)


def divided(t: Tensor, by: int) -> Tensor:
    """A tensor divided by a number, in its own dtype."""
    return t if by == 1 else (t.to(_compute(t.dtype)) / by).to(t.dtype)


def _compute(dtype: torch.dtype) -> torch.dtype:
    """What to compute in where torch has no arithmetic for the dtype itself."""
    if dtype is torch.complex32:
        return torch.complex64
    return _WIDER.get(dtype, dtype) if dtype.is_floating_point else dtype


def reduce_all(parts: list[Tensor], op: str) -> Tensor:
    """The parts reduced in their order, in their own dtype.

    >>> reduce_all([torch.tensor([True, False]), torch.tensor([True, True])], "product")
    tensor([ True, False])
    """
    if len(parts) == 1:
        return parts[0].clone()
    return reduce_rows(torch.stack([p.reshape(-1) for p in parts]), op).view(parts[0].shape)


def reduce_rows(rows: Tensor, op: str) -> Tensor:
    """The rows of a matrix reduced in their order, in their own dtype."""
    codec = reduce_codec(rows.dtype, op)
    flat = codec.encode(rows.reshape(-1))
    stack = flat.view(len(rows), flat.numel() // len(rows))
    match codec.op:
        case "sum":
            out = stack.sum(0)
        case "product":
            out = stack.prod(0)
        case "max":
            out = stack.amax(0)
        case _:
            out = stack.amin(0)
    # sums of small integers have a wider dtype
    return codec.decode(out.to(stack.dtype))


def identity_value(dtype: torch.dtype, op: str) -> float | int | bool:
    """What a rank holds that adds nothing to a reduction."""
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        # some float8 types have no infinity; their largest value is as good
        info = torch.finfo(dtype)
        has_inf = dtype.itemsize > 1 or dtype is torch.float8_e5m2
        return (
            (float("inf") if has_inf else info.max)
            if op == "min"
            else (float("-inf") if has_inf else info.min)
        )
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min
