"""How values of any dtype are sent: as bytes where they only move, as numbers where they are reduced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.layout import LayoutError

__all__ = [
    "Codec",
    "bytes_of",
    "check_reducible",
    "divide_in_place",
    "divided",
    "identity_value",
    "mean_codec",
    "move_codec",
    "reduce_all",
    "reduce_codec",
    "reduce_rows",
    "scaled",
]


class Codec(NamedTuple):
    """How a flat tensor is encoded to be sent and decoded when received.

    `op` is the reduction of encoded values, `scale` the number of encoded elements per element.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    op: str = ""
    scale: int = 1

    @property
    def is_identity(self) -> bool:
        """Whether values are sent as they are."""
        return self.encode is _same


def _same(t: Tensor) -> Tensor:
    return t


_AS_IS = Codec(_same, _same)
# Dtypes that every backend can send; all others are sent as bytes.
_CARRIED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64}
)


def move_codec(dtype: torch.dtype) -> Codec:
    """The codec for values that are moved and not reduced."""
    if dtype in _CARRIED:
        return _AS_IS
    return Codec(bytes_of, lambda t: t.view(dtype), scale=dtype.itemsize)


def bytes_of(t: Tensor) -> Tensor:
    """The bytes of a flat tensor.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)[1:, 1])
    tensor([4, 0], dtype=torch.uint8)
    """
    row = _plain(t).contiguous()
    # a single element is contiguous whatever its stride, but `view` requires a stride of 1
    return (row if row.stride(0) == 1 else row.as_strided(row.shape, (1,))).view(torch.uint8)


def _plain(t: Tensor) -> Tensor:
    """The tensor without lazy conjugation and negation, which its bytes do not show."""
    return t.resolve_conj().resolve_neg()


def check_reducible(dtype: torch.dtype, op: str) -> None:
    """Raise if values of a dtype cannot have a pending reduction by `op`."""
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise LayoutError(
            f"Partial(avg) of {dtype} cannot be reduced.",
            why="The mean of integers is not an integer.",
            fix="Use Partial('sum'), or a floating-point tensor.",
        )
    if dtype.is_complex and op in ("max", "min", "product"):
        raise LayoutError(
            f"Partial({op}) of {dtype} cannot be reduced.",
            why="Complex numbers have no order."
            if op != "product"
            else "Backends reduce real and imaginary parts separately.",
            fix="Use Partial('sum') or Partial('avg').",
        )
    if dtype is torch.float8_e8m0fnu:
        raise LayoutError(
            f"Partial({op}) of {dtype} cannot be reduced.",
            why="It is a dtype for scales: powers of two, without a zero.",
            fix="x.to(torch.float32) first",
        )


# The dtype to reduce in, where backends cannot reduce the dtype itself.
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
    """The codec for values that are reduced by `op`: sum, max, min or product."""
    if dtype is torch.bool:
        return Codec(lambda t: t.to(torch.uint8), lambda t: t.to(torch.bool), _BOOL_OPS[op])
    if dtype.is_complex:
        check_reducible(dtype, op)  # real and imaginary parts are sent as separate numbers
        return Codec(
            lambda t: torch.view_as_real(_plain(t)).flatten(), lambda t: _as_complex(t, dtype), op, 2
        )
    wider = _WIDER.get(dtype)
    if op in ("max", "min") and dtype.is_floating_point:
        return _ordered_codec(dtype, op)
    if wider is not None:
        return Codec(lambda t: t.to(wider), lambda t: t.to(dtype), op)
    if dtype is torch.uint64:
        # Backends cannot reduce uint64. As int64, sums and products have the same bits; subtracting 2**63 keeps the order.
        first = torch.iinfo(torch.int64).min if op in ("max", "min") else 0
        return Codec(lambda t: t.view(torch.int64) ^ first, lambda t: (t ^ first).view(dtype), op)
    return Codec(_same, _same, op)


def mean_codec(dtype: torch.dtype, op: str, mean: int) -> tuple[Codec, float]:
    """The codec for values that are reduced by `op` and then divided by `mean`, and what is left to divide by.

    Terms in half precision are divided by a power of 2 before they are added, which is exact: their sum may be too large
    for the dtype although their mean is not.

    >>> codec, left = mean_codec(torch.float16, "sum", 3)
    >>> codec.encode(torch.tensor([60000.0], dtype=torch.float16)), left
    (tensor([15000.], dtype=torch.float16), 0.75)
    """
    codec = reduce_codec(dtype, op)
    if mean == 1 or dtype not in (torch.float16, torch.complex32):
        return codec, mean
    by = 1 << (mean - 1).bit_length()
    return codec._replace(encode=lambda t: codec.encode(t) / by), mean / by


def _as_complex(t: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(t.view(-1, 2)).to(dtype)


def _ordered_codec(dtype: torch.dtype, op: str) -> Codec:
    """The codec for max and min of floats: integers of the same order, with NaN as the extreme.

    Backends disagree on max(NaN, x), so ranks could end with different values. The maximum of integers is unambiguous,
    and here it is that of torch: NaN wins.
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
    """A tensor times a number, in the dtype of the tensor."""
    wide = _compute(t.dtype)
    return t * by if wide is t.dtype else (t.to(wide) * by).to(t.dtype)


def divided(t: Tensor, by: float) -> Tensor:
    """A tensor divided by a number, in the dtype of the tensor."""
    return t if by == 1 else (t.to(_compute(t.dtype)) / by).to(t.dtype)


def divide_in_place(t: Tensor, by: float) -> Tensor:
    """Divide a tensor that belongs to the caller; returned, in its own memory where torch has arithmetic for its dtype."""
    in_place = type(t) is Tensor and (t.dtype.is_floating_point or t.is_complex())
    return t.div_(by) if by != 1 and in_place and _compute(t.dtype) is t.dtype else divided(t, by)


def _compute(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in, where torch has no arithmetic for the dtype itself."""
    if dtype is torch.complex32:
        return torch.complex64
    return _WIDER.get(dtype, dtype) if dtype.is_floating_point else dtype


def reduce_all(parts: list[Tensor], op: str) -> Tensor:
    """The reduction of some tensors in their order, in their dtype.

    >>> reduce_all([torch.tensor([True, False]), torch.tensor([True, True])], "product")
    tensor([ True, False])
    """
    if len(parts) == 1:
        return parts[0].clone()
    return reduce_rows(torch.stack([p.reshape(-1) for p in parts]), op).view(parts[0].shape)


def reduce_rows(rows: Tensor, op: str, by: float = 1) -> Tensor:
    """The reduction of the rows of a matrix in their order, in their dtype; each is divided by `by` before."""
    codec = reduce_codec(rows.dtype, op)
    rows = divided(rows, by)
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
    # torch sums small integers in int64
    return codec.decode(out.to(stack.dtype))


def identity_value(dtype: torch.dtype, op: str) -> float | int | bool:
    """The value that does not change a reduction by `op`."""
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        # of float8 dtypes without infinity, the largest value does the same
        has_inf = dtype.itemsize > 1 or dtype is torch.float8_e5m2
        largest = math.inf if has_inf else torch.finfo(dtype).max
        return largest if op == "min" else -largest
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min
