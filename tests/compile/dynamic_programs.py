"""Programs whose sizes vary from call to call: each a function of a mesh with one axis, `tp`.

A program returns a function and, for a number n, its arguments. `test_dynamic_shapes.py` calls it with several n.
"""

from collections.abc import Callable
from typing import Any

import torch
from tests.compile.matrix import S0, S1, P, R, numbers, tensor
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.experimental import local_map
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    loss_parallel,
    parallelize_module,
)

Program = Callable[[Any], tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]]
UNSPLIT: dict[str, Program] = {}
"""A dim that no axis splits varies."""
SPLIT: dict[str, Program] = {}
"""A dim that the axis splits evenly varies."""


def unsplit(make: Program) -> Program:
    UNSPLIT[make.__name__] = make
    return make


def split(make: Program) -> Program:
    SPLIT[make.__name__] = make
    return make


def smooth(x, y):
    return (x * y + 2).relu().sin() / 3


@unsplit
def pointwise(mesh):
    return smooth, lambda n: (tensor(mesh, n, 6, at=S1), tensor(mesh, n, 6, at=S1, seed=1))


@unsplit
def of_two_layouts(mesh):
    return smooth, lambda n: (tensor(mesh, n, 6, at=R), tensor(mesh, n, 6, at=S1, seed=1))


@split
def pointwise_rows(mesh):
    return smooth, lambda n: (tensor(mesh, 2 * n, 6), tensor(mesh, 2 * n, 6, seed=1))


@unsplit
def linear(mesh):
    w, b = tensor(mesh, 8, 6, seed=1), tensor(mesh, 8, seed=2)
    return functional.linear, lambda n: (tensor(mesh, n, 3, 6, at=R), w, b)


@split
def linear_rows(mesh):
    w, b = tensor(mesh, 8, 6, at=R, seed=1), tensor(mesh, 8, at=R, seed=2)
    return functional.linear, lambda n: (tensor(mesh, 2 * n, 3, 6), w, b)


@unsplit
def reductions(mesh):
    return lambda x: (x.sum(0), x.mean(1), x.amax(1), x.norm()), lambda n: (tensor(mesh, n, 6, at=S1),)


@unsplit
def redistribute(mesh):
    return lambda x: (x * 2).redistribute(tp=R) + 1, lambda n: (tensor(mesh, n, 6, at=S1),)


@split
def redistribute_rows(mesh):
    return lambda x: (x * 2).redistribute(tp=S1).full_tensor() + 1, lambda n: (tensor(mesh, 2 * n, 6),)


