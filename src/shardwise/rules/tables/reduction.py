"""Reductions: splitting a reduced dim leaves partial values, whose reduction is pending."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwise.rules.call import Call, Local, Out, Slot
from shardwise.rules.letters import Letters, dim_letters
from shardwise.rules.rule import Place, Row, Rule

__all__ = ["ROWS", "reduction_letters"]


def reduction_letters(call: Call, dims: tuple[int, ...]) -> tuple[Letters, Letters]:
    """The letters of a tensor and of its reduction over some dims, which may be kept with size 1."""
    ndim = len(call.shapes[0])
    after = dim_letters(ndim, *dims)
    kept = len(call.outputs[0]) == ndim
    return dim_letters(ndim), after if kept else tuple(x for x in after if x is not None)


def _all_dims(call: Call) -> tuple[int, ...]:
    return tuple(range(len(call.shapes[0])))


def _reduction(
    op: str,
    *,
    linear: bool = False,
    monotone: bool = False,
    dims: Callable[[Call], tuple[int, ...]] = lambda call: call.dims(),
    local: Callable[[Call, Place], Local | None] | None = None,
) -> Row:
    """A row for a reduction over `dims` of its argument, whose partial values are reduced by `op`.

    `linear`, `monotone`: a pending sum, or a pending reduction by `op`, passes through.
    """

    def build(call: Call) -> Rule | None:
        over = dims(call)
        before, after = reduction_letters(call, over)
        if op != "sum" and call.dtypes[0].startswith("complex"):
            before = dim_letters(len(before), *over)  # complex numbers cannot be pending under `op`
        return Rule(
            inputs=(before,),
            outputs=(after,) * len(call.outputs),
            reduced={x: op for i, x in enumerate(before) if i in over and x is not None},
            linear=(frozenset({0}),) if linear else (),
            monotone={op: op} if monotone else {},
            local=local,
        )

    passes = ("; linear in (0)" if linear else "") + (f"; passes {op}" if monotone else "")
    return Row(f"… k -> …; k by {op}{passes}", build)


def _mean(call: Call, place: Place) -> Local | None:
    """Divide the sum over a block by the global count, because blocks may be uneven or empty."""
    dims = call.dims()
    if not any(f"d{i}" in place.sharded for i in dims):
        return None
    count = math.prod(call.shapes[0][d] for d in dims)
    keep = bool(call.args.get("keepdim", False))
    return Local((
        ("aten.sum.dim_IntList", (Slot(0), list(dims), keep), {"dtype": call.args.get("dtype")}),
        ("aten.div.Scalar", (Out(0), count), {}),
    ))  # fmt: skip


def _extremes(dtype: str) -> tuple[float | int | bool, float | int | bool]:
    """The lowest and the highest value of a dtype.

    >>> [_extremes(dtype) for dtype in ("float32", "int8", "uint8", "bool")]
    [(-inf, inf), (-128, 127), (0, 255), (False, True)]
    """
    if dtype == "bool":
        return False, True
    if not dtype.startswith(("int", "uint")):
        return -math.inf, math.inf
    count = 1 << int(dtype.removeprefix("u").removeprefix("int"))
    low = 0 if dtype.startswith("uint") else -count // 2
    return low, low + count - 1


def _empty_as(number: int) -> Callable[[Call, Place], Local | None]:
    """The local program of a max (0) or min (1): the result for an empty block is the lowest or the highest value."""

    def local(call: Call, place: Place) -> Local | None:
        if 0 not in place.inputs[0] or any(call.shapes[0][d] == 0 for d in call.dims()):
            return None
        value = _extremes(call.dtypes[0])[number]
        return Local((("aten.new_full.default", (Slot(0), list(place.outputs[0]), value), {}),))

    return local


_AMAX, _AMIN = _empty_as(0), _empty_as(1)

ROWS: dict[str, Row] = {
    "aten.sum.default": _reduction("sum", linear=True, dims=_all_dims),
    "aten.sum.dim_IntList": _reduction("sum", linear=True),
    "aten.nansum.default": _reduction("sum"),
    "aten.mean.default": _reduction("sum", linear=True, dims=_all_dims, local=_mean),
    "aten.mean.dim": _reduction("sum", linear=True, local=_mean),
    "aten.amax.default": _reduction("max", monotone=True, local=_AMAX),
    "aten.amin.default": _reduction("min", monotone=True, local=_AMIN),
    "aten.max.default": _reduction("max", monotone=True, dims=_all_dims, local=_AMAX),
    "aten.min.default": _reduction("min", monotone=True, dims=_all_dims, local=_AMIN),
    "aten.prod.default": _reduction("product", dims=_all_dims),
    "aten.prod.dim_int": _reduction("product"),
    "aten.any.default": _reduction("max", dims=_all_dims),
    "aten.any.dim": _reduction("max"),
    "aten.any.dims": _reduction("max"),
    "aten.all.default": _reduction("min", dims=_all_dims),
    "aten.all.dim": _reduction("min"),
    "aten.all.dims": _reduction("min"),
    "aten.count_nonzero.dim_IntList": _reduction("sum"),
    "aten.count_nonzero.default": _reduction("sum"),
    "aten.linalg__powsum.default": _reduction("sum"),
}
