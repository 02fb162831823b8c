"""Calls of neural-network ops and their backwards: convolutions, pools, norms, losses, attention and bags.

Backward kernels do not check their arguments, and some crash on wrong ones. So their calls are not generated: they are
recorded in `backward` after a forward on small tensors, or built from the outputs of the forward kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tests.rules.calls import Call, copy_tensors, name_of
from tests.rules.calls import call as _call
from tests.rules.calls import index as _index
from tests.rules.calls import x as _x
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
NARROW = torch.float32


class _Recorder(TorchDispatchMode):
    """Keeps the calls of one op."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = name, list[Call]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if name_of(func) == self.name:
            self.calls.append((copy_tensors(args), copy_tensors(kwargs)))
        return func(*args, **kwargs)


def _record(
    name: str, fn: Callable[..., Tensor], *inputs: Tensor | None, grads: Sequence[int] = ()
) -> list[Call]:
    """The calls of an op by a function and its backward, for a gradient of both signs.

    `grads` are the inputs that require a gradient, by default all; they decide a kernel's output mask.
    """
    tensors = [
        None if t is None else t.clone().requires_grad_(t.is_floating_point() and (not grads or i in grads))
        for i, t in enumerate(inputs)
    ]
    mode = _Recorder(name)
    with mode:
        y = fn(*tensors)
        y.backward(_x(*y.shape, dtype=y.dtype, seed=9))
    return mode.calls


# -- convolutions ------------------------------------------------------------------------------------------------------


def _convolution(name: str) -> list[Call]:
    c1, c2, c3 = functional.conv1d, functional.conv2d, functional.conv3d
    t1, t2 = functional.conv_transpose1d, functional.conv_transpose2d
    some = [
        (c1, (5, 4, 6), (3, 4, 3), 3, {"padding": 1}, ()),
        (c2, (2, 3, 4, 5), (5, 3, 2, 3), 5, {"stride": (1, 2), "dilation": 2, "padding": 1}, ()),
        (c3, (2, 2, 3, 2, 3), (3, 2, 2, 1, 2), None, {}, ()),
        (t1, (3, 4, 5), (4, 3, 2), 3, {"stride": 2, "output_padding": 1}, ()),
        (t2, (1, 2, 3, 2), (2, 5, 2, 2), None, {}, ()),
        (c1, (3, 6, 5), (6, 1, 2), 6, {"groups": 6}, ()),  # depthwise
        (c1, (4, 5, 5), (5, 1, 2), None, {"groups": 5}, (0,)),
        (t1, (2, 4, 3), (4, 1, 2), 4, {"groups": 4}, ()),
        (c1, (3, 4, 5), (6, 2, 2), 6, {"groups": 2}, ()),  # groups of several channels
        (c1, (2, 3, 5), (6, 1, 2), 6, {"groups": 3}, ()),  # several outputs per channel
        (c1, (0, 3, 4), (2, 3, 2), 2, {}, ()),
        (c1, (3, 4, 6), (2, 4, 3), 2, {}, (1,)),
        (c1, (3, 4, 6), (2, 4, 3), 2, {}, (2,)),
        (c1, (1, 1, 4), (1, 1, 2), 1, {}, ()),
    ]
    out: list[Call] = []
    for fn, x, w, bias, more, grads in some:
        b = None if bias is None else _x(bias, seed=2)
        out += _record(name, functools.partial(fn, **more), _x(*x), _x(*w, seed=1), b, grads=grads)
    float32 = [_x(*s, dtype=NARROW) for s in ((4, 3, 5), (5, 3, 2), (5,))]
    return out + _record(name, functional.conv1d, *float32)


# -- slices ------------------------------------------------------------------------------------------------------------