def block(mesh):
    """A transformer block with parallel projections."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(8)
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            h = self.norm(x)
            q, k, v = (p(h).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q, self.k, self.v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(mixed.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(x)))

    torch.manual_seed(0)
    plan = {n: ColwiseParallel() for n in ("q", "k", "v", "up")}
    return parallelize_module(Block(), mesh, plan | {"o": RowwiseParallel(), "down": RowwiseParallel()})


@unsplit
def block_of_varying_batch(mesh):
    return block(mesh), lambda n: (torch.arange(n * 24.0).view(n, 3, 8) / 10,)


@unsplit
def block_of_varying_sequence(mesh):
    return block(mesh), lambda n: (torch.arange(n * 16.0).view(2, n, 8) / 10,)


@unsplit
def attention(mesh):
    def fn(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return fn, lambda n: tuple(tensor(mesh, 2, 4, n, 8, at=S1, seed=i) for i in range(3))


@unsplit
def split_vocabulary(mesh):
    table = tensor(mesh, 64, 4)  # so large that tokens are moved, for all sizes here

    def fn(tokens, table):
        return functional.cross_entropy(functional.embedding(tokens, table) @ table.t(), tokens)

    return fn, lambda n: (numbers(mesh, 64, n), table)


@unsplit
def norms_over_split_dim(mesh):
    w, b = tensor(mesh, 8), tensor(mesh, 8, seed=3)

    def fn(x, w, b):
        return functional.layer_norm(x, (8,), w, b) + functional.rms_norm(x, (8,)) + x.softmax(1)

    return fn, lambda n: (tensor(mesh, n, 8, at=S1), w, b)


@split
def norm_of_rows(mesh):
    w, b = tensor(mesh, 8, at=R), tensor(mesh, 8, at=R, seed=3)
    return lambda x, w, b: functional.layer_norm(x, (8,), w, b), lambda n: (tensor(mesh, 2 * n, 8), w, b)


@unsplit
def views(mesh):
    def fn(x):
        return x.view(x.shape[0], 2, 4, 3).transpose(1, 2).flatten(0, 1).permute(1, 0, 2)

    return fn, lambda n: (tensor(mesh, n, 8, 3, at=S1),)


@split
def conversion(mesh):
    def fn(x):
        return (sw.DTensor.from_local(x, mesh, [S0]) * 2).sum(0), sw.DTensor.from_local(
            x, mesh, [S0]
        ).to_local()

    return fn, lambda n: (torch.arange(3.0 * n).view(n, 3).requires_grad_(),)


@split
def sequence_parallel(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=S1)}
    parallelize_module(model, mesh, plan | {"3": RowwiseParallel(output_layouts=S1), "4": SequenceParallel()})
    return model, lambda n: (tensor(mesh, 2, 2 * n, 6, at=S1),)


@unsplit
def reads_layouts(mesh):
    def fn(x):
        if x.placements[0].is_shard(1) and x.device_mesh.size() == 2:
            return x * x.device_mesh.size(0) + x.to_local().shape[0] + x.shape[0]
        return x

    return fn, lambda n: (tensor(mesh, n, 6, at=S1),)


@split
def dropout(mesh):
    return lambda x: functional.dropout(x.sin(), 0.4) * 2, lambda n: (tensor(mesh, 2 * n, 6),)


@split
def mean_loss(mesh):
    def fn(x, y):
        return ((x - y) ** 2).mean() / x.shape[0] + x.sum() / x.numel()

    return fn, lambda n: (tensor(mesh, 2 * n, 6), tensor(mesh, 2 * n, 6, seed=3))


@unsplit
def factories(mesh):
    def fn(x):
        y = torch.zeros_like(x) + x.new_ones(x.shape[0], 6) + torch.full_like(x, 2.0)
        z = sw.ones(x.shape[0], 6, device_mesh=mesh, placements=[S1])
        return x * y * z + sw.rand(x.shape[0], 6, device_mesh=mesh, placements=[S1])

    return fn, lambda n: (tensor(mesh, n, 6, at=S1),)


@unsplit
def fully_sharded(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), lambda n: (torch.arange(n * 6.0).view(n, 6) / 10,)


@unsplit
def convolution_with_halo(mesh):
    w = tensor(mesh, 4, 3, 3, 3, at=R)
    return lambda x, w: functional.conv2d(x, w, padding=1), lambda n: (
        tensor(mesh, n, 3, 8, 6, at=sw.Shard(2)),
        w,
    )


@unsplit
def parallel_loss(mesh):
    def fn(x, target):
        with loss_parallel():
            return functional.cross_entropy(x, target)

    return fn, lambda n: (tensor(mesh, n, 10, at=S1), torch.arange(n) % 10)


@split
def checkpointed(mesh):
    w = tensor(mesh, 6, 8, at=R, seed=1)

    def fn(x, w):
        return checkpoint(lambda x: (x @ w).relu() @ w.t(), x, use_reentrant=False)

    return fn, lambda n: (tensor(mesh, 2 * n, 6), w)


@unsplit
def local_mapped(mesh):
    mapped = local_map(
        lambda a, b: a @ b,
        out_placements=[P],
        in_placements=([S1], [S0]),
        redistribute_inputs=True,
        device_mesh=mesh,
    )
    y = tensor(mesh, 6, 4)
    return lambda x, y: mapped(x, y) + 1, lambda n: (tensor(mesh, n, 6, at=S1), y)


@split
def cat_and_slices(mesh):
    def fn(x, y):
        return torch.cat([x, y], 1)[:, 2:5].sum(0), torch.stack([x, y]), x.chunk(2, 1)

    return fn, lambda n: (tensor(mesh, 2 * n, 6), tensor(mesh, 2 * n, 6, seed=1))


@unsplit
def in_place(mesh):
    def fn(x):
        y = x * 2
        y.add_(1).mul_(x)
        y[:, 1:3] = 0
        return y.relu_()

    return fn, lambda n: (tensor(mesh, n, 6, at=S1),)


@unsplit
def flattened_with_inner_split(mesh):
    return lambda x: (x.flatten(0, 1) * 2).view(x.shape), lambda n: (tensor(mesh, n, 4, 6, at=S1),)


@split
def groups_of_rows(mesh):
    return lambda x: x.unflatten(0, (-1, 2)).sum(1), lambda n: (tensor(mesh, 4 * n, 6),)


@split
def expanded_rows(mesh):
    return lambda x: x[:, None].expand(-1, 3, -1).reshape(-1, 6) + 1, lambda n: (tensor(mesh, 2 * n, 6),)


@unsplit
def classes(mesh):
    w = tensor(mesh, 10, 4)
    return lambda i, w: functional.one_hot(i, 10).float() @ w, lambda n: (numbers(mesh, 10, n), w)
