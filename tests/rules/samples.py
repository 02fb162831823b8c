"""Calls that rows are verified on: written by hand, or recorded from torch's own samples.

Most rows need neither, because `shardwise.rules.verify` generates calls that fit an op's schema and its row's letters.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tests.rules import samples_indexing, samples_matrices, samples_networks, samples_prims, samples_views
from tests.rules.calls import Call, copy_tensors, name_of
from tests.rules.calls import call as _call
from tests.rules.calls import index as _index
from tests.rules.calls import x as _x
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MOST = 5  # recorded calls per op
_LARGEST = 400  # elements per tensor of a recorded call


def _of_images(ndim: int, *rest: tuple[Any, ...]) -> list[Call]:
    """Images with `ndim` spatial dims, with and without a batch, uneven, of size 1 and empty."""
    spatial = {1: (7,), 2: (6, 5), 3: (4, 5, 4)}[ndim]
    return [_call(_x(*lead, *spatial), *r) for lead in ((5, 3), (2,), (1, 4), (0, 3)) for r in rest]


def _unpool(ndim: int) -> list[Call]:
    """Maxima of disjoint windows and their indices."""
    pool = getattr(torch.nn.functional, f"max_pool{ndim}d")
    rest: tuple[Any, ...] = ([2] * ndim, [0] * ndim) if ndim == 3 else ()
    out = []
    for lead in ((5, 3), (2,), (1, 4)):
        maxima, indices = pool(_x(*lead, *[4] * ndim), 2, return_indices=True)
        out.append(_call(maxima, indices, [4] * ndim, *rest))
    return out


def _fractional(ndim: int) -> list[Call]:
    """Pools with windows at random positions, given as numbers from 0 to 1."""
    shapes = [(5, 3), (2, 1), (1, 4)]
    samples = [(torch.arange(n * c * ndim) * 0.37 % 1).view(n, c, ndim).double() for n, c in shapes]
    return [
        _call(_x(*lead, *[6] * ndim), [2] * ndim, [3] * ndim, u)
        for lead, u in zip(shapes, samples, strict=True)
    ]


def _fractional_backward(ndim: int) -> list[Call]:
    out = []
    for (x, kernel, size, u), _ in _fractional(ndim):
        maxima, indices = getattr(torch.ops.aten, f"fractional_max_pool{ndim}d")(x, kernel, size, u)
        out.append(_call(maxima.cos(), x, kernel, size, indices))
    return out


def _pad(ndim: int) -> list[Call]:
    return _of_images(ndim, ([1, 2] * ndim,))


def _upsample(ndim: int, *more: Any) -> list[Call]:
    spatial = {1: (5,), 2: (4, 3), 3: (2, 3, 2)}[ndim]
    size = [n + 2 for n in spatial]
    rest = (*more, *([None] * ndim))
    return [_call(_x(5, 3, *spatial), size, *rest), _call(_x(1, 4, *spatial), size, *rest)]


def _views() -> list[Call]:
    return [
        _call(_x(4, 6), [24]),
        _call(_x(4, 6), [2, 2, 6]),
        _call(_x(12, dtype=torch.int64), [3, 4]),
        _call(_x(5, 1, 3), [5, 3]),
        _call(_x(2, 3, 5), [6, 5]),
        _call(_x(0, 4), [4, 0]),
        _call(_x(1, dtype=torch.bool), []),
    ]


def _split_sizes() -> list[Call]:
    return [
        _call(_x(5, 4), [2, 3]),
        _call(_x(5, 4), [1, 0, 3], 1),
        _call(_x(3, 6, 2, dtype=torch.complex128), [6], -2),
    ]


def _layer_norm() -> list[Call]:
    return [
        _call(_x(5, 4), [4], _x(4, seed=1), _x(4, seed=2), 1e-5),
        _call(_x(3, 5, 4), [5, 4], _x(5, 4, seed=1), None, 1e-5),
        _call(_x(2, 3, 4), [4], None, None, 1e-3),
        _call(_x(6, 3, dtype=torch.float32), [3], None, _x(3, dtype=torch.float32), 1e-5),
    ]


def _layer_norm_backward() -> list[Call]:
    out = []
    for (x, shape, weight, bias, eps), _ in _layer_norm():
        _, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        for mask in ([True, True, True], [True, False, False]):
            want = [mask[0], mask[1] and weight is not None, mask[2] and bias is not None]
            out.append(_call(_x(*x.shape, dtype=x.dtype, seed=9), x, shape, mean, rstd, weight, bias, want))
    return out


def _embedding() -> list[Call]:
    return [
        _call(_x(7, 3), _index(7, 5)),
        _call(_x(6, 4), _index(6, 2, 3)),
        _call(_x(1, 2), _index(1, 4)),
        _call(_x(4, 3, dtype=torch.float32), _index(4)),
        _call(_x(5, 3), _index(5, 0)),
        _call(_x(5, 3), _index(5, 4), 2),
    ]


def _embedding_backward() -> list[Call]:
    return [
        _call(_x(5, 3), _index(7, 5), 7, -1, False),
        _call(_x(2, 3, 4), _index(6, 2, 3), 6, 2, False),
        _call(_x(5, 3), _index(3, 5), 3, -1, True),
        _call(_x(1, 4), _index(2, 1), 2, -1, False),
    ]


def _softmax_backward(log: bool) -> list[Call]:
    out = []
    for shape, dim in (((5, 4), 1), ((3, 4, 2), 0), ((2, 5, 3), -2), ((4,), 0)):
        x = _x(*shape)
        y = x.log_softmax(dim) if log else x.softmax(dim)
        out.append(_call(_x(*shape, seed=5), y, dim, torch.float64))
    return out


def _casts() -> list[Call]:
    pairs = (
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.float64, torch.int64),
        (torch.int64, torch.float64),
        (torch.uint8, torch.int64),
        (torch.bool, torch.float64),
        (torch.bool, torch.bool),
        (torch.float64, torch.complex128),
        (torch.complex128, torch.complex64),
        (torch.complex128, torch.float64),
    )
    return [_call(_x(5, 3, dtype=a) * (3 if a.is_floating_point else 1), dtype=b) for a, b in pairs]


def _copies() -> list[Call]:
    kinds = (torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex128)
    return [
        _call(_x(4, 3, dtype=a), _x(4, 3, dtype=b, seed=1) * (3 if b.is_floating_point else 1))
        for a in kinds
        for b in kinds
        if not (b.is_complex and not a.is_complex)
    ]


def _mixed(*more: Any) -> list[Call]:
    """Two tensors of different dtypes: a pending sum in one of them is cast."""
    kinds = (torch.float64, torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex128)
    return [_call(_x(5, 3, dtype=a), _x(3, dtype=b, seed=1), *more) for a in kinds for b in kinds]


def _narrow() -> list[Call]:
    return [
        _call(_x(5, 4, dtype=d)) for d in (torch.uint8, torch.int8, torch.bool, torch.int64, torch.float64)
    ]


def _dims(*calls: tuple[Any, ...]) -> list[Call]:
    kinds = (torch.float64, torch.uint8, torch.int8, torch.bool, torch.int64, torch.complex128)
    return [_call(_x(5, 4, 2, dtype=d), *c) for d in kinds for c in calls]


WRITTEN: dict[str, Callable[[], list[Call]]] = {
    "aten.view.default": _views,
    "aten._unsafe_view.default": _views,
    "aten.reshape.default": _views,
    "aten._reshape_alias.default": lambda: [
        _call(x, shape, list(torch.empty(shape).stride())) for (x, shape), _ in _views() if x.numel()
    ],
    "aten.expand.default": lambda: [
        _call(_x(5, 1), [5, 3]),
        _call(_x(1, 4), [3, 5, 4]),
        _call(_x(1, 1), [1, 2]),
        _call(_x(5, 4), [-1, -1]),
        _call(_x(3), [0, 3]),
        _call(_x(dtype=torch.int64), [4]),
    ],
    "aten.transpose.int": lambda: [
        _call(_x(5, 4), 0, 1),
        _call(_x(3, 3), 0, 1),
        _call(_x(2, 5, 3), -1, 0),
        _call(_x(6, dtype=torch.int64), 0, 0),
        _call(_x(3, 4, dtype=torch.bool), 0, -1),
    ],
    "aten.permute.default": lambda: [
        _call(_x(5, 4), [1, 0]),
        _call(_x(2, 5, 3), [2, 0, 1]),
        _call(_x(1, 6, 2, dtype=torch.int64), [-1, 0, 1]),
    ],
    "aten.select.int": lambda: [
        _call(_x(5, 4), 0, 2),
        _call(_x(2, 5, 3), -1, -1),
        _call(_x(6, dtype=torch.bool), 0, 5),
    ],
    "aten.slice.Tensor": lambda: [
        _call(_x(5, 4), 0, 1, 4),
        _call(_x(5, 4), 1, 0, 4),
        _call(_x(8, 3), 0, 2, 6),  # as many elements as the halves of all blocks, but others
        _call(_x(2, 6, 3), 1, 0, 9223372036854775807, 2),
        _call(_x(2, 6, 3), -1, None, None),
        _call(_x(6, dtype=torch.int64), 0, 4, 2),
    ],
    "aten.split.Tensor": lambda: [
        _call(_x(5, 4), 2),
        _call(_x(5, 4), 3, 1),
        _call(_x(3, 6, 2, dtype=torch.int64), 6, -2),
    ],
    "aten.split_with_sizes.default": _split_sizes,
    "aten.cat.default": lambda: [
        _call([_x(5, 4), _x(2, 4, seed=1)]),
        _call([_x(5, 4), _x(5, 1, seed=1), _x(5, 0)], 1),
        _call([_x(0), _x(3, 2)], 0),
        _call([_x(3, 2, dtype=torch.bool), _x(3, 2, seed=1)], -1),
        _call([_x(3, 2, dtype=torch.bool), _x(3, 1, dtype=torch.bool, seed=1)], -1),
        _call([_x(3, 2, dtype=torch.int64), _x(3, 2, dtype=torch.uint8, seed=1)], 0),
    ],
    "aten.view_as_complex.default": lambda: [_call(_x(5, 4, 2)), _call(_x(2)), _call(_x(3, 2))],
    "aten.view_as_real.default": lambda: [
        _call(_x(5, 4, dtype=torch.complex128)),
        _call(_x(dtype=torch.complex64)),
    ],
    "aten._to_copy.default": _casts,
    "aten.copy.default": _copies,
    "aten.add.Tensor": lambda: [*_mixed(), _call(_x(4, 4), _x(4, 4, seed=1)), _call(_x(5, 3), _x(5, 1), alpha=-2.5), _call(_x(4), 3.0)],
    "aten.mul.Tensor": lambda: [*_mixed(), _call(_x(4), 3.0), _call(_x(4, dtype=torch.bool), 3)],
    # no division by zero: terms of both signs become infinities of both signs
    "aten.div.Tensor": lambda: [
        *(_call(x, torch.where(y == 0, torch.ones_like(y), y)) for (x, y), _ in _mixed()),
        _call(_x(4, dtype=torch.int64), 3),
    ],
    "aten.true_divide.Tensor": lambda: [_call(_x(5, 3), _x(3, seed=1)), _call(_x(4, dtype=torch.int64), _x(4, seed=1))],
    "aten.masked_fill.Tensor": lambda: [_call(_x(5, 3), _x(5, 3, dtype=torch.bool), _x()), _call(_x(4, 2), _x(2, dtype=torch.bool), _x())],
    "aten.where.self": lambda: [
        _call(_x(5, 3, dtype=torch.bool), x, y) for (x, y), _ in _mixed() if x.dtype is not y.dtype or x.dtype is torch.uint8
    ],
    "aten.sum.default": _narrow,
    "aten.sum.dim_IntList": lambda: [*_dims(([0],), ([0, -1], True), ([],)), _call(_x(5, 4), [1], dtype=torch.int64)],
    "aten.linalg__powsum.default": lambda: [
        _call(_x(5, 4, 2, dtype=d), *c)
        for d in (torch.float64, torch.complex128)
        for c in ((2,), (1, [0]), (3, [0, -1], True))
    ],
    "aten.cumsum.default": lambda: _dims((0,), (-1,)),
    "aten.prod.default": lambda: _narrow(),
    "aten.prod.dim_int": lambda: _dims((0,), (2, True)),
    "aten.mul.Scalar": lambda: _dims((2,), (-1.5,)),
    "aten.div.Scalar": lambda: _dims((2,), (-1.5,)),
    "aten.neg.default": lambda: [c for c in _narrow() if c[0][0].dtype is not torch.bool],
    "aten.div.Tensor_mode": lambda: [
        _call(_x(5, 3), _x(3, seed=1), rounding_mode=mode) for mode in ("floor", "trunc", None)
    ],
    "aten.div.Scalar_mode": lambda: [
        _call(_x(5, 3), 0.7, rounding_mode=mode) for mode in ("floor", "trunc", None)
    ],
    "aten.round.decimals": lambda: [_call(_x(5, 3), decimals=1), _call(_x(4) * 100, decimals=-2)],
    "aten.polygamma.default": lambda: [_call(2, _x(5, 3).abs() + 0.1), _call(0, _x(4))],
    "aten.masked_fill.Scalar": lambda: [
        _call(_x(5, 3, dtype=dtype), _x(5, 3, dtype=torch.bool, seed=1), value)
        for value in (0, 2)
        for dtype in (torch.float64, torch.int64, torch.complex128)
    ],
    "aten.clamp.default": lambda: [
        _call(_x(5, 4), -0.5, 0.5),
        _call(_x(5, 4), 0.5, -0.5),
        _call(_x(4), None, 0.2),
        _call(_x(3, dtype=torch.int64), 2),
        _call(_x(5, dtype=torch.uint8), 2, 5),
    ],
    "aten.threshold.default": lambda: [
        _call(_x(5, 4), 0.1, 7.0),
        _call(_x(5, 4), 0.1, -1.0),
        _call(_x(3, dtype=torch.int64), 1, 1),
    ],
    "aten.kthvalue.default": lambda: [_call(_x(5, 4), 2, 0), _call(_x(3, 4, 2), 1), _call(_x(5, 3), 3, 0, True)],
    "aten.topk.default": lambda: [_call(_x(5, 4), 2, 0), _call(_x(3, 4, 2), 1), _call(_x(5, 3), 3, -1, False, False)],
    "aten.roll.default": lambda: [
        _call(_x(5, 4), [2], [0]),
        _call(_x(5, 4), [3]),
        _call(_x(3, 4, 2), [1, -1], [0, 2]),
    ],
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._softmax_backward_data.default": lambda: _softmax_backward(log=False),
    "aten._log_softmax_backward_data.default": lambda: _softmax_backward(log=True),
    "aten._fft_r2c.default": lambda: [_call(_x(5, 4), [1], 0, True), _call(_x(3, 4, 5), [0, 2], 1, False)],
    "aten._fft_c2c.default": lambda: [
        _call(_x(5, 4, dtype=torch.complex128), [1], 0, True),
        _call(_x(3, 4, 5, dtype=torch.complex128), [0, 2], 1, False),
    ],
    "aten._fft_c2r.default": lambda: [
        _call(_x(5, 4, dtype=torch.complex128), [1], 0, 6),
        _call(_x(3, 4, 5, dtype=torch.complex128), [0], 1, 5),
    ],
    "aten.reflection_pad1d.default": lambda: _pad(1),
    "aten.reflection_pad2d.default": lambda: _pad(2),
    "aten.reflection_pad3d.default": lambda: _pad(3),
    "aten.replication_pad1d.default": lambda: _pad(1),
    "aten.replication_pad2d.default": lambda: _pad(2),
    "aten.replication_pad3d.default": lambda: _pad(3),
    "aten.upsample_nearest1d.default": lambda: _upsample(1),
    "aten.upsample_nearest2d.default": lambda: _upsample(2),
    "aten.upsample_nearest3d.default": lambda: _upsample(3),
    "aten.upsample_linear1d.default": lambda: _upsample(1, False),
    "aten.upsample_bilinear2d.default": lambda: _upsample(2, True),
    "aten.upsample_bicubic2d.default": lambda: _upsample(2, False),
    "aten.upsample_trilinear3d.default": lambda: _upsample(3, False),
    "aten.avg_pool2d.default": lambda: _of_images(2, ([2, 2],), ([3, 2], [1, 2], [1, 0], True, False)),
    "aten.avg_pool3d.default": lambda: _of_images(3, ([2, 2, 2],)),
    "aten.max_pool2d_with_indices.default": lambda: _of_images(2, ([2, 2],), ([3, 2], [1, 2], [1, 0])),
    "aten.max_pool3d_with_indices.default": lambda: _of_images(3, ([2, 2, 2],)),
    "aten.max_unpool2d.default": lambda: _unpool(2),
    "aten.max_unpool3d.default": lambda: _unpool(3),
    "aten.fractional_max_pool2d.default": lambda: _fractional(2),
    "aten.fractional_max_pool3d.default": lambda: _fractional(3),
    "aten.fractional_max_pool2d_backward.default": lambda: _fractional_backward(2),
    "aten._adaptive_avg_pool2d.default": lambda: _of_images(2, ([3, 2],)),
    "aten._adaptive_avg_pool3d.default": lambda: _of_images(3, ([2, 3, 2],)),
    "aten.adaptive_max_pool2d.default": lambda: _of_images(2, ([3, 2],)),
}  # fmt: skip


_FILES = (
    samples_networks.WRITTEN,
    WRITTEN,
    samples_matrices.WRITTEN,
    samples_prims.WRITTEN,
    samples_indexing.WRITTEN,
    samples_views.WRITTEN,
)


def calls_of(name: str) -> list[Call] | None:
    """The written calls of an op, by the name of its row; None if there are none and calls are to be generated."""
    # a copying variant takes the arguments of the view
    for known in (name, name.replace("_copy.", ".")):
        if calls := [c for some in _FILES if known in some for c in some[known]()]:
            return calls
    return None


@functools.cache
def recorded(every: int = 1) -> dict[str, list[Call]]:
    """The calls that torch's own samples of its ops make, forward and backward, by op name; `every`: of one op in so many."""
    from torch.testing._internal.common_methods_invocations import op_db

    mode = _Recorder()
    failures = 0
    ops = [op for op in op_db if torch.float64 in op.supported_dtypes("cpu")][::every]
    for op in ops:
        with warnings.catch_warnings(), torch.random.fork_rng([]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            try:
                _record(mode, op)
            except Exception:
                failures += 1  # some samples fail on plain tensors
    assert failures < len(ops) / 20, f"{failures} of {len(ops)} ops could not be recorded"
    return mode.calls


def _record(mode: _Recorder, op: Any) -> None:
    samples = op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd)
    for sample, _ in zip(samples, range(3), strict=False):
        with mode:
            out = op(sample.input, *sample.args, **sample.kwargs)
            every = out if isinstance(out, list | tuple) else [out]
            some = [o for o in every if isinstance(o, Tensor) and o.requires_grad]
            if some:
                torch.autograd.backward(some, [torch.ones_like(o) for o in some])


class _Recorder(TorchDispatchMode):
    """Keeps the first few calls of each op that differ in shapes or numbers and have no large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Call]] = {}
        self._known: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        kept = self.calls.setdefault(name, [])
        if len(kept) < _MOST:
            key = repr((name, _summary(args), _summary(kwargs)))
            if key not in self._known and "large" not in key:
                self._known.add(key)
                kept.append((copy_tensors(args), copy_tensors(kwargs)))
        return func(*args, **kwargs)


def _summary(value: Any) -> Any:
    """Arguments with shapes and dtypes in place of tensors."""
    if isinstance(value, Tensor):
        return "large" if value.numel() > _LARGEST else (tuple(value.shape), value.dtype)
    if isinstance(value, list | tuple):
        return [_summary(v) for v in value]
    return {k: _summary(v) for k, v in value.items()} if isinstance(value, dict) else value