def _slice_backward() -> list[Call]:
    far = 9223372036854775807
    some = [
        ((5, 2), (5, 6), 1, 1, 5, 2),
        ((2, 4), (5, 4), 0, -4, -2, 1),
        ((3, 4, 2), (3, 4, 6), -1, 4, far, 1),
    ]
    some += [((4, 0), (4, 3), 1, 2, 2, 1), ((0, 3), (0, 5), 1, 0, 3, 1), ((1, 1), (1, 4), 1, 3, 4, 1)]
    return [
        _call(_x(*g, dtype=d), list(s), *how)
        for d in (torch.float64, torch.complex128)
        for g, s, *how in some
    ]


def _select_backward() -> list[Call]:
    some = [((5,), (5, 6), 1, 2), ((4, 3), (4, 2, 3), 1, -1), ((3, 4), (5, 3, 4), -3, 0), ((), (4,), 0, 3)]
    return [
        _call(_x(*g), list(s), *how)
        for g, s, *how in [*some, ((0, 3), (0, 3, 2), 2, 1), ((1, 5), (1, 1, 5), 1, 0)]
    ]


_WINDOWS = (((5, 6), 1, 3, 2), ((7, 4), 0, 2, 1), ((3, 4, 6), -1, 6, 1), ((2, 5), 1, 1, 3), ((4,), 0, 2, 2))


def _unfold() -> list[Call]:
    kinds = (torch.float64, torch.int64, torch.bool)
    return [_call(_x(*s, dtype=d), *how) for d in kinds for s, *how in (*_WINDOWS, ((0, 4), 1, 2, 1))]


def _unfold_backward() -> list[Call]:
    return [_call(_x(*_x(*s).unfold(*how).shape), list(s), *how) for s, *how in _WINDOWS]


def _constant_pad() -> list[Call]:
    some = [
        ((5, 4), [1, 2]),
        ((3, 4, 2), [0, 0, 2, 1]),
        ((5, 4), [0, 0, 0, 0, 0, 0][:4]),
        ((4, 6), [-1, 2, 0, 0]),
    ]
    some += [((0, 3), [1, 1]), ((1, 5), [0, 0, 1, 1]), ((2, 5, 3), [0, 1, 0, 0, 1, 0])]
    fills = (0, 1.5, 0.0, -2)
    return [
        *(_call(_x(*s), pad, v) for (s, pad), v in zip(itertools.cycle(some), fills * 4, strict=False)),
        *(_call(_x(5, 4, dtype=d), [2, 0]) for d in (torch.int64, torch.bool, torch.uint8, torch.complex128)),
        _call(_x(5, 4, dtype=torch.int64), [1, 0], 3),
    ]


def _stack() -> list[Call]:
    return [
        _call([_x(5, 4), _x(5, 4, seed=1)], 1),
        _call([_x(3, 2), _x(3, 2, seed=1), _x(3, 2, seed=2)], -1),
        _call([_x(4, dtype=torch.int64)]),
        _call([_x(3, dtype=torch.bool), _x(3, seed=1)], 0),
        _call([_x(0, 2), _x(0, 2)], 0),
        _call([_x(), _x(seed=1)]),
    ]


# -- images ------------------------------------------------------------------------------------------------------------

_IMAGES = {1: (6,), 2: (5, 6), 3: (4, 3, 5)}  # spatial dims


def _images(n: int, *leads: tuple[int, ...]) -> list[Tensor]:
    return [_x(*lead, *_IMAGES[n]) for lead in leads or ((5, 3), (4,), (1, 2))]


