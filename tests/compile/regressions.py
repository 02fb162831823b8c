"""Programs of `test_regressions_compile.py` that run on two processes; each returns what the test compares."""

import operator
import warnings

import torch
from tests.compile.matrix import PROGRAMS, S0, S1, P, R, tensor
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate


def one_axis():
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    return sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def full(x):
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


# ---- 97


def tangents(mesh):
    blocks = torch.arange(24.0).view(4, 6) + mesh.get_rank()
    return {
        "plain": lambda: torch.arange(24.0).view(4, 6),
        "other placement": lambda: tensor(mesh, 4, 6, at=S1, grad=False),
        "replicated": lambda: tensor(mesh, 4, 6, at=R, grad=False),
        "async": lambda: tensor(mesh, 4, 6, at=S1, grad=False).redistribute(tp=R, async_op=True),
        "pending": lambda: sw.DTensor.from_local(blocks, mesh, [P]),
    }


def compare_tangents():
    """By kind of tangent: whether the gradient of compiled code equals that of eager code."""
    mesh, found = one_axis(), {}
    for name, make in tangents(mesh).items():
        grads = []
        for f in (double, torch.compile(double, backend="aot_eager", fullgraph=True)):
            x = tensor(mesh, 4, 6)
            f(x).backward(make())
            grads.append(full(x.grad))
        found[name] = torch.equal(*grads)
    for name, first in {"unused": 0, "others unused": 1}.items():
        grads = []
        for f in (two_results, torch.compile(two_results, backend="aot_eager", fullgraph=True)):
            x, w = tensor(mesh, 4, 6, at=S1), tensor(mesh, 6, 4)
            f(x, w)[first].full_tensor().square().sum().backward()
            grads.append((full(x.grad), full(w.grad) if w.grad is not None else torch.zeros(6, 4)))
        found[name] = all(map(torch.allclose, *grads))
    return found


def double(x):
    return x * 2


def two_results(x, w):
    return x @ w, (x * 2).sin()


# ---- 98


def moved_in_many_ways(x):
    """Results of collectives that are returned as they are, viewed, changed in place, and handed on."""
    whole = x.redistribute(tp=R, async_op=True)
    late = (x * 2).redistribute(tp=R, async_op=True)
    summed = x.sum(0).redistribute(tp=R, async_op=True)
    changed = (x * 3).redistribute(tp=R, async_op=True)
    changed.add_(1)
    return whole, late[1:3], summed * 2, changed, x.redistribute(tp=S1).to_local(), x.full_tensor()


def waits():
    """Whether inductor's results are those of eager code, and what in its graph reads what has not arrived."""
    mesh = one_axis()
    early = []

    def look(gm, inputs):
        for node in gm.graph.nodes:
            if "_c10d_functional" in str(node.target) and "wait" not in str(node.target):
                users = [n for n in node.users if n.target is not operator.getitem]
                early.extend(str(n.target) for n in users if "wait_tensor" not in str(n.target))
        return gm

    x = sw.distribute_tensor(torch.arange(512.0 * 512).view(512, 512) % 13, mesh, [S0])
    expected = moved_in_many_ways(x)
    torch.compile(moved_in_many_ways, backend=aot_autograd(fw_compiler=look), fullgraph=True)(x)
    torch._dynamo.reset()
    step = torch.compile(moved_in_many_ways, backend="inductor", fullgraph=True)
    runs = [step(x) for _ in range(5)]
    same = [torch.equal(full(a), full(b)) for out in runs for a, b in zip(out, expected, strict=True)]
    return all(same), early


# ---- 99


def additions():
    """By layout, the graphs of additions of tensors of rank 3 and 4 with gradients, of varying sizes; -1 if one is wrong."""
    mesh, found = one_axis(), {}
    for at in (S0, S1, sw.Shard(2), R):
        for rest in ((), (5,)):
            torch._dynamo.reset()
            counter = CompileCounterWithBackend("aot_eager")
            add = torch.compile(lambda x, y: x + y, backend=counter, fullgraph=True, dynamic=True)
            right = True
            for n in (4, 6, 8, 10):
                x, y = (tensor(mesh, n, n + 10, 6, *rest, at=at, seed=s) for s in (0, 1))
                out = add(x, y)
                out.sum().backward()
                right &= torch.equal(full(out), full(x) + full(y)) and out.placements == x.placements
                right &= bool((full(x.grad) == 1).all()) and x.grad.shape == x.shape
            found[str(at), len(rest)] = counter.frame_count if right else -1
    return found


# ---- 100


def column_output(backend):
    """Whether compiled results and gradients of `ColwiseParallel(output_layouts=Shard(0))` are those of eager code."""
    mesh = one_axis()
    fn, args = PROGRAMS["colwise_output_layout"](mesh)
    found = []
    for f in (fn, torch.compile(fn, backend=backend, fullgraph=True)):
        for p in fn.parameters():
            p.grad = None
        out = f(*args)
        full(out.square().sum()).backward()
        found.append([full(out), *(full(p.grad) for p in fn.parameters())])
    return all(map(torch.allclose, *found))


# ---- 101


def rotate(x, cos, sin):
    """Rotary embedding in float32, of bfloat16 numbers, cast back before the product."""
    half = x.float().unflatten(-1, (-1, 2))
    a, b = half[..., 0], half[..., 1]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


def scores(q, k, cos, sin):
    return rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2)


def rotary():
    """How far compiled scores are from eager ones, and how far eager ones in bfloat16 are from those in float32."""
    mesh = one_axis()
    angles = torch.arange(16.0)[:, None] / torch.arange(1.0, 9.0)
    cos, sin = (sw.distribute_tensor(f(angles), mesh, [R]) for f in (torch.cos, torch.sin))
    q, k = (tensor(mesh, 2, 4, 16, 16, at=S1, grad=False, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    found = {"eager": scores(q, k, cos, sin), "exact": scores(q.float(), k.float(), cos, sin)}
    found["inductor"] = torch.compile(scores, backend="inductor", fullgraph=True)(q, k, cos, sin)
    eager, exact, compiled = (full(found[name]).float() for name in ("eager", "exact", "inductor"))
    return float((compiled - eager).abs().max()), float((eager - exact).abs().max())


# ---- 103


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.25)


def checkpointed_blocks(kind, compiled):
    """Losses and gradients of checkpointed blocks of one code object, for several sizes."""
    mesh = one_axis()
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(2))
    for block in blocks:
        if kind == "tp":
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        elif kind == "fsdp":
            fully_shard(block, mesh=mesh)
        if compiled:
            block.compile(backend="aot_eager")
    if kind == "ddp":
        replicate(blocks, mesh=mesh)
    sw.manual_seed(3)
    found = []
    for n in (4, 6, 8, 4):
        x = torch.arange(n * 8.0).view(n, 8) / 40
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        full(x.square().mean()).backward()
        found.append(full(x).detach())
    return [*found, *(full(p.grad) for p in blocks.parameters())]


def compare_checkpointed(kind):
    eager, compiled = (checkpointed_blocks(kind, flag) for flag in (False, True))
    return [float((a - b).abs().max()) for a, b in zip(eager, compiled, strict=True)]
