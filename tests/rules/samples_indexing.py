"""Calls of indexing and searching ops: indices of many shapes, negative ones too, and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.rules.calls import Call, call, index, x
from torch import Tensor

_INT, _BOOL, _C = torch.int64, torch.bool, torch.complex128


def _signed(high: int, *shape: int) -> Tensor:
    """Indices, some of them negative."""
    indices = index(high, *shape)
    return torch.where(torch.arange(indices.numel()).view(shape) % 2 == 0, indices - high, indices)


def _reads() -> list[Call]:
    return [
        call(x(5, 4), [index(5, 3)]),
        call(x(5, 4), [None, _signed(4, 2)]),
        call(x(9, 3), [_signed(9, 2)]),  # fewer than half: by masked lookup
        call(x(2, 12, 3), [None, index(12, 2, 3)]),
        call(x(7, 2, dtype=_INT), [index(7, 3)]),
        call(x(7, 2, dtype=_BOOL), [index(7, 3)]),
        call(x(7, dtype=_C), [index(7)]),
        call(x(4, 5, 3), [index(4, 2), index(5, 2)]),
        call(x(4, 5, 3), [index(4, 3), None, index(3, 3)]),
        call(x(4, 5, 3), [None, index(5, 2, 1), index(3, 3)]),
        call(x(1, 4), [index(1, 5)]),
        call(x(5, 0), [index(5, 2)]),
        call(x(8, 3), [index(8, 4).to(torch.int32)]),
    ]


def _unsafe_reads() -> list[Call]:
    """Without negative indices, which the op does not check."""
    return [c for c in _reads() if all(i is None or not (i < 0).any() for i in c[0][1])]


def _distinct(high: int, n: int) -> Tensor:
    return torch.randperm(high, generator=torch.Generator().manual_seed(high))[:n]


def _writes(*more: Any) -> list[Call]:
    """Distinct indices unless the op accumulates, because which of two values stays is undefined."""
    return [
        call(x(5, 4), [_distinct(5, 3)], x(3, 4, seed=1), False, *more),
        call(x(5, 4), [None, _distinct(4, 2) - 4], x(5, 2, seed=1), False, *more),
        call(x(7, 2), [_distinct(7, 3)], x(2, seed=1), False, *more),
        call(x(4, 5, 3), [_distinct(4, 2), _distinct(5, 2)], x(3, seed=1), False, *more),
        call(x(4, 5, 3), [_distinct(4, 3), None, _distinct(3, 3)], x(3, 5, seed=1), False, *more),
        call(x(5, 3), [x(5, 3, dtype=_BOOL)], x(), False, *more),
        call(x(5, 3), [x(5, dtype=_BOOL)], x(3, seed=1), False, *more),
        call(x(2, 5, 3), [None, x(5, dtype=_BOOL)], x(2, 1, 3, seed=1), False, *more),
        call(x(6, 2), [index(6, 5)], x(5, 2, seed=1), True, *more),
        call(x(6, 2), [_signed(6, 5)], x(1, 2, seed=1), True, *more),
        call(x(3, 6), [index(3, 2, 2), index(6, 2)], x(2, 2, seed=1), True, *more),
        call(x(6, 2, dtype=_INT), [index(6, 5)], x(5, 2, dtype=_INT, seed=1), True, *more),
        call(x(6, 2, dtype=_BOOL), [index(6, 5)], x(5, 2, dtype=_BOOL, seed=1), True, *more),
        call(x(1, 3), [index(1, 4)], x(4, 3, seed=1), True, *more),
    ]


def _select() -> list[Call]:
    return [
        call(x(5, 4), 0, index(5, 3)),
        call(x(9, 3), 0, index(9, 2)),
        call(x(2, 9, 3), -2, index(9, 4).to(torch.int32)),
        call(x(9, dtype=_BOOL), 0, index(9, 3)),
        call(x(8, 2, dtype=_INT), 0, index(8)),
        call(x(3, 1), 1, index(1, 4)),
        call(x(4, 3), 0, index(4, 0)),
        call(x(7, 2, dtype=_C), 0, index(7, 3)),
    ]


def _add() -> list[Call]:
    return [
        call(x(5, 4), 0, index(5, 7), x(7, 4, seed=1), alpha=-2.5),
        call(x(2, 6, 3), 1, index(6, 3), x(2, 3, 3, seed=1)),
        call(x(1, 3), 0, index(1, 4), x(4, 3, seed=1)),
        call(x(5, dtype=_INT), 0, index(5, 3), x(3, dtype=_INT, seed=1), alpha=2),
        call(x(5, 2, dtype=_BOOL), 0, _distinct(5, 3), x(3, 2, dtype=_BOOL, seed=1)),
        call(x(4, 3), -1, index(3).to(torch.int32), x(4, 1, seed=1)),
        call(x(4, 3), 0, index(4, 0), x(0, 3)),
        call(x(4, 2, dtype=_C), 0, index(4, 3), x(3, 2, dtype=_C, seed=1)),
    ]


def _replace() -> list[Call]:
    return [
        call(x(5, 4), 0, _distinct(5, 3), x(3, 4, seed=1)),
        call(x(2, 6, 3), -2, _distinct(6, 4), x(2, 4, 3, seed=1)),
        call(x(1, 3), 0, index(1, 1), x(1, 3, seed=1)),
        call(x(5, dtype=_BOOL), 0, _distinct(5, 3), x(3, dtype=_BOOL, seed=1)),
        call(x(4, 3), 0, index(4, 0), x(0, 3)),
    ]


def _reduce() -> list[Call]:
    ways = [("prod", True), ("mean", True), ("amax", False), ("amin", True), ("mean", False)]
    cases = [
        call(x(5, 4), 0, index(5, 7), x(7, 4, seed=1)),
        call(x(2, 6, 3), 1, index(6, 3), x(2, 3, 3, seed=1)),
    ]
    out = [call(*args, way, include_self=own) for args, _ in cases for way, own in ways]
    return [*out, call(x(4, 2, dtype=_INT), 0, index(4, 3), x(3, 2, dtype=_INT, seed=1), "amax")]


def _fill(*values: Any) -> list[Call]:
    return [
        call(x(*shape, dtype=dtype), dim, at, value)
        for value in values
        for shape, dtype, dim, at in (
            ((5, 4), torch.float64, 0, _signed(5, 3)),
            ((2, 6, 3), torch.float64, -2, index(6, 2)),
            ((1, 3), torch.float64, 0, index(1, 2)),
            ((7,), _INT, 0, index(7, 2)),
            ((4, 3), _BOOL, 1, index(3, 2)),
            ((4, 3), torch.float64, 0, index(4, 0)),
        )
    ]


def _scatter(*more: Any, dtypes: tuple[torch.dtype, ...] = (torch.float64,), **kwargs: Any) -> list[Call]:
    """Values written along a dim at distinct indices."""
    out: list[Call] = []
    for dtype in dtypes:
        for shape, dim, n in (((5, 4), 0, 3), ((2, 5, 3), -2, 2), ((6,), 0, 6), ((1, 3), 0, 1)):
            size = list(shape)
            size[dim] = n
            at = torch.rand(shape, generator=torch.Generator().manual_seed(n)).argsort(dim).narrow(dim, 0, n)
            out.append(
                call(x(*shape, dtype=dtype), dim, at, *(more or (x(*size, dtype=dtype, seed=1),)), **kwargs)
            )
    partly = call(
        x(5, 4), 0, _distinct(5, 3).view(3, 1).repeat(1, 2), *(more or (x(4, 4, seed=1),)), **kwargs
    )
    return [*out, partly]  # an index smaller than the target


def _scatter_repeated(*more: Any, **kwargs: Any) -> list[Call]:
    """Values written along a dim at indices that may repeat."""
    return [
        call(x(5, 4), 0, index(5, 7, 4), x(7, 4, seed=1), *more, **kwargs),
        call(x(2, 5, 3), -2, index(5, 2, 3, 3), x(2, 3, 3, seed=1), *more, **kwargs),
        call(x(3, 2, dtype=_INT), 0, index(3, 4, 2), x(4, 2, dtype=_INT, seed=1), *more, **kwargs),
        call(x(5, 4), 1, index(4, 3, 3), x(4, 5, seed=1), *more, **kwargs),
        call(x(1, 4), 0, index(1, 3, 4), x(3, 4, seed=1), *more, **kwargs),
        call(x(4, 2), 0, index(4, 0, 2), x(0, 2), *more, **kwargs),
    ]


def _put() -> list[Call]:
    return [
        call(x(5, 4), _distinct(20, 3), x(3, seed=1)),
        call(x(5, 4), index(20, 5), x(5, seed=1), True),
        call(x(6), index(6, 2, 4), x(2, 4, seed=1), True),
        call(x(6, dtype=_INT), index(6, 3), x(3, dtype=_INT, seed=1), True),
        call(x(4), index(4, 6), x(3, 2, seed=1), True),
        call(x(4, dtype=_BOOL), index(4, 3), x(3, dtype=_BOOL, seed=1), True),
        call(x(4), index(4, 0), x(0), True),
        call(x(3, dtype=_C), index(3, 4), x(4, dtype=_C, seed=1), True),
    ]


def _search() -> list[Call]:
    line, rows = x(6).sort().values, x(5, 6).sort(-1).values
    return [
        call(line, x(5, 4, seed=1)),
        call(line, x(3, seed=1), right=True, out_int32=True),
        call(line, x(seed=1)),
        call(rows, x(5, 3, seed=1), side="right"),
        call(x(2, 3, 4).sort(-1).values, x(2, 3, 5, seed=1)),
        call(x(6), x(4, seed=1), sorter=x(6).argsort()),
        call(x(5, 6), x(5, 3, seed=1), sorter=x(5, 6).argsort(-1)),
        call(x(1, 4).sort(-1).values, x(1, 3, seed=1)),
        call(x(0), x(4)),
        call(line, x(0)),
        call(x(6, dtype=_INT).sort().values, x(4, dtype=_INT, seed=1)),
    ]


def _histograms() -> list[Call]:
    return [
        call(x(5, 4), 6, -2, 2),
        call(x(7, dtype=torch.float32), 3, -1, 1.5),
        call(x(2, 3, 2), 1, -1, 1),
        call(x(), 4, -2, 2),
        call(x(0), 4, -2, 2),
    ]


WRITTEN: dict[str, Callable[[], list[Call]]] = {
    "aten.index.Tensor": _reads,
    "aten._unsafe_index.Tensor": _unsafe_reads,
    "aten.index_put.default": _writes,
    "aten._unsafe_index_put.default": lambda: [c for c in _writes() if _is_plain(c)],
    "aten._index_put_impl.default": lambda: [*_writes(), *(c for c in _writes(True) if _is_plain(c))],
    "aten.index_select.default": _select,
    "aten.index_add.default": _add,
    "aten.index_copy.default": _replace,
    "aten.index_reduce.default": _reduce,
    "aten.index_fill.int_Scalar": lambda: _fill(0, 2),
    "aten.index_fill.int_Tensor": lambda: [
        call(a, d, at, torch.tensor(v).to(a.dtype)) for (a, d, at, v), _ in _fill(0, 2)
    ],
    "aten.gather.default": lambda: [
        call(x(5, 4), 0, index(5, 3, 4)),
        call(x(5, 4), 1, index(4, 5, 2)),
        call(x(3, 5, 4), -2, index(5, 3, 2, 3)),
        call(x(9, 3), 0, index(9, 2, 3)),
        call(x(2, 9, dtype=_INT), 1, index(9, 2, 3)),
        call(x(2, 9, dtype=_BOOL), 1, index(9, 2, 3)),
        call(x(1, 3), 0, index(1, 4, 3)),
        call(x(5, 3), 0, index(5, 0, 3)),
        call(x(7, 2, dtype=_C), 0, index(7, 3, 2)),
    ],
    "aten.scatter_add.default": _scatter_repeated,
    "aten.scatter.src": lambda: _scatter(dtypes=(torch.float64, _BOOL)),
    "aten.scatter.value": lambda: [*_scatter(0.0), *_scatter(2, dtypes=(torch.float64, _INT))],
    "aten.scatter.reduce": lambda: [*_scatter_repeated(reduce="add"), *_scatter_repeated(reduce="multiply")],
    "aten.scatter.value_reduce": lambda: [*_scatter(2.0, reduce="add"), *_scatter(-1.5, reduce="multiply")],
    "aten.scatter_reduce.two": lambda: [
        *_scatter_repeated("sum"),
        *_scatter_repeated("mean", include_self=False)[:3],
        *_scatter_repeated("amax")[:3],
        *_scatter_repeated("prod", include_self=False)[:3],
    ],
    "aten.take.default": lambda: [
        call(x(5, 4), index(20, 3)),
        call(x(6), _signed(6, 2, 5)),
        call(x(2, 3, dtype=_BOOL), index(6, 1)),
        call(x(2, 3, dtype=_INT), index(6)),
        call(x(4), index(4, 0)),
    ],
    "aten.put.default": _put,
    "aten.select_scatter.default": lambda: [
        call(x(5, 4), x(4, seed=1), 0, 2),
        call(x(2, 5, 3), x(2, 5, seed=1), -1, -1),
        call(x(6, dtype=_INT), x(dtype=_INT, seed=1), 0, 5),
        call(x(1, 3), x(3, seed=1), 0, 0),
        call(x(3, 0), x(0), 0, 1),
    ],
    "aten.slice_scatter.default": lambda: [
        call(x(5, 4), x(3, 4, seed=1), 0, 1, 4),
        call(x(5, 4), x(5, 4, seed=1), 1, 0, 4),
        call(x(2, 6, 3), x(2, 3, 3, seed=1), 1, 0, 9223372036854775807, 2),
        call(x(6, dtype=_INT), x(0, dtype=_INT), 0, 4, 2),
        call(x(3, 4, dtype=_BOOL), x(3, 2, dtype=_BOOL, seed=1), -1, -2),
    ],
    "aten.diagonal_scatter.default": lambda: [
        call(x(5, 4), x(4, seed=1)),
        call(x(5, 4, 3), x(5, 2, seed=1), 1, 1, 2),
        call(x(3, 5, 3), x(5, 2, seed=1), -1, 0, -1),
        call(x(1, 3, 3), x(1, 3, seed=1), 0, 1, 2),
    ],
    "aten.diagonal_backward.default": lambda: [
        call(x(4), [5, 4], 0, 0, 1),
        call(x(5, 2), [5, 4, 3], 1, 1, 2),
        call(x(5, 2), [3, 5, 3], -1, 0, -1),
        call(x(1, 3), [1, 3, 3], 0, 1, 2),
    ],
    "aten.bucketize.Tensor": lambda: [
        call(x(5, 4), x(6, seed=1).sort().values),
        call(x(3), x(1), right=True, out_int32=True),
        call(x(), x(4, seed=1).sort().values),
        call(x(0, 2), x(0)),
        call(x(5, dtype=_INT), torch.tensor([-3, 0, 4])),
    ],
    "aten.searchsorted.Tensor": _search,
    "aten.isin.Tensor_Tensor": lambda: [
        call(x(5, 4, dtype=_INT), x(2, 3, dtype=_INT, seed=1)),
        call(x(7), torch.cat([x(3), x(2, seed=1)]), invert=True),
        call(x(4, 3), x(0)),
        call(torch.arange(5), torch.arange(2, 9), assume_unique=True),
        call(x(1), x(1)),
        call(x(0, 3), x(2)),
        call(x(3, 2, dtype=_INT), torch.arange(90)),  # so many that the kernel sorts
    ],
    "aten.isin.Tensor_Scalar": lambda: [
        call(x(5, 4, dtype=_INT), 3),
        call(x(6, dtype=_INT), 2, invert=True),
        call(x(1, 3), 0.5, assume_unique=True),
        call(x(0, 3), 1),
    ],
    "aten.histc.default": _histograms,
}  # fmt: skip


def _is_plain(c: Call) -> bool:
    """Whether no index is a mask or negative, as ops without checks require."""
    return all(i is None or (i.dtype is not _BOOL and not (i < 0).any()) for i in c[0][1])
