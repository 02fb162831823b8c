"""Ops without a CPU kernel: calls of each, and reference kernels in their place.

Their rows cannot be verified with the kernels that will run. They are verified with the same mathematics, on which a row
depends, and the shapes of their blocks with torch's meta kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.rules import calls
from tests.rules.calls import Call
from tests.rules.calls import call as _call
from torch import Tensor

from shardwise.torch_internals.releases import torch_release

# Ops with a row that exist only in torch 2.13.
REMOVED = {"aten.cholesky.default"} if torch_release() >= (2, 14) else set()

_Kernel = Callable[..., Any]
_PADDED = 32  # the efficient kernels pad the logsumexp to a multiple of this


def _x(*shape: int, seed: int = 0) -> Tensor:
    """Numbers in float32, the dtype of these kernels' logsumexp for all inputs."""
    return calls.x(*shape, dtype=torch.float32, seed=seed)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    out = q @ _repeat_heads(k, q).mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        out = out + torch.full(out.shape[-2:], -math.inf, dtype=out.dtype).triu(1)
    return out if bias is None else out + bias


def _repeat_heads(k: Tensor, q: Tensor) -> Tensor:
    """Repeat key heads to the number of query heads."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _sum_repeated(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of a tensor whose heads were repeated, or that was broadcast."""
    if like.dim() == 4 and like.shape[1] not in (1, grad.shape[1]):
        grad = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    return grad.sum_to_size(like.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(q, k, *how)
    weights = scores.softmax(-1)
    return weights @ _repeat_heads(v, q), scores.logsumexp(-1), weights


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients from the forward's outputs, as kernels compute them: `out` and the logsumexp of each query."""
    bias, scale = how[0], 1 / math.sqrt(q.shape[-1]) if how[2] is None else how[2]
    weights = (_scores(q, k, *how) - lse[..., None]).exp()
    into = weights * (grad @ _repeat_heads(v, q).mT - (grad * out).sum(-1, keepdim=True))
    return (
        into @ _repeat_heads(k, q) * scale,
        _sum_repeated(into.mT @ q * scale, k),
        _sum_repeated(weights.mT @ grad, v),
        None if bias is None else _sum_repeated(into, bias),
    )


def _seed() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _swap_heads(*tensors: Tensor | None) -> list[Any]:
    """Swap the dims of heads and positions."""
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
    out, lse, _ = _attend(*_swap_heads(q, k, v), None, is_causal, scale)
    states = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return *_swap_heads(out), lse, *states, q.new_empty(0)


def _flash_long_backward(
    grad, q, k, v, out, lse, cq, ck, mq, mk, dropout_p, is_causal, seed, unused, *, scale=None, **others
):
    swapped = _swap_heads(grad, q, k, v, out)
    return tuple(_swap_heads(*_attend_backward(*swapped, lse, None, is_causal, scale)[:3]))


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
    out, lse, _ = _attend(*_swap_heads(q, k, v), bias, custom_mask_type == 1, scale)
    seen = _padded(lse) if compute_log_sumexp else lse[..., :0].clone()
    return *_swap_heads(out), seen, _seed(), _seed(), q.shape[1], k.shape[1]


def _efficient_long_backward(
    grad, q, k, v, bias, out, cq, ck, mq, mk, lse, dropout_p, seed, offset, custom_mask_type, bias_requires_grad,
    *, scale=None, **others,
):  # fmt: skip
    swapped = _swap_heads(grad, q, k, v, out)
    grads = _attend_backward(*swapped, lse[..., : q.shape[1]], bias, custom_mask_type == 1, scale)
    return *_swap_heads(*grads[:3]), grads[3] if bias_requires_grad else None


def _rms_norm_backward(grad, x, normalized_shape, rstd, weight, mask):
    over, rows = list(range(-len(normalized_shape), 0)), list(range(x.dim() - len(normalized_shape)))
    down, seen = grad if weight is None else grad * weight, x * rstd
    into = (down - seen * (down * seen).mean(over, keepdim=True)) * rstd
    return into if mask[0] else None, (grad * seen).sum(rows) if mask[1] else None


# -- calls -------------------------------------------------------------------------------------------------------------

# Sizes (batch, query heads, queries, keys, width, key heads), whether it is causal, and the shape of a mask.
_SHAPES: tuple[tuple[tuple[int, ...], bool, tuple[int, ...] | None], ...] = (
    ((3, 5, 2, 3, 2, 5), False, None),
    ((4, 4, 4, 3, 1, 4), True, None),  # equal sizes, so that dims can be confused
    ((2, 4, 3, 2, 1, 2), False, None),  # query heads share key heads
    ((3, 4, 1, 2, 1, 1), True, None),
    ((2, 3, 2, 3, 1, 3), False, (2, 3, 2, 3)),
    ((3, 2, 2, 3, 1, 2), False, (1, 2, 2, 3)),
    ((2, 4, 1, 3, 1, 4), False, (2, 1, 1, 3)),
)


def _calls(make: Callable[..., Call | None]) -> Callable[[], list[Call]]:
    def build() -> list[Call]:
        out = []
        for (b, h, s, t, e, shared), causal, mask in _SHAPES:
            q, k, v = _x(b, h, s, e), _x(b, shared, t, e, seed=1), _x(b, shared, t, e, seed=2)
            bias = None if mask is None else _x(*mask, seed=3)
            y, lse, _ = _attend(q, k, v, bias, causal, None)
            call = make(q, k, v, y, lse, _x(*y.shape, seed=4), bias, causal)
            out += [] if call is None else [call]
        return out

    return build


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
        return None  # it does not support shared key heads
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
    return None if bias is not None else _call(*_swap_heads(q, k, v), None, None, *sizes, 0.0, causal, False)


def _of_flash_long_backward(q, k, v, y, lse, grad, bias, causal):
    sizes, states = (q.shape[2], k.shape[2]), (_seed(), _seed())
    swapped = _swap_heads(grad, q, k, v, y)
    return None if bias is not None else _call(*swapped, lse, None, None, *sizes, 0.0, causal, *states)


def _of_efficient_long(q, k, v, y, lse, grad, bias, causal):
    call = _call(*_swap_heads(q, k, v), bias, None, None, None, None, 0.0, int(causal), True)
    return call if q.shape[1] == k.shape[1] else None


def _of_efficient_long_backward(q, k, v, y, lse, grad, bias, causal):
    if q.shape[1] != k.shape[1]:
        return None
    swapped, sizes = _swap_heads(grad, q, k, v), (q.shape[2], k.shape[2])
    rest = (_padded(lse), 0.0, _seed(), _seed(), int(causal), bias is not None)
    return _call(*swapped, bias, *_swap_heads(y), None, None, *sizes, *rest)


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
# By name: why there is no CPU kernel, a reference kernel, and calls.
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
        "other devices register their own kernel",
        _overrideable, _calls(lambda q, k, v, y, lse, g, bias, causal: _call(q, k, v, bias, 0.0, causal)),
    ),
    "aten._scaled_dot_product_fused_attention_overrideable_backward.default": (
        "other devices register their own kernel", _overrideable_backward, _calls(_of_overrideable_backward),
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
        "its kernel is for CUDA and MPS; on the CPU the norm is composed of other ops", _rms_norm_backward, _rms_norms,
    ),
}  # fmt: skip


@contextmanager
def reference_kernels() -> Iterator[None]:
    """Register the reference kernels for the CPU."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, (_, kernel, _) in ABSENT.items():
            library.impl(name.removeprefix("aten.").removesuffix(".default"), kernel, "CPU")
        yield
    finally:
        library._destroy()
