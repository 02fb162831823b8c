"""Programs that a user would write with plain tensors on each rank, put together at random.

A program is a list of steps on a tensor of each rank: local ops, autograd functions that call collectives, functional
collectives, `torch.distributed`, hooks of tensors and modules, checkpointing and DTensors. The same code runs on real
processes, where tensors are plain, and in a simulation, where they are PerRank tensors.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Partial, Replicate, Shard, init_device_mesh, per_rank

N = 4  # rows and columns of every tensor; the number of ranks divides it


def values(seed: int, shape: tuple[int, ...] = (N, N)) -> Any:
    """Other values on each rank."""

    def on_rank(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return per_rank(on_rank)


# ---- autograd functions


class Scale(torch.autograd.Function):
    """Saves a tensor and a number, and has a backward that can be differentiated."""

    @staticmethod
    def forward(ctx, x, w, factor):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w * ctx.factor, grad * x * ctx.factor if ctx.needs_input_grad[1] else None, None


class CopyToGroup(torch.autograd.Function):
    """Megatron's f: nothing in the forward pass, an all-reduce in the backward pass."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromGroup(torch.autograd.Function):
    """Megatron's g, with a setup_context and a default argument."""

    @staticmethod
    def forward(x, group=None):
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherRows(torch.autograd.Function):
    """All-gathers rows, and reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx, x, group, size):
        ctx.group = group
        return funcol.all_gather_tensor(x.contiguous(), 0, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return funcol.reduce_scatter_tensor(grad.contiguous(), "sum", 0, ctx.group).wait(), None, None


class TopValue(torch.autograd.Function):
    """Two results, one of them without a gradient; no materialized gradients."""

    @staticmethod
    def forward(ctx, x):
        value, index = x.max(dim=1)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        return value, index

    @staticmethod
    def backward(ctx, grad, _):
        (index,) = ctx.saved_tensors
        out = grad.new_zeros(N, N)
        return out.scatter(1, index[:, None], grad[:, None])


class DoubleInPlace(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


# ---- steps: x, the group, its size and a random number generator


def scale_function(x, env):
    return Scale.apply(x, env.values(), env.rng.choice([0.5, 2.0]))


def copy_to_group(x, env):
    return CopyToGroup.apply(x, env.group) * env.values()


def reduce_from_group(x, env):
    return ReduceFromGroup.apply(x * env.values(), env.group).tanh()


def gather_rows(x, env):
    whole = GatherRows.apply(x, env.group, env.size)
    return (whole * env.values((N * env.size, N))).unflatten(0, (env.size, N)).sum(0).tanh()


def top_value(x, env):
    value, index = TopValue.apply(x)
    return x * value[:, None] + index[:, None]


def double_in_place(x, env):
    return DoubleInPlace.apply(x.sin())


def functional_all_reduce(x, env):
    return funcol.all_reduce(x * env.values(), "sum", env.group).tanh()


def functional_all_gather(x, env):
    dim = env.rng.choice([0, 1])
    whole = funcol.all_gather_tensor(x.contiguous(), dim, env.group)
    return sum(part * (i + 1) for i, part in enumerate(whole.chunk(env.size, dim))).tanh()


def functional_reduce_scatter(x, env):
    part = funcol.reduce_scatter_tensor(x * env.values(), "sum", 0, env.group)
    return torch.cat([part * (i + 1) for i in range(env.size)]).tanh()


def functional_all_to_all(x, env):
    return funcol.all_to_all_single(x.contiguous(), None, None, env.group) * env.values()


def functional_broadcast(x, env):
    return funcol.broadcast(x * env.values(), 0, env.group)


def all_reduce_in_place(x, env):
    y = (x * env.values()).detach()
    work = dist.all_reduce(
        y, op=env.rng.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX]), group=env.group, async_op=True
    )
    work.wait()
    return x * y.tanh()


def all_reduce_with_graph(x, env):
    """Autograd does not see a collective of torch.distributed: the gradient passes as if it were not there."""
    y = x * env.values()
    dist.all_reduce(y, group=env.group)
    return (y * env.values()).tanh()


def all_gather_list(x, env):
    y = x.detach().contiguous()
    parts = [torch.empty_like(y) for _ in range(env.size)]
    dist.all_gather(parts, y, group=env.group)
    return x * sum(part * (i + 1) for i, part in enumerate(parts)).tanh()


def broadcast_from_a_rank(x, env):
    y = x.detach().clone()
    dist.broadcast(y, group_src=env.rng.randrange(env.size), group=env.group)
    return x + y


def gather_into_one(x, env):
    y = x.detach().contiguous()
    whole = y.new_empty(N * env.size, N)
    work = dist.all_gather_into_tensor(whole, y, group=env.group, async_op=env.rng.random() < 0.5)
    if work is not None:
        work.wait()
    return x * whole.unflatten(0, (env.size, N)).sum(0).tanh()


def reduce_and_scatter(x, env):
    y = (x * env.values()).detach().contiguous()
    part = y.new_empty(N // env.size, N)
    if env.rng.random() < 0.5:
        dist.reduce_scatter_tensor(part, y, group=env.group)
    else:
        dist.reduce_scatter(part, list(y.chunk(env.size)), group=env.group)
    return x + torch.cat([part * (i + 1) for i in range(env.size)]).tanh()


def all_to_all_in_place(x, env):
    y = x.detach().contiguous()
    out = torch.empty_like(y)
    if env.rng.random() < 0.5:
        dist.all_to_all_single(out, y, group=env.group)
    else:
        parts = [torch.empty_like(c) for c in y.chunk(env.size)]
        dist.all_to_all(parts, list(y.chunk(env.size)), group=env.group)
        out = torch.cat(parts)
    return x * out


def to_one_rank(x, env):
    """A reduction to one rank, whose result is sent to all."""
    y, source = x.detach().clone(), env.rng.randrange(env.size)
    dist.reduce(y, group_dst=source, group=env.group)
    dist.broadcast(y, group_src=source, group=env.group)
    return x + y.tanh()


def waits_for_others(x, env):
    dist.barrier(group=env.group)
    return x * 2


def several_asynchronous(x, env):
    tensors = [x.detach().clone() * (i + 1) for i in range(3)]
    works = [dist.all_reduce(t, group=env.group, async_op=True) for t in tensors]
    for work in reversed(works):
        work.wait()
    return x + sum(tensors).tanh()


def gathered_objects(x, env):
    found = [None] * env.size
    dist.all_gather_object(found, {"rows": x.shape[0], "n": env.seed}, group=env.group)
    return x * sum(f["rows"] for f in found) / N


def functional_with_gradients(x, env):
    """The functional collectives that have a gradient of their own."""
    y = x * env.values()
    match env.rng.randrange(4):
        case 0:
            whole = funcol.all_gather_tensor_autograd(y.contiguous(), 0, env.group)
            return whole.unflatten(0, (env.size, N)).sum(0).tanh()
        case 1:
            part = funcol.reduce_scatter_tensor_autograd(y.contiguous(), "sum", 0, env.group)
            return torch.cat([part * (i + 1) for i in range(env.size)]).tanh()
        case 2:
            return funcol.all_to_all_single_autograd(y.contiguous(), None, None, env.group) * env.values()
        case _:
            return sum(funcol.all_reduce_coalesced([y, y * 2], "sum", env.group)).tanh() * x


class ReduceBothWays(torch.autograd.Function):
    """Sums over the group in both passes, by a functional and by an asynchronous collective."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ctx.save_for_backward(x)
        return funcol.all_reduce(x, "sum", group).wait().tanh()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        total = (grad * x.cos()).contiguous()
        work = dist.all_reduce(total, group=ctx.group, async_op=True)
        scattered = funcol.reduce_scatter_tensor(grad.contiguous(), "sum", 0, ctx.group)
        work.wait()
        return total + scattered.sum(), None


