"""Programs in which the size of a split dim varies, whether or not the axis divides it: functions of a mesh with one axis, `tp`.

A program returns a function and, for a size n, its arguments, as in `dynamic_programs.py`.
"""

import torch
from tests.compile.dynamic_programs import Program, smooth
from tests.compile.matrix import S0, S1, P, R, numbers, tensor
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

UNEVEN: dict[str, Program] = {}


def uneven(make: Program) -> Program:
    UNEVEN[make.__name__] = make
    return make


@uneven
def pointwise(mesh):
    return smooth, lambda n: (tensor(mesh, n, 6), tensor(mesh, n, 6, seed=1))


@uneven
def columns(mesh):
    return smooth, lambda n: (tensor(mesh, 4, n, at=S1), tensor(mesh, 4, n, at=S1, seed=1))


@uneven
def of_two_layouts(mesh):
    return smooth, lambda n: (tensor(mesh, n, 6), tensor(mesh, n, 6, at=R, seed=1))


@uneven
def linear(mesh):
    w, b = tensor(mesh, 8, 6, at=R, seed=1), tensor(mesh, 8, at=R, seed=2)
    return functional.linear, lambda n: (tensor(mesh, n, 3, 6), w, b)


@uneven
def data_parallel_loss(mesh):
    """The batch is split, and the last one is smaller."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))
    model = sw.distribute_module(model, mesh)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, target):
            return functional.cross_entropy(self.model(x), target)

    return Loss(), lambda n: (tensor(mesh, n, 6, grad=False), numbers(mesh, 5, n, at=S0))


@uneven
def sequence_parallel_mlp(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6), nn.LayerNorm(6))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=S1, use_local_output=False),
        "3": RowwiseParallel(output_layouts=S1, use_local_output=False),
        "4": SequenceParallel(),
    }
    parallelize_module(model, mesh, plan)
    return model, lambda n: (tensor(mesh, 2, n, 6, at=S1),)


@uneven
def sequence_parallel_block(mesh):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.second = nn.LayerNorm(24), nn.RMSNorm(24)
            self.q, self.k, self.v, self.o = (nn.Linear(24, 24, bias=False) for _ in range(4))
            self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

        def forward(self, x):
            h = self.norm(x).redistribute(tp=R)
            q, k, v = (p(h).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q, self.k, self.v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(mixed.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.second(x).redistribute(tp=R))))

    torch.manual_seed(0)
    columns = {n: ColwiseParallel(input_layouts=R, use_local_output=False) for n in ("q", "k", "v", "up")}
    rows = {n: RowwiseParallel(output_layouts=S1, use_local_output=False) for n in ("o", "down")}
    norms = {n: SequenceParallel() for n in ("norm", "second")}
    return parallelize_module(Block(), mesh, columns | rows | norms), lambda n: (
        tensor(mesh, 2, n, 24, at=S1),
    )


@uneven
def norms(mesh):
    w, b = tensor(mesh, 8, at=R), tensor(mesh, 8, at=R, seed=3)

    def fn(x, w, b):
        return functional.layer_norm(x, (8,), w, b) + functional.rms_norm(x, (8,)) + x.softmax(1)

    return fn, lambda n: (tensor(mesh, n, 8), w, b)


@uneven
def norms_over_it(mesh):
    return lambda x: x.softmax(1) + x.log_softmax(-1), lambda n: (tensor(mesh, 4, n, at=S1),)


@uneven
def embedding_and_loss(mesh):
    table = tensor(mesh, 16, 4, at=R)

    def fn(tokens, table):
        return functional.cross_entropy(functional.embedding(tokens, table) @ table.t(), tokens)

    return fn, lambda n: (numbers(mesh, 16, n, at=S0), table)


@uneven
def reductions(mesh):
    return lambda x: (x.sum(0), x.mean(1), x.mean(0), x.norm()), lambda n: (tensor(mesh, n, 6),)


@uneven
def largest(mesh):
    return lambda x: (x.amax(0), x.amin(1), x.max()), lambda n: (tensor(mesh, n, 6),)


@uneven
def mean_loss(mesh):
    def fn(x, y):
        return ((x - y) ** 2).mean() / x.shape[0] + x.sum() / x.numel()

    return fn, lambda n: (tensor(mesh, n, 6), tensor(mesh, n, 6, seed=3))


@uneven
def variance(mesh):
    return lambda x: (x.var(0), x.std(1)), lambda n: (tensor(mesh, n, 6),)


@uneven
def gathered(mesh):
    return lambda x: (x * 2).redistribute(tp=R).sin(), lambda n: (tensor(mesh, n, 6),)


@uneven
def gathered_columns(mesh):
    return lambda x: (x * 2).redistribute(tp=R).sin(), lambda n: (tensor(mesh, 3, n, 2, at=S1),)


@uneven
def split(mesh):
    return lambda x: (x * 2).redistribute(tp=S0).sin(), lambda n: (tensor(mesh, n, 6, at=R),)


@uneven
def split_otherwise(mesh):
    return lambda x: (x * 2).redistribute(tp=S1).sin(), lambda n: (tensor(mesh, n, 12),)


@uneven
def split_by_it(mesh):
    return lambda x: (x * 2).redistribute(tp=S1).sin(), lambda n: (tensor(mesh, 12, n),)


@uneven
def reduced_and_split(mesh):
    w = tensor(mesh, 12, 6, seed=1)
    return lambda x, w: (x @ w).redistribute(tp=S0).sin(), lambda n: (tensor(mesh, n, 12, at=S1), w)


@uneven
def pending(mesh):
    return lambda x: (x * 2).redistribute(tp=P).redistribute(tp=R).sin(), lambda n: (tensor(mesh, n, 6),)


@uneven
def conversion(mesh):
    def fn(x):
        return x.to_local().sin(), x.full_tensor() * 2

    return fn, lambda n: (tensor(mesh, n, 6),)


@uneven
def from_blocks(mesh):
    def fn(x, whole):
        return sw.DTensor.from_local(x.to_local(), mesh, [S0], shape=whole.shape, stride=(6, 1)).sin()

    return fn, lambda n: (tensor(mesh, n, 6), tensor(mesh, n, 6, at=R))


@uneven
def dropout(mesh):
    return lambda x: functional.dropout(x.sin(), 0.4) * 2, lambda n: (tensor(mesh, n, 6),)


@uneven
def factories(mesh):
    def fn(x):
        y = torch.zeros_like(x) + x.new_ones(x.shape[0], 6) + torch.full_like(x, 2.0)
        z = sw.ones(x.shape[0], 6, device_mesh=mesh, placements=[S0])
        return x * y * z + sw.rand(x.shape[0], 6, device_mesh=mesh, placements=[S0])

    return fn, lambda n: (tensor(mesh, n, 6),)


@uneven
def transposed(mesh):
    return lambda x: x.t().contiguous().sin() * 2, lambda n: (tensor(mesh, n, 6),)


@uneven
def other_dims(mesh):
    def fn(x, y):
        return torch.cat([x, y], 1)[:, 2:5].sum(0), torch.stack([x, y]), x.chunk(2, 1)

    return fn, lambda n: (tensor(mesh, n, 6), tensor(mesh, n, 6, seed=1))


@uneven
def views(mesh):
    return lambda x: (x.view(x.shape[0], 2, 3).transpose(1, 2).flatten(1), x[:, None]), lambda n: (
        tensor(mesh, n, 6),
    )


@uneven
def checkpointed(mesh):
    w = tensor(mesh, 6, 8, at=R, seed=1)

    def fn(x, w):
        return checkpoint(lambda x: (x @ w).relu() @ w.t(), x, use_reentrant=False)

    return fn, lambda n: (tensor(mesh, n, 6), w)


@uneven
def in_place(mesh):
    def fn(x):
        y = x * 2
        y.add_(1).mul_(x)
        y[:, 1:3] = 0
        return y.relu_()

    return fn, lambda n: (tensor(mesh, n, 6),)


@uneven
def argument_in_place(mesh):
    def fn(x, y):
        x.mul_(2)
        return x + y

    return fn, lambda n: (tensor(mesh, n, 6, grad=False), tensor(mesh, n, 6, seed=1))


@uneven
def block_of_it(mesh):
    """Code on blocks, whose sizes depend on the rank."""
    return lambda x: x.to_local()[1:].sum(0) + x.to_local().shape[0], lambda n: (tensor(mesh, n, 6),)


@uneven
def both(mesh):
    """Two dims vary, of which one is split."""
    return lambda x, y: (x @ y).relu(), lambda n: (tensor(mesh, n, n + 1), tensor(mesh, n + 1, 4, at=R))


# ---- exchanges along the dim


@uneven
def slices(mesh):
    return lambda x: (x[1:] * 2, x[:-2].sin(), x[::2]), lambda n: (tensor(mesh, n, 6),)


@uneven
def joined(mesh):
    def fn(x, y):
        both = torch.cat([x, y])
        return both.sin(), both.softmax(0), both.mean(), sum(both.chunk(2))

    return fn, lambda n: (tensor(mesh, n, 6), tensor(mesh, n, 6, seed=1))


@uneven
def joined_with_longer_ones(mesh):
    def arguments(n):
        return tensor(mesh, n, 6), tensor(mesh, n + 3, 6, seed=1), tensor(mesh, 4, 6, seed=2)

    return lambda *parts: torch.cat(parts).redistribute(tp=R), arguments


@uneven
def flattened_with_outer_batch(mesh):
    w = tensor(mesh, 6, 8, at=R)

    def fn(x, w, target):
        logits = x.flatten(0, 1) @ w
        loss = functional.cross_entropy(logits, target.flatten())
        return loss, logits.relu().view(2, x.shape[1], 8)

    return fn, lambda n: (tensor(mesh, 2, n, 6, at=S1), w, numbers(mesh, 8, 2, n, at=S1))


@uneven
def rolled(mesh):
    return lambda x: x.roll(1, 0) + x.flip(0), lambda n: (tensor(mesh, n, 6),)


@uneven
def convolution(mesh):
    w = tensor(mesh, 4, 3, 3, at=R)
    return lambda x, w: functional.conv1d(x, w, padding=1), lambda n: (
        tensor(mesh, 2, 3, n, at=sw.Shard(2)),
        w,
    )


@uneven
def sorted_rows(mesh):
    return lambda x: (x.topk(2, 0)[0], x.sort(0)[0], x.cumsum(0)), lambda n: (tensor(mesh, n, 6),)


@uneven
def indices_of_largest(mesh):
    return lambda x: (*x.max(0), x.argmin(0), x.argmax()), lambda n: (tensor(mesh, n, 6),)


@uneven
def argument_and_view(mesh):
    def arguments(n):
        x = tensor(mesh, n, 6, grad=False)
        return x, x.t()

    return lambda x, y: (x * 2, y + 1), arguments


@uneven
def views_as_arguments(mesh):
    """Columns, rows, which have memory of their own, and both of a transposed tensor that has a gradient."""

    def arguments(n):
        x, y = tensor(mesh, n, 6, grad=False), tensor(mesh, n + 2, 6)
        return x[:, 2:5], x[:, 1:].detach(), y[2:], y.t()[1:4].t()

    return lambda *parts: [part.sin() + 1 for part in parts], arguments


@uneven
def asynchronous_argument(mesh):
    return lambda x: x.sin() + 1, lambda n: (tensor(mesh, n, 6).redistribute(tp=R, async_op=True),)