def _resize(mode: str, n: int, **more: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    size = [[9], [3, 8], [3, 5, 2]][n - 1]
    return functools.partial(functional.interpolate, size=size, mode=mode, **more), _images(n, (5, 3))


def _pad(mode: str, n: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    return functools.partial(functional.pad, pad=[1, 2] * n, mode=mode), _images(n)


def _pool(name: str, n: int, **more: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    size: dict[str, Any] = {"output_size": [2, 3, 2][-n:]} if "adaptive" in name else {"kernel_size": 3}
    return functools.partial(getattr(functional, f"{name}{n}d"), **size, **more), _images(n)


# By op, a function that calls it and its inputs; the calls of its backward are recorded too.
_WITH_BACKWARD: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    **{f"max_pool{n}d_with_indices": _pool("max_pool", n, stride=1, padding=1) for n in (2, 3)},
    **{f"avg_pool{n}d": _pool("avg_pool", n, stride=1, padding=1, count_include_pad=False) for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d": _pool("adaptive_avg_pool", n) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": _pool("adaptive_max_pool", n) for n in (2, 3)},
    **{f"reflection_pad{n}d": _pad("reflect", n) for n in (1, 2, 3)},
    **{f"replication_pad{n}d": _pad("replicate", n) for n in (1, 2, 3)},
    **{f"upsample_nearest{n}d": _resize("nearest", n) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": _resize("nearest-exact", n) for n in (1, 2, 3)},
    "upsample_linear1d": _resize("linear", 1),
    "upsample_bilinear2d": _resize("bilinear", 2, align_corners=True),
    "upsample_bicubic2d": _resize("bicubic", 2),
    "upsample_trilinear3d": _resize("trilinear", 3),
    "_upsample_bilinear2d_aa": _resize("bilinear", 2, antialias=True),
    "_upsample_bicubic2d_aa": _resize("bicubic", 2, antialias=True),
}  # fmt: skip


def _grid_sample(name: str) -> list[Call]:
    """Grids of two and three dims, with gradients of image and grid or of the grid only."""
    out: list[Call] = []
    two, three = (5, 3, 4, 3), (3, 2, 3, 2, 4)
    for image, grid_shape in (
        (two, (5, 4, 2)),
        (three, (3, 2, 3, 2)),
        ((1, 4, 2, 2), (1, 1, 5)),
        ((2, 1, 3, 3, 2), (2, 1, 2, 1)),
    ):
        nd = len(grid_shape) - 1
        grid = _x(*grid_shape, nd, seed=1).tanh() * 1.2
        for mode, grads in (("bilinear", ()), ("nearest", (1,))):
            fn = functools.partial(functional.grid_sample, mode=mode, align_corners=False)
            out += _record(name, fn, _x(*image), grid, grads=grads)
    return out


def _im2col() -> list[Call]:
    how = [[2, 2], [1, 1], [1, 0], [1, 2]]
    return [_call(_x(*s), *how) for s in ((5, 3, 4, 5), (1, 2, 3, 3), (3, 1, 4, 4))]


def _col2im() -> list[Call]:
    sizes = [(5, 12, 9), (1, 4, 9), (3, 8, 9)]
    return [_call(_x(*s), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]) for s in sizes]


def _affine_grids() -> list[Call]:
    some = [(2, [5, 3, 2, 4]), (2, [1, 1, 3, 2]), (3, [4, 2, 2, 1, 3])]
    return [_call(_x(size[0], n, n + 1), size, corners) for n, size in some for corners in (True, False)]


# -- norms -------------------------------------------------------------------------------------------------------------


def _rms_norm() -> list[Call]:
    return [
        _call(_x(5, 4), [4], _x(4, seed=1), 1e-5),
        _call(_x(3, 5, 4), [5, 4], None, None),
        _call(_x(2, 3, 4), [4], _x(4, seed=1), None),
        _call(_x(4, 3, dtype=NARROW), [3], _x(3, dtype=NARROW), 1e-5),
    ]


_GROUPED = (((5, 6, 3), 3), ((2, 4), 2), ((3, 4, 2, 2), 4), ((4, 3, 2), 1), ((1, 2, 3), 2))


def _group_norm() -> list[Call]:
    out = []
    for i, ((n, c, *rest), groups) in enumerate(_GROUPED):
        x, area = _x(n, c, *rest, seed=i), functools.reduce(lambda a, b: a * b, rest, 1)
        weight, bias = (_x(c, seed=1), _x(c, seed=2)) if i % 2 == 0 else (None, None)
        out.append(_call(x, weight, bias, n, c, area, groups, 1e-5))
    return out


def _group_norm_backward() -> list[Call]:
    out = []
    for (x, weight, bias, *sizes, eps), _ in _group_norm():
        _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, eps)
        for mask in ([True, True, True], [True, False, False], [False, True, True]):
            want = [mask[0], mask[1] and weight is not None, mask[2] and bias is not None]
            if any(want):
                out.append(_call(_x(*x.shape, seed=7), x, mean, rstd, weight, *sizes, want))
    return out


_BATCHES = ((5, 4, 3), (4, 6), (3, 2, 2, 2), (4, 1, 3), (1, 3, 2))


def _batches() -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]]:
    """Arguments of a batch norm: a batch, weight and bias or None, and running statistics."""
    for i, shape in enumerate(_BATCHES):
        c = shape[1]
        weight, bias = (_x(c, seed=1), _x(c, seed=2)) if i % 2 == 0 else (None, None)
        yield _x(*shape, seed=i), weight, bias, _x(c, seed=3), _x(c, seed=4).abs() + 0.1


