"""The matrix of programs that `torch.compile(fullgraph=True)` compiles: each a function of a mesh with one axis, `tp`.

A program returns a function and its arguments. `compile_matrix.py` runs both eagerly and compiled.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.experimental import local_map
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    linear_cross_entropy,
    loss_parallel,
    parallelize_module,
    replicate,
)

R, S0, S1, P = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()
Program = Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]
PROGRAMS: dict[str, Program] = {}


def program(make: Program) -> Program:
    PROGRAMS[make.__name__] = make
    return make


def tensor(mesh, *shape, at=S0, grad=True, seed=0, dtype=torch.float32):
    """A distributed tensor of known numbers."""
    dense = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x = sw.distribute_tensor(dense, mesh, [at], src_data_rank=None)
    return x.requires_grad_() if grad else x


def numbers(mesh, high, *shape, at=R, seed=0):
    dense = torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))
    return sw.distribute_tensor(dense, mesh, [at], src_data_rank=None)


# ---- ops


@program
def pointwise(mesh):
    return lambda x, y: (x * y + 2).relu().sin() / 3, (tensor(mesh, 4, 6), tensor(mesh, 4, 6, seed=1))


@program
def uneven(mesh):
    return lambda x: (x * 2).exp(), (tensor(mesh, 5, 6),)


@program
def broadcasting(mesh):
    return lambda x, b: x + b, (tensor(mesh, 4, 6), tensor(mesh, 6, at=R))


@program
def linear(mesh):
    args = tensor(mesh, 4, 6, at=R), tensor(mesh, 8, 6, seed=1), tensor(mesh, 8, seed=2)
    return functional.linear, args


@program
def attention(mesh):
    def fn(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return fn, tuple(tensor(mesh, 2, 4, 6, 8, at=S1, seed=i) for i in range(3))


@program
def split_vocabulary(mesh):
    def fn(tokens, table):
        h = functional.embedding(tokens, table)
        return functional.cross_entropy(h @ table.t(), tokens)

    return fn, (numbers(mesh, 10, 7), tensor(mesh, 10, 6))


@program
def softmax_over_split_dim(mesh):
    return lambda x: x.softmax(0) + x.log_softmax(0), (tensor(mesh, 6, 5),)


@program
def layer_norm_over_split_dim(mesh):
    def fn(x, w, b):
        return functional.layer_norm(x, (8,), w, b)

    return fn, (tensor(mesh, 4, 8, at=S1), tensor(mesh, 8), tensor(mesh, 8, seed=3))


@program
def rms_and_group_norm(mesh):
    def fn(x):
        return functional.rms_norm(x, (8,)) + functional.group_norm(x.unsqueeze(-1), 2).squeeze(-1)

    return fn, (tensor(mesh, 4, 8),)


@program
def batch_norm(mesh):
    module = sw.distribute_module(nn.BatchNorm1d(6), mesh)
    return module, (tensor(mesh, 8, 6),)


@program
def convolution_with_halo(mesh):
    def fn(x, w):
        return functional.conv2d(x, w, padding=1)

    return fn, (tensor(mesh, 1, 3, 8, 6, at=sw.Shard(2)), tensor(mesh, 4, 3, 3, 3, at=R))


@program
def views(mesh):
    return lambda x: x.view(4, 3, 2).transpose(0, 1).flatten(1).permute(1, 0).unsqueeze(0), (
        tensor(mesh, 4, 6),
    )


@program
def in_place(mesh):
    def fn(x):
        y = x * 2
        y.add_(1).mul_(x)
        y[1:3] = 0
        return y.relu_()

    return fn, (tensor(mesh, 4, 6),)


@program
def in_place_on_an_argument(mesh):
    def fn(x):
        x.mul_(2).add_(1)
        return x.sum()

    return fn, (tensor(mesh, 4, 6, grad=False),)


@program
def slices(mesh):
    return lambda x: x[1:4] * x[:3] + x[-1] + x[:, ::2].sum(), (tensor(mesh, 6, 4),)


@program
def sort_and_cumsum(mesh):
    return lambda x: x.cumsum(0) + x.sort(0).values + x.sort(1, descending=True)[0], (tensor(mesh, 6, 4),)


@program
def reductions(mesh):
    return lambda x: (x.sum(), x.mean(0), x.amax(1), x.std(), x.norm(), x.argmax(0)), (tensor(mesh, 6, 4),)


@program
def gather_and_index(mesh):
    def fn(x, index):
        return x.gather(0, index) + x[index[:, 0]] + torch.where(x > 0, x, -x).index_select(0, index[:, 1])

    return fn, (tensor(mesh, 6, 4), numbers(mesh, 6, 6, 4))


@program
def cat_and_stack(mesh):
    def fn(x, y):
        return torch.cat([x, y]), torch.stack([x, y], 1), x.chunk(2, 1)

    return fn, (tensor(mesh, 4, 6), tensor(mesh, 4, 6, seed=1))


@program
def einsum(mesh):
    return lambda x, y: torch.einsum("bij,bjk->bik", x, y), (tensor(mesh, 4, 3, 5), tensor(mesh, 4, 5, 2))


# ---- random numbers


@program
def dropout(mesh):
    return lambda x: functional.dropout(x, 0.4) + functional.dropout(x, 0.1), (tensor(mesh, 4, 6),)


@program
def random_like(mesh):
    return lambda x: x + torch.rand_like(x) + torch.randn_like(x) + torch.bernoulli(x.sigmoid()), (
        tensor(mesh, 4, 6),
    )


@program
def random_in_place(mesh):
    return lambda x: x * torch.empty_like(x).uniform_(1, 2).add_(torch.zeros_like(x).normal_()), (
        tensor(mesh, 4, 6),
    )


@program
def random_factories(mesh):
    def fn(x):
        return (
            x
            + sw.rand(4, 6, device_mesh=mesh, placements=[S0])
            + sw.randn(4, 6, device_mesh=mesh, placements=[S1])
        )

    return fn, (tensor(mesh, 4, 6),)


@program
def attention_with_dropout(mesh):
    def fn(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    return fn, tuple(tensor(mesh, 2, 4, 6, 8, at=S1, seed=i) for i in range(3))


# ---- conversion


@program
def from_local(mesh):
    def fn(x):
        return (sw.DTensor.from_local(x, mesh, [S0]) * 2).sum(0)

    return fn, (torch.arange(6.0).view(2, 3).requires_grad_(),)


@program
def from_local_pending(mesh):
    def fn(x):
        return sw.DTensor.from_local(x * 2, mesh, [P]).redistribute(mesh, [R]) + 1

    return fn, (torch.arange(6.0).view(2, 3).requires_grad_(),)


@program
def to_local(mesh):
    return lambda x: (x * 2).to_local() + 1, (tensor(mesh, 4, 6),)


@program
def to_local_with_gradients(mesh):
    return lambda x: (x * 2).to_local(grad_placements=[P]) + 1, (tensor(mesh, 4, 6, at=R),)


@program
def redistribute(mesh):
    return lambda x: (x * 2).redistribute(mesh, [S1]).redistribute(placements=[R]) + 1, (tensor(mesh, 4, 6),)


@program
def redistribute_by_name(mesh):
    return lambda x: (x * 2).redistribute(tp=S1) + 1, (tensor(mesh, 4, 6),)


@program
def redistribute_async(mesh):
    return lambda x: (x * 2).redistribute(tp=R, async_op=True) + 1, (tensor(mesh, 4, 6),)


@program
def redistribute_in_bf16(mesh):
    def fn(x):
        return (x * 2).redistribute(tp=R, forward_dtype=torch.bfloat16, backward_dtype=torch.bfloat16) + 1

    return fn, (tensor(mesh, 4, 6),)


@program
def full_tensor(mesh):
    return lambda x: (x * 2).full_tensor() + 1, (tensor(mesh, 4, 6),)


@program
def distribute_tensor(mesh):
    def fn(x, y):
        return x + sw.distribute_tensor(y, mesh, [S0])

    return fn, (tensor(mesh, 4, 6), torch.arange(24.0).view(4, 6))


@program
def factories(mesh):
    def fn(x):
        y = sw.ones(4, 6, device_mesh=mesh, placements=[S0]) + sw.arange(6, device_mesh=mesh, placements=[R])
        z = sw.full((4, 6), 3.0, device_mesh=mesh, placements=[S1]) + sw.zeros(4, 6, device_mesh=mesh)
        return x * y + z

    return fn, (tensor(mesh, 4, 6),)


@program
def torch_factories(mesh):
    return lambda x: x + torch.ones_like(x) + x.new_zeros(4, 6) + torch.full_like(x, 2.0), (
        tensor(mesh, 4, 6),
    )


@program
def local_mapped(mesh):
    mapped = local_map(
        lambda a, b: a @ b,
        out_placements=[P],
        in_placements=([S1], [S0]),
        redistribute_inputs=True,
        device_mesh=mesh,
    )
    return lambda x, y: mapped(x, y) + 1, (tensor(mesh, 4, 6, at=S1), tensor(mesh, 6, 4))


@program
def redistribute_many(mesh):
    def fn(x, y):
        return [t + 1 for t in sw.redistribute_many([x * 2, y * 2], [[R], [R]])]

    return fn, (tensor(mesh, 4, 6), tensor(mesh, 5, 3))


@program
def pending_output(mesh):
    return lambda x, w: x @ w, (tensor(mesh, 4, 6, at=S1), tensor(mesh, 6, 4))


@program
def reads_layouts(mesh):
    def fn(x):
        if x.placements[0].is_shard(0) and x.device_mesh.size() == 2 and x.placements == (S0,):
            return x * x.device_mesh.size(0) + x.to_local().shape[0]
        return x

    return fn, (tensor(mesh, 4, 6),)


@program
def isinstance_and_shape(mesh):
    def fn(x):
        assert isinstance(x, sw.DTensor)
        assert type(x) is sw.DTensor
        return x * x.shape[0] + x.numel() + x.stride(0)

    return fn, (tensor(mesh, 4, 6),)


# ---- autograd


@program
def several_outputs(mesh):
    def fn(x, w):
        logits = x @ w
        return logits.square().mean(), logits, x * 1, w.detach() + 1

    return fn, (tensor(mesh, 4, 6), tensor(mesh, 6, 8, at=R, seed=1))


@program
def gradient_hook(mesh):
    def fn(x):
        y = x * 2
        y.register_hook(lambda grad: grad * 3)
        return y.sin()

    return fn, (tensor(mesh, 4, 6),)


@program
def checkpointed(mesh):
    def fn(x, w):
        return checkpoint(lambda x: (x @ w).relu() @ w.t(), x, use_reentrant=False)

    return fn, (tensor(mesh, 4, 6), tensor(mesh, 6, 8, at=R, seed=1))


@program
def checkpointed_dropout(mesh):
    def fn(x):
        return checkpoint(lambda x: functional.dropout(x.sin(), 0.5).exp(), x, use_reentrant=False)

    return fn, (tensor(mesh, 4, 6),)


@program
def autocast(mesh):
    def fn(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ w).relu().float().softmax(-1)

    return fn, (tensor(mesh, 4, 6), tensor(mesh, 6, 8, at=R, seed=1))


@program
def custom_function(mesh):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 + 0 * ctx.saved_tensors[0]

    return lambda x: Double.apply(x).relu(), (tensor(mesh, 4, 6),)


@program
def no_grad_and_detach(mesh):
    def fn(x):
        with torch.no_grad():
            y = (x * 2).redistribute(tp=R)
        return x * y.detach()

    return fn, (tensor(mesh, 4, 6),)


# ---- modules


def mlp(mesh, **styles):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    return parallelize_module(
        model, mesh, {"0": styles.get("first", ColwiseParallel()), "2": styles.get("last", RowwiseParallel())}
    )


@program
def tp_mlp(mesh):
    return mlp(mesh), (torch.arange(24.0).view(4, 6) / 10,)


@program
def tp_mlp_with_sequence_parallel(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))
    plan = {
        "0": SequenceParallel(),
        "1": PrepareModuleInput(input_layouts=S1, desired_input_layouts=R),
        "3": RowwiseParallel(output_layouts=S1),
        "4": SequenceParallel(),
    }
    parallelize_module(model, mesh, {"1": ColwiseParallel(input_layouts=S1)})
    parallelize_module(model, mesh, {k: v for k, v in plan.items() if k != "1"})
    return model, (tensor(mesh, 2, 4, 6, at=S1),)


@program
def colwise_output_layout(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=S0)})
    return model, (torch.arange(24.0).view(4, 6) / 10,)


@program
def tp_attention_block(mesh):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(8)
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

        def forward(self, x):
            h = self.norm(x)
            q, k, v = (p(h).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q, self.k, self.v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.o(mixed.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    plan = {n: ColwiseParallel() for n in "qkv"} | {"o": RowwiseParallel()}
    return parallelize_module(Block(), mesh, plan), (torch.arange(48.0).view(2, 3, 8) / 10,)


@program
def embedding_module(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4))
    parallelize_module(
        model, mesh, {"0": RowwiseParallel(input_layouts=R), "1": ColwiseParallel(output_layouts=R)}
    )
    return model, (torch.arange(7) % 10,)


@program
def loss_parallelized(mesh):
    def fn(x, target):
        with loss_parallel():
            return functional.cross_entropy(x, target)

    return fn, (tensor(mesh, 7, 10, at=S1), torch.arange(7) % 10)


@program
def linear_and_loss(mesh):
    return lambda x, w, y: linear_cross_entropy(x, w, y, chunk_size=4), (
        tensor(mesh, 8, 6, at=R),
        tensor(mesh, 10, 6),
        numbers(mesh, 10, 8),
    )


@program
def fully_sharded(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), (torch.arange(24.0).view(4, 6) / 10,)


@program
def replicated_module(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    return replicate(model, mesh=mesh), (torch.arange(24.0).view(4, 6) / 10,)


@program
def distributed_module(mesh):
    torch.manual_seed(0)
    model = sw.distribute_module(nn.Linear(6, 8), mesh)
    return model, (tensor(mesh, 4, 6),)


# ---- optimizers: the function takes a step


def optimizer_step(mesh, make, whole=True):
    torch.manual_seed(0)
    p = nn.ParameterList([tensor(mesh, 4, 6), tensor(mesh, 5, at=R, seed=1)])
    for t in p:
        t.grad = t.detach() * 0.5 + 1
    optimizer = make(p.parameters())
    # without torch's wrapper, which breaks the graph before and after the step for any tensors
    step = inspect.unwrap(type(optimizer).step) if whole else type(optimizer).step

    def fn():
        with torch.no_grad():
            step(optimizer)
            return [t.detach() * 1 for t in p]

    return fn, ()


@program
def sgd(mesh):
    return optimizer_step(mesh, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


@program
def adamw(mesh):
    return optimizer_step(mesh, lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True))


@program
def adam_without_foreach(mesh):
    return optimizer_step(mesh, lambda p: torch.optim.Adam(p, lr=0.1, foreach=False))


@program
def step_with_breaks(mesh):
    return optimizer_step(mesh, lambda p: torch.optim.AdamW(p, lr=0.1), whole=False)


@program
def gradient_clipping(mesh):
    def fn(x, y):
        norm = nn.utils.get_total_norm([x, y])
        return norm, x / norm, y / norm

    return fn, (tensor(mesh, 4, 6, grad=False), tensor(mesh, 5, grad=False))


# ---- one break and no more


@program
def item_branch(mesh):
    def fn(x):
        y = x * 2
        if y.sum().item() > 0:
            return y + 1
        return y - 1

    return fn, (tensor(mesh, 4, 6, grad=False),)


BREAKS = frozenset({"item_branch", "step_with_breaks"})
"""The programs that break the graph: at `.item()`, and where torch's optimizers do so for any tensors."""
GRAPHS = {"item_branch": 2, "step_with_breaks": 2, "sgd": 2}
"""The programs with more than one graph; the first step of SGD has no momentum yet."""
