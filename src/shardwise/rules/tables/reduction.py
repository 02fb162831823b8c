"""Reductions: over a split dim each rank reduces its block, and the rest is pending."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwise.rules.call import Call, Local, Out, Slot
from shardwise.rules.rule import Letters, Place, Row, Rule

__all__ = ["ROWS", "reduction", "reduction_letters"]


def reduction_letters(call: Call, dims: tuple[int, ...]) -> tuple[Letters, Letters]:
    """Letters of a tensor and of its reduction over some dims, kept as size 1 or not."""
    ndim = len(call.shapes[0])
    before: Letters = tuple(f"d{i}" for i in range(ndim))
    if len(call.outputs[0]) == ndim and dims:
        return before, tuple(None if i in dims else x for i, x in enumerate(before))
    return before, tuple(x for i, x in enumerate(before) if i not in dims)


def _every(call: Call) -> tuple[int, ...]:
    return tuple(range(len(call.shapes[0])))


def reduction(
    op: str,
    *,
    linear: bool = False,
    monotone: bool = False,
    dims: Callable[[Call], tuple[int, ...]] = lambda call: call.dims(),
    local: Callable[[Call, Place], Local | None] | None = None,
) -> Row:
    """A row for a reduction of its first argument whose parts are reduced by `op`."""

    def build(call: Call) -> Rule | None:
        over = dims(call)
        before, after = reduction_letters(call, over)
        if op != "sum" and call.dtypes[0].startswith("complex"):
            # such parts cannot be pending, so what is reduced must be whole
            before = tuple(None if i in over else x for i, x in enumerate(before))
        return Rule(
            inputs=(before,),
            outputs=(after,) * len(call.outputs),
            reduced={x: op for i, x in enumerate(before) if i in over and x is not None},
            linear=(frozenset({0}),) if linear else (),
            monotone={op: op} if monotone else {},
            local=local,
        )

    return Row(f"… k -> …; k by {op}" + ("; linear in (0)" if linear else ""), build)


def _mean(call: Call, place: Place) -> Local | None:
    """A mean over a split dim is a sum over the global count: blocks may be uneven, or empty."""
    dims = call.dims()
    if not any(f"d{i}" in place.sharded for i in dims):
        return None
    count = math.prod(call.shapes[0][d] for d in dims)
    keep = bool(call.args.get("keepdim", False))
    return Local((
        ("aten.sum.dim_IntList", (Slot(0), list(dims), keep), {"dtype": call.args.get("dtype")}),
        ("aten.div.Scalar", (Out(0), count), {}),
    ))  # fmt: skip


def _bits(dtype: str) -> int:
    return int(dtype.removeprefix("u").removeprefix("int"))


def lowest(dtype: str) -> float | int | bool:
    """The value below all others of a dtype.

    >>> lowest("float32"), lowest("int8"), lowest("uint8"), lowest("bool")
    (-inf, -128, 0, False)
    """
    if dtype == "bool":
        return False
    if dtype.startswith("uint"):
        return 0
    return -(1 << (_bits(dtype) - 1)) if dtype.startswith("int") else -math.inf


def highest(dtype: str) -> float | int | bool:
    """The value above all others of a dtype."""
    if dtype == "bool":
        return True
    if dtype.startswith("uint"):
        return (1 << _bits(dtype)) - 1
    return (1 << (_bits(dtype) - 1)) - 1 if dtype.startswith("int") else math.inf


def _extreme(of: Callable[[str], float | int | bool]) -> Callable[[Call, Place], Local | None]:
    """An empty block has no extreme; it holds what any other value beats."""

    def local(call: Call, place: Place) -> Local | None:
        if 0 not in place.inputs[0] or 0 in call.shapes[0]:
            return None
        return Local((("aten.new_full.default", (Slot(0), list(place.outputs[0]), of(call.dtypes[0])), {}),))

    return local


_AMAX, _AMIN = _extreme(lowest), _extreme(highest)

ROWS: dict[str, Row] = {
    "aten.sum.default": reduction("sum", linear=True, dims=_every),
    "aten.sum.dim_IntList": reduction("sum", linear=True),
    "aten.nansum.default": reduction("sum"),
    "aten.mean.default": reduction("sum", linear=True, dims=_every, local=_mean),
    "aten.mean.dim": reduction("sum", linear=True, local=_mean),
    "aten.amax.default": reduction("max", monotone=True, local=_AMAX),
    "aten.amin.default": reduction("min", monotone=True, local=_AMIN),
    "aten.max.default": reduction("max", monotone=True, dims=_every, local=_AMAX),
    "aten.min.default": reduction("min", monotone=True, dims=_every, local=_AMIN),
    "aten.prod.default": reduction("product", dims=_every),
    "aten.prod.dim_int": reduction("product"),
    "aten.any.default": reduction("max", dims=_every),
    "aten.any.dim": reduction("max"),
    "aten.any.dims": reduction("max"),
    "aten.all.default": reduction("min", dims=_every),
    "aten.all.dim": reduction("min"),
    "aten.all.dims": reduction("min"),
    "aten.count_nonzero.dim_IntList": reduction("sum"),
    "aten.count_nonzero.default": reduction("sum"),
}