def _batch_norm(
    *, stats: bool = True, own: bool = True, given: bool = True, switch: bool = True
) -> list[Call]:
    """Calls with the batch's `own` and with `given` statistics, for ops with and without arguments for `stats` and training."""
    out = []
    for x, w, b, mean, var in _batches():
        if own:
            out.append(
                _call(x, w, b, *((None, None) if stats else ()), *((True,) if switch else ()), 0.1, 1e-5)
            )
        if given:
            out.append(_call(x, w, b, mean, var, *((False,) if switch else ()), 0.1, 1e-5))
    return out


def _batch_norm_backward(reserve: bool = False) -> list[Call]:
    out = []
    for x, w, _, mean, var in _batches():
        grad = _x(*x.shape, seed=8)
        if reserve and w is None:
            continue  # it requires a weight
        _, own_mean, own_invstd = aten.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-5)
        none = torch.empty(0, dtype=x.dtype)
        more = (none,) if reserve else ()
        mask = ([True, True, True], [True, False, False], [False, True, True])[len(out) // 3 % 3]
        want = [mask[0] or w is None, mask[1] and w is not None, mask[2] and w is not None]
        out.append(_call(grad, x, w, mean, var, own_mean, own_invstd, True, 1e-5, want, *more))
        out.append(_call(grad, x, w, None, None, own_mean, own_invstd, True, 1e-5, want, *more))
        out.append(_call(grad, x, w, mean, var, none, none, False, 1e-5, want, *more))
    return out


def _weight_norm() -> list[Call]:
    some = [((5, 4, 3), 0), ((5, 4), 0), ((3, 4, 6), 2), ((1, 4), 0), ((4, 6), 1)]
    return [_call(_x(*s), _x(*(n if i == d else 1 for i, n in enumerate(s)), seed=1), d) for s, d in some]


def _weight_norm_backward() -> list[Call]:
    out = []
    for (v, g, d), _ in _weight_norm():
        _, norms = aten._weight_norm_interface(v, g, d)
        out.append(_call(_x(*v.shape, seed=5), v, g, norms, d))
    return out


# -- losses ------------------------------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = 0, 1, 2
_EVERY = (_NONE, _MEAN, _SUM)
_LOSSES: dict[str, tuple[Any, ...]] = {
    "mse_loss": (), "smooth_l1_loss": (0.7,), "huber_loss": (0.7,), "soft_margin_loss": (),
}  # fmt: skip
_BROADCAST = ("mse_loss", "smooth_l1_loss")  # the kernels of the others require equal shapes
_PAIRS = ((5, 4), (1, 2, 3), (0, 3), ())


def _elementwise(*more: Any, broadcast: bool = False) -> list[Call]:
    shapes = [(s, s) for s in _PAIRS] + ([((5, 1), (5, 4)), ((3,), (2, 3))] if broadcast else [])
    out = [_call(_x(*a), _x(*b, seed=1), r, *more) for r in _EVERY for a, b in shapes]
    return [*out, *(_call(_x(5, 3, dtype=NARROW), _x(5, 3, dtype=NARROW, seed=1), r, *more) for r in _EVERY)]


def _elementwise_backward(*more: Any) -> list[Call]:
    return [
        _call(_x(*(s if r == _NONE else ()), seed=3), _x(*s), _x(*s, seed=1), r, *more)
        for r in _EVERY
        for s in _PAIRS
    ]


def _soft_margin(backward: bool) -> list[Call]:
    calls = _elementwise_backward() if backward else _elementwise()
    at = 2 if backward else 1
    return [_call(*a[:at], a[at].sign(), *a[at + 1 :]) for a, _ in calls]


def _cross_entropy(backward: bool = False, logits: bool = False) -> list[Call]:
    out = []
    for r, shape in itertools.product(_EVERY, ((5, 4), (3,), (1, 6))):
        weighted = len(out) % 2 == 0
        x, y = _x(*shape) if logits else _x(*shape).sigmoid(), _x(*shape, seed=1).sigmoid()
        weight = _x(*shape, seed=2).abs() if weighted else None
        grad = (_x(*(shape if r == _NONE else ()), seed=3),) if backward else ()
        positive = (_x(shape[-1], seed=4).abs() if weighted else None,) if logits else ()
        out.append(_call(*grad, x, y, weight, *positive, r))
    return out


def _nll(backward: bool = False, images: bool = False) -> list[Call]:
    shapes = [(5, 4, 2, 3), (2, 6, 1, 4), (1, 3, 2, 2)] if images else [(5, 4), (3, 6), (1, 7), (4,), (2, 1)]
    out = []
    for r, shape in itertools.product(_EVERY, shapes):
        weighted = len(out) % 2 == 0
        c = shape[0] if len(shape) == 1 else shape[1]
        rest = () if len(shape) == 1 else (shape[0], *shape[2:])
        x, target = _x(*shape), _index(c, *rest)
        weight = _x(c, seed=2).abs() + 0.1 if weighted else None
        # an index outside the classes, the last class, and the first
        ignored = (-100, c - 1, 0)[len(out) % 3]
        if ignored == -100 and rest and rest[0] > 1:
            target[0] = ignored
        args = (x, target, weight, r, ignored)
        if not backward:
            out.append(_call(*args))
            continue
        op = aten.nll_loss2d_forward if images else aten.nll_loss_forward
        y, total = op(*args)
        out.append(_call(_x(*y.shape, seed=3), *args, total))
    return out


def _margins(backward: bool = False) -> list[Call]:
    out = []
    for r, (n, c), p in itertools.product(_EVERY, ((5, 4), (3, 3), (1, 6)), (1, 2)):
        weight = _x(c, seed=2).abs() if p == 2 else None
        grad = (_x(*((n,) if r == _NONE else ()), seed=3),) if backward else ()
        out.append(_call(*grad, _x(n, c), _index(c, n), p, 0.8, weight, r))
    return out


def _labels(backward: bool = False) -> list[Call]:
    out = []
    for r, (n, c) in itertools.product(_EVERY, ((5, 4), (3, 3), (1, 5))):
        x, target = _x(n, c), torch.arange(c).repeat(n, 1)
        target[:, 2:] = -1  # labels after -1 do not count
        target[n // 2] = target[n // 2].flip(0)
        y, is_target = aten.multilabel_margin_loss_forward(x, target, r)
        out.append(_call(_x(*y.shape, seed=3), x, target, r, is_target) if backward else _call(x, target, r))
    return out


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention(backward: bool = False) -> list[Call]:
    """Causal calls, masks of several shapes, and shared key heads."""
    shapes: list[tuple[tuple[int, ...], str, tuple[int, ...] | None]] = [
        ((3, 5, 4, 4, 2, 5), "all", None),
        ((2, 3, 4, 4, 2, 3), "causal", None),
        ((1, 2, 3, 6, 4, 2), "masked", (1, 2, 3, 6)),
        ((3, 2, 4, 3, 2, 2), "masked", (4, 3)),
        ((3, 4, 4, 3, 2, 4), "masked", (3, 1, 4, 3)),
        ((2, 4, 3, 3, 2, 4), "masked", (1, 4, 3, 3)),
        ((2, 4, 3, 3, 2, 4), "masked", (2, 1, 1, 3)),
        ((2, 4, 3, 5, 2, 2), "all", None),  # two query heads per key head
        ((3, 6, 2, 5, 2, 3), "causal", None),
        ((2, 4, 3, 5, 2, 1), "all", None),
    ]
    out = []
    for (b, h, s, t, e, shared), how, mask in shapes:
        q, k, v = _x(b, h, s, e), _x(b, shared, t, e, seed=1), _x(b, shared, t, e, seed=2)
        more = {"attn_mask": None if mask is None else _x(*mask, seed=3), "scale": 0.7}
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        y, lse = forward(q, k, v, 0.0, how == "causal", **more)
        if not backward:
            out.append(_call(q, k, v, 0.0, how == "causal", **more))
        else:
            out.append(_call(_x(*y.shape, seed=4), q, k, v, y, lse, 0.0, how == "causal", **more))
    return out


# -- bags --------------------------------------------------------------------------------------------------------------


def _bags() -> list[Call]:
    index, offsets = (
        torch.tensor([1, 2, 4, 5, 4, 3, 2, 0]),
        torch.tensor([0, 4, 4]),
    )  # the middle one is empty
    out = []
    for mode, width in itertools.product((0, 1, 2), (5, 4, 1)):
        last = width == 4
        ends = torch.tensor([0, 4, 4, 8]) if last else offsets
        each = _x(8, seed=1) if mode == 0 and width == 5 else None
        out.append(_call(_x(6, width), index, ends, False, mode, False, each, last, 4 if width == 4 else -1))
    return out


def _bags_backward(name: str) -> list[Call]:
    out = []
    for (w, index, offsets, freq, mode, sparse, each, last, padding), _ in _bags():
        y, of_bag, sizes, largest = aten._embedding_bag(
            w, index, offsets, freq, mode, sparse, each, last, padding
        )
        grad, rows = _x(*y.shape, seed=3), w.shape[0]
        starts = offsets[:-1] if last else offsets
        if name == "weights":
            if mode == 0:
                out.append(_call(grad, w, index, starts, of_bag, mode, padding))
        elif name == "dense":
            out.append(_call(grad, index, of_bag, sizes, largest, rows, freq, mode, each, padding))
            out.append(_call(grad, index, of_bag, sizes, largest, rows, mode != 2, mode, each, padding))
        else:
            out.append(
                _call(grad, index, starts, of_bag, sizes, largest, rows, freq, mode, False, each, padding)
            )
    return out


def _forward_and_backward() -> dict[str, Callable[[], list[Call]]]:
    """The ops of `_WITH_BACKWARD` and their backwards."""

    def calls(name: str, fn: Callable[..., Tensor], images: list[Tensor]) -> list[Call]:
        return _with_integers(name, [c for x in images for c in _record(name, fn, x)])

    return {
        name: functools.partial(calls, name, fn, images)
        for op, (fn, images) in _WITH_BACKWARD.items()
        for name in (f"aten.{op}.default", f"aten.{op}_backward.default")
    }


def _with_integers(name: str, calls: list[Call]) -> list[Call]:
    """Add one of the calls for each integer dtype that the kernel takes, because it may round."""
    op = getattr(aten, name.split(".")[1]).default
    args, kwargs = calls[0]
    for dtype in (torch.int64, torch.uint8):
        integers = tuple(
            (a * 9).to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
        )
        try:
            op(*integers, **kwargs)
        except RuntimeError:
            continue  # tests/rules/test_samples.py lists kernels that must take them
        calls = [*calls, (integers, kwargs)]
    return calls


WRITTEN: dict[str, Callable[[], list[Call]]] = {
    **_forward_and_backward(),
    **{
        f"aten.{name}.default": lambda name=name: _convolution(f"aten.{name}.default")
        for name in ("convolution", "convolution_backward")
    },
    "aten.slice_backward.default": _slice_backward,
    "aten.select_backward.default": _select_backward,
    "aten.unfold.default": _unfold,
    "aten.unfold_backward.default": _unfold_backward,
    "aten.constant_pad_nd.default": _constant_pad,
    "aten.stack.default": _stack,
    **{
        f"aten.{name}.default": lambda name=name: _grid_sample(f"aten.{name}.default")
        for name in ("grid_sampler_2d", "grid_sampler_3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward")
    },
    "aten.im2col.default": _im2col,
    "aten.col2im.default": _col2im,
    "aten.affine_grid_generator.default": _affine_grids,
    "aten.pixel_shuffle.default": lambda: [_call(_x(*s), 2) for s in ((5, 4, 2, 3), (3, 8, 1, 2), (2, 3, 4, 2, 2))],
    "aten.pixel_unshuffle.default": lambda: [_call(_x(*s), 2) for s in ((5, 3, 4, 2), (2, 3, 1, 2, 4))],
    "aten.channel_shuffle.default": lambda: [_call(_x(*s), 2) for s in ((5, 4, 3), (3, 2, 2, 2), (1, 6, 4))],
    "aten.native_channel_shuffle.default": lambda: [_call(_x(*s), 2) for s in ((5, 4, 3), (3, 2, 2, 2), (1, 6, 4))],
    "aten._fused_rms_norm.default": _rms_norm,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": lambda: _batch_norm(stats=False, given=False),
    "aten._native_batch_norm_legit_no_training.default": lambda: _batch_norm(own=False, switch=False),
    "aten._batch_norm_no_update.default": lambda: _batch_norm(own=False, switch=False),
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.batch_norm_backward.default": lambda: _batch_norm_backward(reserve=True),
    "aten._weight_norm_interface.default": _weight_norm,
    "aten._weight_norm_interface_backward.default": _weight_norm_backward,
    **{f"aten.{n}.default": lambda n=n, m=m: _elementwise(*m, broadcast=n in _BROADCAST) for n, m in _LOSSES.items()},
    **{f"aten.{n}_backward.default": lambda m=m: _elementwise_backward(*m) for n, m in _LOSSES.items()},
    "aten.soft_margin_loss.default": lambda: _soft_margin(backward=False),
    "aten.soft_margin_loss_backward.default": lambda: _soft_margin(backward=True),
    "aten.binary_cross_entropy.default": _cross_entropy,
    "aten.binary_cross_entropy_backward.default": lambda: _cross_entropy(backward=True),
    "aten.binary_cross_entropy_with_logits.default": lambda: _cross_entropy(logits=True),
    "aten.nll_loss_forward.default": _nll,
    "aten.nll_loss_backward.default": lambda: _nll(backward=True),
    "aten.nll_loss2d_forward.default": lambda: _nll(images=True),
    "aten.nll_loss2d_backward.default": lambda: _nll(backward=True, images=True),
    "aten.multi_margin_loss.default": _margins,
    "aten.multi_margin_loss_backward.default": lambda: _margins(backward=True),
    "aten.multilabel_margin_loss_forward.default": _labels,
    "aten.multilabel_margin_loss_backward.default": lambda: _labels(backward=True),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": lambda: _attention(backward=True),
    "aten._embedding_bag.default": _bags,
    "aten._embedding_bag_forward_only.default": _bags,
    "aten._embedding_bag_backward.default": lambda: _bags_backward("any"),
    "aten._embedding_bag_dense_backward.default": lambda: _bags_backward("dense"),
    "aten._embedding_bag_per_sample_weights_backward.default": lambda: _bags_backward("weights"),
}  # fmt: skip
