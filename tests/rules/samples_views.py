"""Calls of views, of ops that create tensors, and of torch's internal ops.

Internal ops, whose names begin with an underscore, may crash on arguments that public ones reject, so their calls are
not generated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.rules.calls import Call, call, x

_INT, _BOOL, _C = torch.int64, torch.bool, torch.complex128
_F = torch.float64
_SHAPES = ((5, 4), (2, 3, 5), (1, 3), (0, 4), ())


def _each(*dtypes: torch.dtype) -> list[Call]:
    """One call per shape, with alternating dtypes."""
    kinds = dtypes or (_F,)
    return [
        call(x(*shape, dtype=kinds[i % len(kinds)], seed=i))
        for i, shape in enumerate((*_SHAPES, (7,), (6, 2)))
    ]


def _likes(*more: Any, **kwargs: Any) -> list[Call]:
    return [call(*args, *more, **kwargs) for args, _ in _each(_F, _INT, _BOOL)]


def _new(*more: Any) -> list[Call]:
    return [
        call(x(5, 4), [5, 4], *more),
        call(x(5, 4), [3], *more),
        call(x(6, dtype=_INT), [6], *more),
        call(x(2, 3), [], *more),
        call(x(1, 3), [1, 3], *more, dtype=torch.float32),
        call(x(0, 3), [0, 3], *more),
    ]


def _squeeze(*rest: Any) -> list[Call]:
    """Tensors with and without dims of size 1."""
    return [
        call(x(1, 5, 1), *rest),
        call(x(4, 6, 1), *rest),
        call(x(1, 1, 1, dtype=_INT), *rest),
        call(x(1, 0, 1), *rest),
        call(x(3, 4, 5, dtype=_BOOL), *rest),
    ]


def _unsqueeze() -> list[Call]:
    return [
        call(x(*s), d)
        for s, d in (((5, 4), 0), ((5, 4), -1), ((2, 3, 5), 1), ((), 0), ((0, 3), 2), ((1,), -2))
    ]


def _diagonals() -> list[Call]:
    return [
        call(x(5, 4)),
        call(x(5, 4, 3), 1, 1, 2),
        call(x(3, 5, 3), -1, 0, -1),
        call(x(1, 3, 3, dtype=_INT), 0, 1, 2),
        call(x(4, 0, 2), 0, 1, 2),
        call(x(2, 3, 2, 3, dtype=_BOOL), 0, 0, 2),
    ]


def _glu_backward() -> list[Call]:
    return [
        call(x(5, 2, seed=1), x(5, 4), 1),
        call(x(1, 3, 5, seed=1), x(2, 3, 5), 0),
        call(x(1, 3, seed=1), x(1, 6), -1),
        call(x(0, 2), x(0, 4), 1),
    ]


def _prelu(*, backward: bool) -> list[Call]:
    calls = [
        (x(5, 4), x(1, 4, seed=1)),
        (x(2, 3, 5), x(1, 3, 1, seed=1)),
        (x(1, 3), x(1, 3, seed=1)),
        (x(0, 4), x(1, 1)),
    ]
    return [call(*((x(*a.shape, seed=2),) if backward else ()), a, w.expand_as(a).clone()) for a, w in calls]


def _softmaxes(*more: Any) -> list[Call]:
    return [
        call(x(5, 4), 1, *more),
        call(x(3, 4, 2), 0, *more),
        call(x(2, 5, 3), -2, *more),
        call(x(4), 0, *more),
        call(x(1, 3), 1, *more),
        call(x(0, 3), 1, *more),
    ]


def _reductions(*before: Any, shapes: tuple[tuple[int, ...], ...] = _SHAPES) -> list[Call]:
    return [call(x(*s), *before) for s in shapes if 0 not in s]


def _norms(*, dtype: bool) -> list[Call]:
    more = {"dtype": torch.float64} if dtype else {}
    kind = torch.float32 if dtype else _F
    return [
        call(x(5, 4, dtype=kind), 2, [1], False, **more),
        call(x(2, 5, 3, dtype=kind), 1, [0, 2], True, **more),
        call(x(4, 3, dtype=kind), float("inf"), [0], False, **more),
        call(x(1, 3, dtype=kind), None, [-1], False, **more),
    ]


_COMPLEX = (_C, torch.complex64)

WRITTEN: dict[str, Callable[[], list[Call]]] = {
    "aten.view.dtype": lambda: [
        call(x(5, 4), torch.int64),
        call(x(5, 4, 2, dtype=torch.float32), torch.float64),
        call(x(3, 4), torch.int16),
        call(x(6, dtype=_C), torch.float64),
        call(x(4, 3, dtype=_BOOL), torch.uint8),
        call(x(dtype=torch.float32), torch.int32),
        call(x(0, 4), torch.float32),
    ],
    **{f"aten.{name}.default": _likes for name in ("zeros_like", "ones_like", "empty_like")},
    "aten.full_like.default": lambda: _likes(1),
    **{f"aten.{name}.default": _new for name in ("new_zeros", "new_ones", "new_empty")},
    "aten.new_full.default": lambda: _new(2),
    "aten.new_empty_strided.default": lambda: [
        call(a, size, list(torch.empty(size).stride()), **k) for (a, size), k in _new()
    ],
    "aten.detach.default": lambda: _each(_F, _INT, _BOOL, _C),
    "aten.alias.default": lambda: _each(_F, _INT, _BOOL, _C),
    "aten.t.default": lambda: [call(x(5, 4)), call(x(3)), call(x()), call(x(1, 6, dtype=_INT)), call(x(0, 3))],
    "aten.unbind.int": lambda: [call(x(5, 4)), call(x(2, 3, 3)), call(x(2, 3, 5), -1), call(x(3, dtype=_BOOL), 0), call(x(2, 0), 0)],
    "aten._reshape_copy.default": lambda: [
        call(x(4, 6), [24]),
        call(x(4, 6), [2, 2, 6]),
        call(x(12, dtype=_INT), [3, 4]),
        call(x(2, 3, 5), [6, 5]),
        call(x(0, 4), [4, 0]),
    ],
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": lambda: [*_squeeze(0), *_squeeze(-1)[:2]],
    "aten.squeeze.dims": lambda: [*_squeeze([0, -1]), *_squeeze([2])[:2]],
    "aten.unsqueeze.default": _unsqueeze,
    "aten.diagonal.default": _diagonals,
    "aten.unfold_copy.default": lambda: [
        call(x(5, 4), 0, 2, 1),
        call(x(2, 7, 3), -2, 3, 2),
        call(x(6, dtype=_INT), 0, 6, 1),
        call(x(3, 0), 1, 0, 1),
    ],
    "aten.diag_embed.default": lambda: [
        call(x(5, 4)),
        call(x(5, 3), 1, 0, 2),
        call(x(2, 5, 2), -1, -2, 1),
        call(x(3, dtype=_INT)),
        call(x(0, 2)),
    ],
    "aten.repeat.default": lambda: [
        call(x(5, 4), [1, 2]),
        call(x(5, 4), [3, 1, 1]),
        call(x(6, dtype=_INT), [2]),
        call(x(1, 3), [4, 1]),
        call(x(5, 4), [0, 1]),
        call(x(), [3]),
    ],
    "aten.rot90.default": lambda: [
        call(x(5, 4)),
        call(x(2, 5, 3), 2, [1, 2]),
        call(x(3, 4, 2), -1, [0, -1]),
        call(x(3, 4, 2, dtype=_BOOL), 4, [0, 1]),
    ],
    "aten.narrow_copy.default": lambda: [
        call(x(5, 4), 0, 1, 3),
        call(x(2, 6, 3), -2, 2, 4),
        call(x(6, dtype=_INT), 0, 0, 6),
        call(x(3, 4), 1, 2, 0),
    ],
    "aten.glu_backward.default": _glu_backward,
    "aten._conj.default": lambda: _each(*_COMPLEX),
    "aten._conj_physical.default": lambda: _each(*_COMPLEX, _F),
    "aten._neg_view.default": lambda: _each(_F, _INT, _C),
    "aten._prelu_kernel.default": lambda: _prelu(backward=False),
    "aten._prelu_kernel_backward.default": lambda: _prelu(backward=True),
    "aten._softmax.default": lambda: _softmaxes(False),
    "aten._log_softmax.default": lambda: _softmaxes(False),
    "aten._safe_softmax.default": _softmaxes,
    "aten._aminmax.default": _reductions,
    "aten._aminmax.dim": lambda: [*_reductions(-1), *_reductions(0, True)],
    "aten.aminmax.default": lambda: [
        *(call(*args, dim=-1) for args, _ in _reductions()),
        call(x(5, 4), dim=0, keepdim=True),
        call(x(2, 3, 5)),
    ],
    "aten.norm.Scalar": lambda: [*_reductions(2), *_reductions(1.5)],
    "aten.norm.ScalarOpt_dtype": lambda: [call(x(*s), p, dtype=torch.float64) for s in _SHAPES[:3] for p in (2, 1)],
    "aten.norm.ScalarOpt_dim": lambda: _norms(dtype=False),
    "aten.norm.ScalarOpt_dim_dtype": lambda: _norms(dtype=True),
}  # fmt: skip
