"""Ops that this machine has no kernel of, with calls of each, and kernels written plainly that stand in for them.

Their rows cannot be tried on what will run. They are tried on the same mathematics, which is what a row is about, and
the shapes of their blocks on torch's meta kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.rules import samples
from tests.rules.samples import Call, _call
from torch import Tensor

_Kernel = Callable[..., Any]
_PADDED = 32  # a multiple of which the rows of the efficient kernels' logsumexp are


def _x(*shape: int, seed: int = 0) -> Tensor:
    """Some numbers; what these kernels keep of each row has this dtype whatever they are given."""
    return samples._x(*shape, dtype=torch.float32, seed=seed)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    out = q @ _spread(k, q).mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        out = out + torch.full(out.shape[-2:], -math.inf, dtype=out.dtype).triu(1)
    return out if bias is None else out + bias


def _spread(k: Tensor, q: Tensor) -> Tensor:
    """Heads of keys as many as those of queries."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _gathered(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of what was spread, or broadcast."""
    if like.dim() == 4 and like.shape[1] not in (1, grad.shape[1]):
        grad = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    return grad.sum_to_size(like.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(q, k, *how)
    weights = scores.softmax(-1)
    return weights @ _spread(v, q), scores.logsumexp(-1), weights


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """From what the forward gave, as kernels do: out and the logsumexp of each query."""
    bias, scale = how[0], 1 / math.sqrt(q.shape[-1]) if how[2] is None else how[2]
    weights = (_scores(q, k, *how) - lse[..., None]).exp()
    into = weights * (grad @ _spread(v, q).mT - (grad * out).sum(-1, keepdim=True))
    return (
        into @ _spread(k, q) * scale,
        _gathered(into.mT @ q * scale, k),
        _gathered(weights.mT @ grad, v),
        None if bias is None else _gathered(into, bias),
    )


def _seed() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _turned(*tensors: Tensor | None) -> list[Any]:
    """Between heads after positions and before."""
    return [None if t is None else t.transpose(1, 2).contiguous() for t in tensors]


def _padded(lse: Tensor) -> Tensor:
    rows = lse.shape[-1]
    return torch.nn.functional.pad(lse, (0, -rows % _PADDED), value=math.inf)


# -- kernels -----------------------------------------------------------------------------------------------------------


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse, _ = _attend(q, k, v, None, is_causal, scale)
    states = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], *states, q.new_empty(0)


def _flash_backward(
    grad, q, k, v, out, lse, cq, ck, mq, mk, dropout_p, is_causal, seed, offset, *, scale=None
):
    return _attend_backward(grad, q, k, v, out, lse, None, is_causal, scale)[:3]


def _efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    out, lse, _ = _attend(q, k, v, bias, is_causal, scale)
    return out, _padded(lse) if compute_log_sumexp else lse[..., :0].clone(), _seed(), _seed()


def _efficient_backward(
    grad, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
):
    grads = _attend_backward(grad, q, k, v, out, lse[..., : q.shape[2]], bias, is_causal, scale)
    return tuple(g if wanted else None for g, wanted in zip(grads, mask, strict=True))