def reduce_both_ways(x, env):
    return ReduceBothWays.apply(x * env.values(), env.group)


def hook_gathers(x, env):
    """A hook that gathers the gradients of all ranks and takes their mean, waiting at the end of the hook."""
    y = x * env.values()

    def mean(grad):
        whole = grad.new_empty(N * env.size, N)
        dist.all_gather_into_tensor(whole, grad.contiguous(), group=env.group)
        dist.barrier(group=env.group)
        return whole.unflatten(0, (env.size, N)).mean(0)

    y.register_hook(mean)
    return y.sin()


def bucket_of_gradients(x, env):
    """What a data-parallel wrapper does: gradients of two parameters in one buffer, reduced when the last is there."""
    a, b = env.plain_parameter(), env.plain_parameter()
    group, size, ready = env.group, env.size, []

    def reduce(p):
        ready.append(p)
        if len(ready) == 2:
            flat = torch.cat([q.grad.flatten() for q in ready])
            dist.all_reduce(flat, group=group)
            for q, part in zip(ready, flat.split(N * N), strict=True):
                q.grad.copy_(part.view(N, N) / size)
            ready.clear()

    for p in (a, b):
        p.register_post_accumulate_grad_hook(reduce)
    return (x @ a).tanh() * b


def halves_of_a_parameter(x, env):
    """ZeRO by hand: each rank steps on its rows, and all gather them."""
    w = env.plain_parameter()
    group, size = env.group, env.size

    def step(p):
        part = p.new_empty(N // size, N)
        dist.reduce_scatter_tensor(part, p.grad.contiguous(), group=group)
        new = p.new_empty(N, N)
        dist.all_gather_into_tensor(new, part, group=group)
        with torch.no_grad():
            p.sub_(new, alpha=0.1)
        p.grad = None

    w.register_post_accumulate_grad_hook(step)
    return (x * w).sin()


def plain_all_reduce(x, env):
    count = torch.ones((), dtype=torch.float64)
    dist.all_reduce(count, group=env.group)
    return x * count / env.size + funcol.all_reduce(torch.ones(N, dtype=torch.float64), "sum", env.group)


def hook_scales(x, env):
    y = x * env.values()
    y.register_hook(lambda grad: grad * 0.5)
    return y.tanh() + y


def hook_reduces(x, env):
    y = x * env.values()

    def reduce(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=env.group)
        return grad

    y.register_hook(reduce)
    return y.tanh()


def hook_counts(x, env):
    """A hook with a state: on real processes each rank has its own."""
    y = x * env.values()
    calls = []

    def alternate(grad):
        calls.append(1)
        return funcol.all_reduce(grad, "sum", env.group) if len(calls) % 2 else grad * 3

    y.register_hook(alternate)
    return y + 1


def removed_hook(x, env):
    y = x * env.values()
    y.register_hook(lambda grad: grad * 100).remove()
    return y.tanh()


def retained_gradient(x, env):
    y = x * env.values()
    y.retain_grad()
    y.register_hook(lambda grad: grad * 2)
    env.watch(lambda: y.grad)
    return y.tanh()


def module_with_hooks(x, env):
    module = nn.Tanh()
    module.register_forward_hook(lambda m, args, out: out * 2)
    module.register_full_backward_hook(lambda m, grads, grad_outputs: (grads[0] + grad_outputs[0],))
    if env.rng.random() < 0.5:
        module.register_full_backward_pre_hook(
            lambda m, grads: tuple(funcol.all_reduce(g, "sum", env.group) for g in grads)
        )
    return module(x * env.values())


def checkpointed(x, env):
    w = env.parameter()
    reentrant = env.rng.random() < 0.5

    def block(x):
        return CopyToGroup.apply(x * w, env.group).sin()

    return checkpoint(block, x, use_reentrant=reentrant)


def as_dtensor(x, env):
    placements = [env.rng.choice([Shard(0), Shard(1)]) for _ in range(env.mesh.ndim)]
    d = DTensor.from_local(x, env.mesh, placements)
    d = torch.tanh(d * 2).redistribute(
        placements=[env.rng.choice([Replicate(), Shard(0), Shard(1)])] * env.mesh.ndim
    )
    return d.redistribute(placements=placements).to_local() + x


def pending_dtensor(x, env):
    d = DTensor.from_local(x * env.values(), env.mesh, [Partial()] * env.mesh.ndim)
    return d.full_tensor(grad_placements=[Partial()] * env.mesh.ndim).tanh()


def parameter(x, env):
    return (x @ env.parameter()).tanh()


def gradient_inside(x, env):
    """A gradient that is part of the program, and is differentiated again."""
    if not x.requires_grad:
        return x
    energy = (CopyToGroup.apply(x, env.group) * env.values()).pow(2).sum()
    (grad,) = torch.autograd.grad(energy, x, create_graph=True)
    return x + 0.1 * grad


STEPS = [
    scale_function, copy_to_group, reduce_from_group, gather_rows, top_value, double_in_place, functional_all_reduce,
    functional_all_gather, functional_reduce_scatter, functional_all_to_all, functional_broadcast,
    all_reduce_in_place, all_reduce_with_graph, all_gather_list, broadcast_from_a_rank, plain_all_reduce, hook_scales,
    hook_reduces, hook_counts, removed_hook, retained_gradient, module_with_hooks, checkpointed, as_dtensor,
    pending_dtensor, parameter, gradient_inside, gather_into_one, reduce_and_scatter, all_to_all_in_place, to_one_rank,
    waits_for_others, several_asynchronous, gathered_objects, functional_with_gradients, reduce_both_ways, hook_gathers,
    bucket_of_gradients, halves_of_a_parameter,
]  # fmt: skip


class Environment:
    """The groups, parameters and random choices of one program."""

    def __init__(self, seed: int, meshes: list[Any]) -> None:
        self.rng = random.Random(seed)
        self.seed = 100 * seed
        self.mesh = self.rng.choice(meshes)
        self.parameters: list[Any] = []
        self.watched: list[Any] = []

    def draw_group(self) -> None:
        """Choose the group of the next step."""
        axis = self.rng.randrange(self.mesh.ndim)
        self.group, self.size = self.mesh.get_group(axis), self.mesh.size(axis)

    def values(self, shape: tuple[int, ...] = (N, N)) -> Any:
        self.seed += 1
        return values(self.seed, shape)

    def watch(self, read: Any) -> None:
        self.watched.append(read)

    def plain_parameter(self) -> Any:
        """A new parameter without hooks."""
        w = nn.Parameter(self.values() / N)
        self.parameters.append(w)
        return w

    def parameter(self) -> Any:
        """A new parameter; some have hooks that reduce or apply the gradient."""
        w = self.plain_parameter()
        group, size = self.group, self.size
        match self.rng.randrange(5):
            case 0:

                def reduce(p):
                    dist.all_reduce(p.grad, group=group)
                    p.grad.div_(size)

                w.register_post_accumulate_grad_hook(reduce)
            case 1:
                optimizer = torch.optim.SGD([w], lr=0.1)

                def step(p):
                    optimizer.step()
                    optimizer.zero_grad()

                w.register_post_accumulate_grad_hook(step)
            case 2:
                w.register_hook(lambda grad: funcol.all_reduce(grad, "sum", group))
        return w


def run_program(seed: int, meshes: list[Any]) -> list[Any]:
    """Run the program of this seed: its results, gradients and parameters after a step."""
    env = Environment(seed, meshes)
    x = env.values().requires_grad_()
    steps = [env.rng.choice(STEPS) for _ in range(env.rng.randint(1, 5))]
    passes = env.rng.choice([1, 1, 2])
    out, weights = x * 1, env.values()
    for step in steps:
        env.draw_group()
        out = step(out, env)
    for i in range(passes):
        (out * weights).sum().backward(retain_graph=i + 1 < passes)
    if env.parameters:
        torch.optim.SGD(env.parameters, lr=0.1, momentum=0.9).step()
    found = [
        out,
        x.grad,
        *env.parameters,
        *(p.grad for p in env.parameters),
        *(read() for read in env.watched),
    ]
    return [None if t is None else t.detach() for t in found]


def run_programs(seeds: list[int]) -> list[Any]:
    """Run many programs; a program that fails has its error as its result."""
    meshes = [
        init_device_mesh("cpu", (4,), mesh_dim_names=("all",)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    ]
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of new names, and of collectives without a gradient
        for seed in seeds:
            try:
                found.append(run_program(seed, meshes))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    return found
