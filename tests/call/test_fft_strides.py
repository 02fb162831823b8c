"""Results of Fourier transforms have the strides that they have on one device, and their blocks are in the same order in memory."""

from __future__ import annotations

import os
import random

import pytest
import torch
from tests.dense import randn

import shardwise as sw
from shardwise.call.fft_strides import FFT_KERNELS
from shardwise.call.strides import in_order, memory_order
from shardwise.layout import Layout

aten = torch.ops.aten
COUNT = 2000 if os.environ.get("SHARDWISE_DEEP") == "1" else 60
ONE_DIM = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
SEVERAL = ("fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn")
REAL = ("rfft", "ihfft", "rfftn", "ihfftn")


def strided(draw: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor with dims in a drawn order in memory, some of which may have the same elements or overlap."""
    order = draw.sample(range(len(shape)), len(shape))
    x = torch.randn([shape[d] for d in order], dtype=dtype).permute(
        sorted(range(len(shape)), key=order.__getitem__)
    )
    kind = draw.random()
    if kind < 0.15:
        return x.narrow(0, 0, 1).expand(shape)
    if kind < 0.3 and len(shape) > 1:
        long = torch.randn([shape[0] + shape[-1] - 1, *shape[1:-1]], dtype=dtype)
        return long.unfold(0, shape[-1], 1)
    return x


def meaning(x: torch.Tensor) -> tuple[list[int], bool]:
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1], x.is_contiguous()


def test_inferred_strides_equal_those_of_the_kernels():
    draw = random.Random(0)
    for _ in range(COUNT * 5):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        dims = draw.sample(range(len(shape)), draw.randint(1, len(shape)))
        for func in FFT_KERNELS:
            is_real = func is aten._fft_r2c.default
            x = strided(draw, shape, torch.float64 if is_real else torch.complex128)
            last: object = draw.random() < 0.5
            if func is aten._fft_c2r.default:
                last = max(1, 2 * (shape[dims[-1]] - 1))
            (inferred,) = (
                FFT_KERNELS[func](t, dims, 0, last)
                for t in [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")]
            )
            assert meaning(inferred) == meaning(func(x, dims, 0, last)), (func, x.shape, x.stride(), dims)


def drawn_call(draw: random.Random, x: torch.Tensor):
    """A call of a function of torch.fft, with its arguments."""
    norm = draw.choice([None, "ortho", "forward"])
    real = not x.is_complex()
    if draw.random() < 0.5:
        name, dim = draw.choice([n for n in ONE_DIM if real or n not in REAL]), draw.randrange(x.dim())
        n = draw.choice([None, None, x.shape[dim], x.shape[dim] + 1, max(2, x.shape[dim] - 1)])
        return name, {"dim": dim, "n": n, "norm": norm}
    name = draw.choice([n for n in SEVERAL if real or n not in REAL])
    return name, {"dim": tuple(draw.sample(range(x.dim()), draw.randint(1, x.dim()))), "norm": norm}


@pytest.mark.parametrize("part", range(2))
def test_drawn_transforms(part):
    draw = random.Random(part)
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for _ in range(COUNT):
            shape = [draw.randint(2, 5) for _ in range(draw.randint(1, 4))]
            order = draw.sample(range(len(shape)), len(shape))
            back = sorted(range(len(shape)), key=order.__getitem__)
            dense = randn(*[shape[d] for d in order], dtype=draw.choice([torch.float64, torch.complex128]))
            places = [
                draw.choice([sw.Replicate(), *map(sw.Shard, range(len(shape)))]) for _ in mesh.mesh_dim_names
            ]
            x = sw.distribute_tensor(dense, mesh, places).permute(back)
            name, kwargs = drawn_call(draw, dense.permute(back))
            want, got = (getattr(torch.fft, name)(t, **kwargs) for t in (dense.permute(back), x))
            where = (name, kwargs, x._spec, got._spec)
            assert meaning(got) == meaning(want), where
            torch.testing.assert_close(got.full_tensor().ranks[1], want.resolve_conj(), msg=str(where))
            assert_one_story(got, where)


def assert_one_story(got: sw.DTensor, where: object) -> None:
    """The blocks have their dims in memory in the order that the strides of the tensor say."""
    assert isinstance(got.sharding, Layout)
    memory = memory_order(tuple(got.shape), got.stride())
    for block in got.to_local().ranks:
        assert in_order(block, memory) is block, (where, block.shape, block.stride())
