"""The strides that are inferred for results equal those that kernels for the CPU give."""

from __future__ import annotations

import random

import torch

from shardwise.call.cpu_strides import CPU_KERNELS
from shardwise.call.fft_strides import FFT_KERNELS
from shardwise.call.meta import infer_outputs

aten = torch.ops.aten
DIM, ROWS = torch.tensor([0]), (2, 3, 4, 4)


def strided(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    order = draw.sample(range(len(shape)), len(shape))
    x = torch.rand([shape[d] for d in order], dtype=torch.float64).to(dtype)
    x = x.permute(sorted(range(len(shape)), key=order.__getitem__))
    kind = draw.random()
    if kind < 0.2:
        return x.narrow(1, 0, 1).expand(shape)
    return x if kind < 0.6 else x.repeat_interleave(2, -1)[..., ::2]


def calls(draw):
    """A call of each op with drawn strides."""
    x, grad = strided(draw, ROWS), strided(draw, ROWS)
    _, mean, scale = aten.native_layer_norm.default(x, [4], None, None, 1e-5)
    dim = draw.randrange(4)
    yield aten.hardtanh_backward.default, grad, x, -0.5, 0.5
    yield aten.softplus_backward.default, grad, x, 1.0, 20.0
    yield aten.native_dropout_backward.default, grad, x > 0.5, 2.0
    yield aten.gelu_backward.default, grad, x
    yield aten.sigmoid_backward.default, grad, x
    yield aten.tanh_backward.default, grad, x
    yield aten.threshold_backward.default, grad, x, 0.5
    yield aten.elu_backward.default, grad, 1.0, 1.0, 1.0, False, x
    yield aten.leaky_relu_backward.default, grad, x, 0.1, False
    yield aten._log_softmax_backward_data.default, grad, x, dim, torch.float64
    weights = torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    yield aten.native_layer_norm_backward.default, grad, x, [4], mean, scale, *weights, [True] * 3
    ones = torch.ones(3, dtype=torch.float64)
    yield (
        aten.native_batch_norm_backward.default,
        grad,
        x,
        ones,
        None,
        None,
        ones,
        ones,
        True,
        1e-5,
        [True] * 3,
    )
    yield aten.nonzero_static.default, x, {"size": 5}
    yield aten._linalg_svd.default, x, draw.random() < 0.5
    yield aten.linalg_eig.default, x
    yield aten.max_unpool2d.default, x, torch.zeros(ROWS, dtype=torch.int64), [8, 8]
    yield aten.channel_shuffle.default, x, 3
    yield aten.index_fill.int_Scalar, x, dim, DIM, 1.0
    yield aten.index_fill.int_Tensor, x, dim, DIM, torch.tensor(1.0, dtype=torch.float64)


def test_inferred_strides_equal_those_of_the_kernels():
    draw, seen = random.Random(0), set()
    for _ in range(60):
        for func, *args in calls(draw):
            seen.add(func)
            kwargs = args.pop() if isinstance(args[-1], dict) else {}
            result = func(*args, **kwargs)
            outputs = result if isinstance(result, tuple) else (result,)
            for got, want in zip(infer_outputs(func, tuple(args), kwargs), outputs, strict=True):
                described = [(t.shape, t.stride(), t.dtype) for t in (got, want)]
                assert described[0] == described[1], (func, [getattr(a, "stride", int)() for a in args])
    assert seen == set(CPU_KERNELS) - set(FFT_KERNELS)


def test_strides_of_elementwise_ops_of_expanded_tensors_in_half_precision():
    draw = random.Random(1)
    ops = (
        aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.maximum.default, aten.lt.Tensor, aten.pow.Tensor_Tensor,
        aten.atan2.default, aten.gelu_backward.default, aten.silu_backward.default, aten.clamp_min.Tensor,
    )  # fmt: skip
    for _ in range(60):
        for dtype in (torch.bfloat16, torch.float16):
            a, b, c = (strided(draw, (4, 3, 5), dtype) for _ in range(3))
            calls = [(op, (a, b)) for op in ops]
            calls += [
                (aten.where.self, (a > 0.5, b, c)),
                (aten.addcmul.default, (a, b, c)),
                (aten.clamp.Tensor, (a, b, c)),
            ]
            for op, args in calls:
                want, (got,) = op(*args), infer_outputs(op, args, {})
                assert (got.stride(), got.dtype) == (want.stride(), want.dtype), (
                    op,
                    [t.stride() for t in args],
                )