def _cudnn(
    q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    out, lse, _ = _attend(q, k, v, bias, is_causal, scale)
    return out, lse[..., None], None, None, q.shape[2], k.shape[2], _seed(), _seed(), None


def _cudnn_backward(
    grad, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, dropout_p, is_causal, *, scale=None
):
    return _attend_backward(grad, q, k, v, out, lse[..., 0], bias, is_causal, scale)[:3]


def _overrideable(q, k, v, bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse, _ = _attend(q, k, v, bias, is_causal, scale)
    return out, lse, None, None, q.shape[2], k.shape[2], _seed(), _seed(), None


def _overrideable_backward(
    grad, q, k, v, bias, mask, out, lse, cq, ck, mq, mk, dropout_p, is_causal, seed, offset, *, scale=None
):
    grads = _attend_backward(grad, q, k, v, out, lse, bias, is_causal, scale)
    return tuple(g if wanted else None for g, wanted in zip(grads, mask, strict=True))


def _mps(
    q, k, v, mask=None, dropout_p=0.0, is_causal=False, dropout_mask=None, *, scale=None, enable_gqa=False
):
    out, _, weights = _attend(q, k, v, mask, is_causal, scale)
    return out, weights


def _flash_long(q, k, v, cq, ck, mq, mk, dropout_p, is_causal, return_debug_mask, *, scale=None, **others):
    out, lse, _ = _attend(*_turned(q, k, v), None, is_causal, scale)
    states = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return *_turned(out), lse, *states, q.new_empty(0)


def _flash_long_backward(
    grad, q, k, v, out, lse, cq, ck, mq, mk, dropout_p, is_causal, seed, unused, *, scale=None, **others
):
    turned = _turned(grad, q, k, v, out)
    return tuple(_turned(*_attend_backward(*turned, lse, None, is_causal, scale)[:3]))


def _efficient_long(
    q,
    k,
    v,
    bias,
    cq,
    ck,
    mq,
    mk,
    dropout_p,
    custom_mask_type,
    compute_log_sumexp=False,
    *,
    scale=None,
    **others,
):
    out, lse, _ = _attend(*_turned(q, k, v), bias, custom_mask_type == 1, scale)
    seen = _padded(lse) if compute_log_sumexp else lse[..., :0].clone()
    return *_turned(out), seen, _seed(), _seed(), q.shape[1], k.shape[1]


def _efficient_long_backward(
    grad, q, k, v, bias, out, cq, ck, mq, mk, lse, dropout_p, seed, offset, custom_mask_type, bias_requires_grad,
    *, scale=None, **others,
):  # fmt: skip
    turned = _turned(grad, q, k, v, out)
    grads = _attend_backward(*turned, lse[..., : q.shape[1]], bias, custom_mask_type == 1, scale)
    return *_turned(*grads[:3]), grads[3] if bias_requires_grad else None


def _rms_norm_backward(grad, x, normalized_shape, rstd, weight, mask):
    over, rows = list(range(-len(normalized_shape), 0)), list(range(x.dim() - len(normalized_shape)))
    down, seen = grad if weight is None else grad * weight, x * rstd
    into = (down - seen * (down * seen).mean(over, keepdim=True)) * rstd
    return into if mask[0] else None, (grad * seen).sum(rows) if mask[1] else None


# -- calls -------------------------------------------------------------------------------------------------------------

# Sizes of batch, heads, queries, keys and width, of heads of keys, and a mask's shape.
_SHAPES: tuple[tuple[tuple[int, ...], bool, tuple[int, ...] | None], ...] = (
    ((3, 5, 2, 3, 2, 5), False, None),
    ((4, 4, 4, 3, 1, 4), True, None),  # which dim is which?
    ((2, 4, 3, 2, 1, 2), False, None),  # heads share keys
    ((3, 4, 1, 2, 1, 1), True, None),
    ((2, 3, 2, 3, 1, 3), False, (2, 3, 2, 3)),
    ((3, 2, 2, 3, 1, 2), False, (1, 2, 2, 3)),
    ((2, 4, 1, 3, 1, 4), False, (2, 1, 1, 3)),
)


def _calls(make: Callable[..., Call | None]) -> Callable[[], list[Call]]:
    def calls() -> list[Call]:
        out = []
        for (b, h, s, t, e, shared), causal, mask in _SHAPES:
            q, k, v = _x(b, h, s, e), _x(b, shared, t, e, seed=1), _x(b, shared, t, e, seed=2)
            bias = None if mask is None else _x(*mask, seed=3)
            y, lse, _ = _attend(q, k, v, bias, causal, None)
            call = make(q, k, v, y, lse, _x(*y.shape, seed=4), bias, causal)
            out += [] if call is None else [call]
        return out

    return calls


def _of_flash(q, k, v, y, lse, grad, bias, causal):
    return None if bias is not None else _call(q, k, v, 0.0, causal, False)


def _of_flash_backward(q, k, v, y, lse, grad, bias, causal):
    sizes, states = (q.shape[2], k.shape[2]), (_seed(), _seed())
    return (
        None if bias is not None else _call(grad, q, k, v, y, lse, None, None, *sizes, 0.0, causal, *states)
    )


def _of_efficient(q, k, v, y, lse, grad, bias, causal):
    return _call(q, k, v, bias, True, 0.0, causal) if q.shape[1] == k.shape[1] else None


def _of_efficient_backward(q, k, v, y, lse, grad, bias, causal):
    if q.shape[1] != k.shape[1]:
        return None  # its heads do not share
    mask = [True, True, True, bias is not None]
    return _call(grad, q, k, v, bias, y, _padded(lse), _seed(), _seed(), 0.0, mask, causal)


def _of_cudnn_backward(q, k, v, y, lse, grad, bias, causal):
    sizes = (q.shape[2], k.shape[2])
    return _call(grad, q, k, v, y, lse[..., None], _seed(), _seed(), bias, None, None, *sizes, 0.0, causal)


def _of_overrideable_backward(q, k, v, y, lse, grad, bias, causal):
    mask, sizes = [True, True, True, bias is not None], (q.shape[2], k.shape[2])
    return _call(grad, q, k, v, bias, mask, y, lse, None, None, *sizes, 0.0, causal, _seed(), _seed())


def _of_flash_long(q, k, v, y, lse, grad, bias, causal):
    sizes = (q.shape[2], k.shape[2])
    return None if bias is not None else _call(*_turned(q, k, v), None, None, *sizes, 0.0, causal, False)


def _of_flash_long_backward(q, k, v, y, lse, grad, bias, causal):
    sizes, states = (q.shape[2], k.shape[2]), (_seed(), _seed())
    turned = _turned(grad, q, k, v, y)
    return None if bias is not None else _call(*turned, lse, None, None, *sizes, 0.0, causal, *states)


def _of_efficient_long(q, k, v, y, lse, grad, bias, causal):
    call = _call(*_turned(q, k, v), bias, None, None, None, None, 0.0, int(causal), True)
    return call if q.shape[1] == k.shape[1] else None


def _of_efficient_long_backward(q, k, v, y, lse, grad, bias, causal):
    if q.shape[1] != k.shape[1]:
        return None
    turned, sizes = _turned(grad, q, k, v), (q.shape[2], k.shape[2])
    rest = (_padded(lse), 0.0, _seed(), _seed(), int(causal), bias is not None)
    return _call(*turned, bias, *_turned(y), None, None, *sizes, *rest)


def _rms_norms() -> list[Call]:
    some = [((5, 4), [4]), ((3, 5, 4), [5, 4]), ((2, 3, 4), [4]), ((1, 6), [6])]
    out = []
    for i, (shape, over) in enumerate(some):
        x = _x(*shape)
        rstd = x.square().mean(list(range(-len(over), 0)), keepdim=True).rsqrt()
        weight = None if i == 2 else _x(*over, seed=1)
        for mask in ([True, True], [True, False], [False, True]):
            want = [mask[0], mask[1] and weight is not None]
            out += [_call(_x(*shape, seed=3), x, over, rstd, weight, want)] if any(want) else []
    return out


_NVIDIA = "its kernel is for CUDA"
# By name: why it is not here, what stands in for it, and calls.
ABSENT: dict[str, tuple[str, _Kernel, Callable[[], list[Call]]]] = {
    "aten._scaled_dot_product_flash_attention.default": (_NVIDIA, _flash, _calls(_of_flash)),
    "aten._scaled_dot_product_flash_attention_backward.default": (
        _NVIDIA, _flash_backward, _calls(_of_flash_backward),
    ),
    "aten._scaled_dot_product_efficient_attention.default": (
        _NVIDIA, _efficient, _calls(_of_efficient),
    ),
    "aten._scaled_dot_product_efficient_attention_backward.default": (
        _NVIDIA, _efficient_backward, _calls(_of_efficient_backward),
    ),
    "aten._scaled_dot_product_cudnn_attention.default": (
        _NVIDIA, _cudnn, _calls(lambda q, k, v, y, lse, g, bias, causal: _call(q, k, v, bias, True, 0.0, causal)),
    ),
    "aten._scaled_dot_product_cudnn_attention_backward.default": (
        _NVIDIA, _cudnn_backward, _calls(_of_cudnn_backward),
    ),
    "aten._scaled_dot_product_fused_attention_overrideable.default": (
        "who has another device brings its kernel",
        _overrideable, _calls(lambda q, k, v, y, lse, g, bias, causal: _call(q, k, v, bias, 0.0, causal)),
    ),
    "aten._scaled_dot_product_fused_attention_overrideable_backward.default": (
        "who has another device brings its kernel", _overrideable_backward, _calls(_of_overrideable_backward),
    ),
    "aten._scaled_dot_product_attention_math_for_mps.default": (
        "its kernel is for MPS", _mps, _calls(lambda q, k, v, y, lse, g, bias, causal: _call(q, k, v, bias, 0.0, causal)),
    ),
    "aten._flash_attention_forward.default": (_NVIDIA, _flash_long, _calls(_of_flash_long)),
    "aten._flash_attention_backward.default": (_NVIDIA, _flash_long_backward, _calls(_of_flash_long_backward)),
    "aten._efficient_attention_forward.default": (_NVIDIA, _efficient_long, _calls(_of_efficient_long)),
    "aten._efficient_attention_backward.default": (
        _NVIDIA, _efficient_long_backward, _calls(_of_efficient_long_backward),
    ),
    "aten._fused_rms_norm_backward.default": (
        "its kernel is for CUDA and MPS; on the CPU the norm is made of other ops", _rms_norm_backward, _rms_norms,
    ),
}  # fmt: skip


@contextmanager
def standing_in() -> Iterator[None]:
    """All of them as if the CPU had kernels of them."""
    here = torch.library.Library("aten", "IMPL")
    try:
        for name, (_, kernel, _) in ABSENT.items():
            here.impl(name.removeprefix("aten.").removesuffix(".default"), kernel, "CPU")
        yield
    finally:
        here._destroy()
