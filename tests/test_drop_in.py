"""Programs written for torch's DTensor have the same outcome when only the name of the package is replaced.

Each program is a function body that returns what a user would look at. Both versions run on 4 real processes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from shardwise.comm.launch import Workers
from shardwise.torch_internals.releases import torch_release

TORCH, OURS = "torch.distributed.tensor", "shardwise"

HEAD = """
import copy, io, pickle
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import (
    DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, empty, full, ones, zeros,
    DeviceMesh, init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode

rank = dist.get_rank()
R = Replicate()

def line():
    return init_device_mesh("cpu", (4,))

def square():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

def shown(x):
    return str(x.placements), tuple(x.shape), x.stride(), x.dtype, x.requires_grad, x.is_leaf, x.to_local()

def grid(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)
"""

PROGRAMS: dict[str, str] = {}
"""By name: the body of the function."""


def program(name: str, text: str) -> None:
    assert name not in PROGRAMS, name
    PROGRAMS[name] = textwrap.dedent(text)


# ---- creating tensors

for kind in ("zeros", "ones", "full"):
    value = ", 7.5" if kind == "full" else ""
    program(
        f"{kind} on a line, even and uneven",
        f"""
        mesh = line()
        return [
            shown({kind}((n, 3){value}, device_mesh=mesh, placements=[p], dtype=t, requires_grad=g))
            for n in (1, 4, 6, 9) for p in (Shard(0), Shard(1), R)
            for t, g in ((torch.float32, False), (torch.float64, True))
        ]
        """,
    )
    program(
        f"{kind} on a square and on its sub-meshes",
        f"""
        mesh = square()
        places = ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), R], [R, R], [R, Shard(0)])
        out = [shown({kind}([5, 3]{value}, device_mesh=mesh, placements=p)) for p in places]
        for sub in (mesh["dp"], mesh["tp"]):
            out += [shown({kind}([5, 3]{value}, device_mesh=sub, placements=[p])) for p in (Shard(0), Shard(1), R)]
        return out
        """,
    )

if torch_release() >= (2, 14):
    program(
        "linspace and logspace, even and uneven",  # of values that are exact in every order of computation
        """
        from torch.distributed.tensor import linspace, logspace
        mesh, half = line(), square()
        out = []
        for n in (1, 4, 6, 9):
            for p in (Shard(0), R):
                out.append(seen(linspace(0, 2 * n - 2, n, device_mesh=mesh, placements=[p])))
                out.append(seen(linspace(n - 1, 0, n, dtype=torch.float64, device_mesh=mesh, placements=[p])))
                out.append(seen(logspace(0, n - 1, n, 2, requires_grad=True, device_mesh=mesh, placements=[p])))
            out.append(seen(linspace(start=0, end=n - 1, steps=n, device_mesh=half, placements=[R, Shard(0)])))
        return out
        """,
    )
program(
    "sizes in every spelling",
    """
    mesh = line()
    kw = dict(device_mesh=mesh, placements=[Shard(0)])
    tensors = [zeros(4, 2, **kw), zeros((4, 2), **kw), zeros([4, 2], **kw), zeros(torch.Size([4, 2]), **kw),
            zeros(5, **kw), ones(5, **kw), full(5, 2.0, **kw), full((5,), 2.0, **kw), full([4, 2], 1, **kw)]
    return [shown(x) for x in tensors] + [tuple(empty(4, 2, **kw).shape), empty(3, **kw).dtype]
    """,
)
program(
    "factories use the current mesh and replicate by default",
    """
    with square():
        return [shown(zeros(3, 2)), shown(ones(3)), shown(zeros(5, 2, placements=[Shard(0), R]))]
    """,
)
program(
    "a mesh of some ranks",
    """
    mesh = DeviceMesh("cpu", [0, 2])
    tensors = [zeros(5, 3, device_mesh=mesh, placements=[Shard(0)]),
            full((5, 3), 2.0, device_mesh=mesh, placements=[R]),
            distribute_tensor(grid(5, 3), mesh, [Shard(0)]),
            distribute_tensor(grid(5, 3), mesh, [R]),
            DTensor.from_local(grid(2, 3), mesh, [Shard(0)])]
    return [(str(x.placements), tuple(x.shape), x.to_local().numel(), x.to_local()) for x in tensors]
    """,
)
program(
    "redistribute on a mesh of some ranks",
    """
    mesh = DeviceMesh("cpu", [1, 2, 3])
    x = distribute_tensor(grid(5, 3), mesh, [Shard(0)])
    y = x.redistribute(mesh, [Shard(1)])
    z = y.redistribute(mesh, [R])
    return [(str(t.placements), tuple(t.shape), t.to_local().numel(), t.to_local()) for t in (x, y, z)]
    """,
)
program(
    "distribute_tensor on a line",
    """
    mesh = line()
    return [shown(distribute_tensor(grid(n, 3).requires_grad_(g), mesh, [p]))
            for n in (1, 4, 6, 9) for p in (Shard(0), Shard(1), Shard(-1), Shard(-2), R) for g in (False, True)]
    """,
)
program(
    "distribute_tensor on a square",
    """
    mesh = square()
    some = (Shard(0), Shard(1), Shard(-1), R)
    return [shown(distribute_tensor(grid(5, 3), mesh, [a, b])) for a in some for b in some]
    """,
)
program(
    "uneven tensors on the sub-meshes of a square",
    """
    mesh = square()
    return [shown(distribute_tensor(grid(n, 3) + 100 * rank, mesh[axis], [p]))
            for n in (1, 3, 5) for axis in ("dp", "tp") for p in (Shard(0), Shard(1), R)]
    """,
)
program(
    "distribute_tensor sends the tensor of the source rank",
    """
    mesh = line()
    out = []
    for source in (0, 1, 3, None):
        for p in (Shard(0), R):
            mine = grid(6, 2) + 1000 * rank
            x = distribute_tensor(mine, mesh, [p], src_data_rank=source)
            out.append((str(x.placements), x.to_local()))
    return out
    """,
)
program(
    "distribute_tensor on a square sends the tensor of the source of each axis",
    """
    mesh = square()
    out = []
    for source in (0, 1, None):
        for p in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [R, Shard(0)], [Shard(1), R], [R, R]):
            out.append(distribute_tensor(grid(5, 3) + 1000 * rank, mesh, p, src_data_rank=source).to_local())
    return out
    """,
)
program(
    "distribute_tensor of a DTensor in the same layout",
    """
    mesh = line()
    x = distribute_tensor(grid(4, 3), mesh, [Shard(0)])
    p = distribute_tensor(nn.Parameter(grid(4, 3)), mesh, [Shard(0)])
    return distribute_tensor(x, mesh, [Shard(0)]) is x, type(p) is DTensor, p.requires_grad, p.is_leaf
    """,
)
program(
    "distribute_tensor uses the current mesh and replicates by default",
    """
    with line():
        return shown(distribute_tensor(grid(3)))
    """,
)
program(
    "distribute_tensor to Partial",
    """
    mesh = line()
    x = distribute_tensor(grid(4, 3), mesh, [Partial()])
    return str(x.placements), tuple(x.shape), x.full_tensor()
    """,
)
program(
    "distribute_tensor of a meta tensor",
    """
    x = distribute_tensor(torch.empty(5, 3, device="meta"), line(), [Shard(0)])
    return str(x.placements), tuple(x.shape), tuple(x.to_local().shape), str(x.device), str(x.to_local().device)
    """,
)

# ---- from_local and to_local

program(
    "from_local and to_local",
    """
    mesh = line()
    local = grid(2, 3) + rank
    out = []
    for p in (Shard(0), Shard(1), Shard(-1), R, Partial(), Partial("max")):
        x = DTensor.from_local(local, mesh, [p])
        out.append((shown(x), torch.equal(x.to_local(), local), x.device_mesh == mesh, x.device.type))
    return out
    """,
)
program(
    "from_local shares memory with the block",
    """
    local = grid(2, 3)
    x = DTensor.from_local(local, line(), [Shard(0)])
    local.add_(rank + 1)
    return x.to_local(), x.to_local().data_ptr() == local.data_ptr()
    """,
)
program(
    "to_local without grad returns the block itself",
    """
    x = DTensor.from_local(grid(2, 3), line(), [Shard(0)])
    with torch.no_grad():
        return x.to_local() is x._local_tensor, x.to_local() is x.to_local()
    """,
)
program(
    "gradients through from_local and to_local",
    """
    mesh = line()
    out = []
    for p in (Shard(0), Shard(1), R, Partial()):
        local = (grid(2, 3) + rank).requires_grad_()
        x = DTensor.from_local(local * 2, mesh, [p])
        back = x.to_local()
        (back * (rank + 1)).sum().backward()
        out.append((local.grad, x.requires_grad, x.is_leaf, back.requires_grad, back.is_leaf))
    return out
    """,
)
program(
    "the gradient of a leaf is a DTensor in its layout",
    """
    mesh = square()
    out = []
    for p in ([Shard(0), Shard(1)], [Shard(0), R], [R, R], [Shard(1), Shard(1)]):
        x = distribute_tensor(grid(5, 4).requires_grad_(), mesh, p)
        (x.to_local() * 3).sum().backward()
        out.append((type(x.grad) is DTensor, str(x.grad.placements), tuple(x.grad.shape), x.grad.to_local()))
    return out
    """,
)
program(
    "gradients through full_tensor",
    """
    mesh = square()
    weight = grid(5, 4)
    out = []
    for p in ([Shard(0), Shard(1)], [Shard(0), R], [R, R], [R, Shard(0)]):
        x = distribute_tensor(grid(5, 4).requires_grad_(), mesh, p)
        (x.full_tensor() * weight).sum().backward()
        out.append((str(x.grad.placements), x.grad.to_local()))
    return out
    """,
)
program(
    "full_tensor and to_local with grad_placements",
    """
    mesh = line()
    out = []
    for how in ("full_tensor", "to_local"):
        x = distribute_tensor(grid(4, 4).requires_grad_(), mesh, [R])
        y = getattr(x, how)(grad_placements=[Partial()])
        (y * (rank + 1)).sum().backward()
        g = x.grad.redistribute(mesh, [R])
        out.append((str(x.placements), g.to_local()))
    return out
    """,
)
program(
    "gradients through redistribute",
    """
    mesh = line()
    out = []
    for a in (Shard(0), Shard(1), R):
        for b in (Shard(0), Shard(1), R):
            local = (grid(4, 4) + rank).requires_grad_()
            x = DTensor.from_local(local, mesh, [a])
            y = x.redistribute(mesh, [b])
            (y.to_local() * 2).sum().backward()
            out.append((str(y.placements), y.requires_grad, local.grad))
    return out
    """,
)
program(
    "gradients of pending sums",
    """
    mesh = line()
    out = []
    for b in (Shard(0), Shard(1), R):
        local = (grid(4, 4) + rank).requires_grad_()
        y = DTensor.from_local(local, mesh, [Partial()]).redistribute(mesh, [b])
        (y.to_local() * 2).sum().backward()
        out.append((y.to_local().detach(), local.grad))
    return out
    """,
)
program(
    "from_local, then redistribute, without grad",
    """
    mesh = line()
    local = grid(2, 3).requires_grad_()
    with torch.no_grad():
        x = DTensor.from_local(local, mesh, [Shard(0)])
        y = x.redistribute(mesh, [R])
    return y.requires_grad, x.requires_grad, y.to_local()
    """,
)
program(
    "from_local of uneven blocks with the shape given",
    """
    mesh = line()
    sizes = [2, 2, 1, 0]
    local = torch.full((sizes[rank], 10), float(rank))
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 10)), stride=(10, 1))
    return shown(x), x.redistribute(mesh, [R]).to_local(), x.full_tensor()
    """,
)
program(
    "from_local of a transposed block",
    """
    mesh = line()
    return [(x.stride(), tuple(x.shape), x.to_local().stride())
            for p in (Shard(0), Shard(1), R) for x in [DTensor.from_local(grid(3, 2).t(), mesh, [p])]]
    """,
)
program(
    "run_check accepts valid blocks",
    """
    mesh = square()
    tensors = [DTensor.from_local(grid(2, 3), mesh, [R, R], run_check=True),
            DTensor.from_local(grid(2, 3) + rank, mesh, [Shard(0), Shard(1)], run_check=True)]
    return [shown(x) for x in tensors]
    """,
)

# ---- redistribute

program(
    "redistribute between every two placements of a line, even and uneven",
    """
    mesh = line()
    out = []
    for shape in ((4, 4), (5, 3), (1, 7), (2, 9), (6, 1)):
        for a in (Shard(0), Shard(1), R):
            for b in (Shard(0), Shard(1), Shard(-1), R):
                y = distribute_tensor(grid(*shape), mesh, [a]).redistribute(mesh, [b])
                out.append((str(y.placements), tuple(y.shape), y.to_local(), y.full_tensor()))
    return out
    """,
)
program(
    "redistribute between every two placements of a square",
    """
    mesh = square()
    some = (Shard(0), Shard(1), R)
    out = []
    for a in some:
        for b in some:
            x = distribute_tensor(grid(4, 8), mesh, [a, b])
            for c in some:
                for d in some:
                    y = x.redistribute(mesh, [c, d])
                    out.append((str(y.placements), y.to_local()))
    return out
    """,
)
program(
    "redistribute of pending values",
    """
    mesh = line()
    out = []
    for op in ("sum", "avg", "max", "min"):
        for p in (Shard(0), Shard(1), R):
            x = DTensor.from_local(grid(5, 3) * (rank - 1) - 3, mesh, [Partial(op)])
            y = x.redistribute(placements=[p])
            out.append((str(x.placements), str(y.placements), y.to_local()))
    return out
    """,
)
program(
    "redistribute to the same placements",
    """
    mesh = line()
    x = distribute_tensor(grid(4, 3), mesh, [Shard(0)])
    y = x.redistribute(mesh, [Shard(0)])
    with CommDebugMode() as comm:
        x.redistribute(mesh, [Shard(-2)])
    return y is x, torch.equal(x.to_local(), y.to_local()), comm.get_total_counts()
    """,
)
program(
    "redistribute does not change its input",
    """
    x = distribute_tensor(grid(5, 3), line(), [Shard(0)])
    y = x.redistribute(placements=[R])
    y.to_local().zero_()
    return shown(x), y.to_local()
    """,
)
program(
    "redistribute in another dtype",
    """
    mesh = line()
    x = distribute_tensor(grid(4, 3).requires_grad_(), mesh, [Shard(0)])
    y = x.redistribute(placements=[R], forward_dtype=torch.bfloat16)
    z = x.redistribute(placements=[R], backward_dtype=torch.bfloat16)
    (y.to_local().float().sum() + z.to_local().sum()).backward()
    return y.dtype, y.to_local(), z.dtype, x.grad.dtype, x.grad.to_local()
    """,
)
program(
    "asynchronous redistribute",
    """
    mesh = line()
    x = DTensor.from_local(grid(4, 3) + rank, mesh, [Partial()])
    y = x.redistribute(placements=[R], async_op=True)
    z = x.redistribute(placements=[Shard(0)], async_op=True)
    return y.to_local() + 1, z.to_local() * 2, y.full_tensor()
    """,
)
program(
    "redistribute on sub-meshes",
    """
    mesh = square()
    out = []
    for axis in ("dp", "tp"):
        x = distribute_tensor(grid(5, 3), mesh[axis], [Shard(0)])
        for p in (Shard(1), R):
            y = x.redistribute(placements=[p])
            out.append((str(y.placements), y.to_local(), y.device_mesh.mesh_dim_names))
    return out
    """,
)
program(
    "meshes of one axis and of axes of size one",
    """
    out = []
    for shape in ((4, 1), (1, 4), (4,)):
        mesh = init_device_mesh("cpu", shape)
        x = distribute_tensor(grid(6, 3), mesh, [Shard(0)] * len(shape))
        out.append((tuple(x.shape), x.to_local(), x.full_tensor()))
    return out
    """,
)

# ---- attributes, copies and values

program(
    "placements as values",
    """
    from torch.distributed.tensor.placement_types import Partial as P, Replicate as Re, Shard as S
    same = (Shard(0) == S(0), Shard(dim=1) == Shard(1), Shard(0) == Shard(1), R == Re(), Shard(0) == R,
            Partial() == P("sum"), Partial("avg") == Partial(), hash(Shard(0)) == hash(S(0)),
            (Shard(0), R) == (Shard(0), Re()), len({Shard(0), Shard(0), R, Re(), P(), P("sum"), P("max")}))
    asked = (Shard(0).is_shard(), Shard(0).is_shard(0), Shard(0).is_shard(dim=1), R.is_replicate(), R.is_shard(),
             P().is_partial(), P().is_partial("sum"), P("max").is_partial("sum"), P().is_replicate(), Shard(0).is_partial())
    shown = [str(p) for p in (Shard(0), R, P(), P("avg"))], [repr(p) for p in (Shard(3), R, P(), P("product"))]
    return same, asked, shown, Shard(2).dim, Partial("min").reduce_op, isinstance(R, Placement), issubclass(Shard, Placement)
    """,
)
program(
    "attributes of the spec",
    """
    mesh = square()
    x = distribute_tensor(grid(5, 4), mesh, [Shard(0), R])
    y = distribute_tensor(grid(5, 4) + 1, mesh, [Shard(0), R])
    s = x._spec
    return (s.mesh is mesh, str(s.placements), tuple(s.shape), s.ndim, tuple(s.tensor_meta.shape), s.tensor_meta.stride,
            s.tensor_meta.dtype, s == y._spec, hash(s) == hash(y._spec), {s: 1}[y._spec], s.placements == (Shard(0), R),
            x.redistribute(mesh, [R, R])._spec == s, s.device_mesh is mesh, s.stride)
    """,
)
program(
    "placements and mesh of a tensor",
    """
    mesh = square()
    x = distribute_tensor(grid(5, 4), mesh, [Shard(-1), Shard(-2)])
    return (x.placements == (Shard(1), Shard(0)), isinstance(x.placements, tuple), x.device_mesh == mesh,
            x.device_mesh.mesh_dim_names, x.shape, x.size(0), x.dim(), x.numel(), len(x), x.is_contiguous(),
            x.element_size(), isinstance(x, torch.Tensor), x.layout == torch.strided, x.is_floating_point())
    """,
)
program(
    "placements cannot be set",
    """
    x = distribute_tensor(grid(5, 4), line(), [Shard(0)])
    x.placements = (R,)
    """,
)
program(
    "parameters of a module",
    """
    mesh = line()
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(grid(6, 3), mesh, [Shard(0)]))
            self.register_buffer("b", distribute_tensor(grid(3), mesh, [R]))
    m = M()
    w = m.w
    w.to_local().sum().backward()
    state = m.state_dict()
    other = M()
    other.load_state_dict({k: v * 2 for k, v in state.items()})
    third = M()
    third.load_state_dict({k: v.detach() * 3 for k, v in state.items()}, assign=True)
    return (isinstance(w, nn.Parameter), isinstance(w, DTensor), w.requires_grad, w.is_leaf, [n for n, _ in m.named_parameters()],
            sorted(state), str(state["w"].placements), shown(other.w), shown(third.w), isinstance(third.w, nn.Parameter),
            str(w.grad.placements), w.grad.to_local(), isinstance(w.to_local(), nn.Parameter), len(list(m.buffers())))
    """,
)
program(
    "copies",
    """
    mesh = square()
    x = distribute_tensor(grid(5, 4).requires_grad_(), mesh, [Shard(0), R])
    p = nn.Parameter(distribute_tensor(grid(5, 4), mesh, [R, Shard(1)]))
    a, b, c = copy.deepcopy(x), x.detach(), x.clone()
    q = copy.deepcopy(p)
    with torch.no_grad():
        a.to_local().zero_()
    return (shown(a), shown(b), shown(c), shown(q), isinstance(q, nn.Parameter), x.to_local().detach(),
            torch.equal(copy.copy(x).to_local(), x.to_local()))
    """,
)
program(
    "pickled and saved",
    """
    mesh = square()
    x = distribute_tensor(grid(5, 4).requires_grad_(), mesh, [Shard(0), R])
    out = [pickle.loads(pickle.dumps(x))]
    for weights_only in (False, True):
        file = io.BytesIO()
        torch.save({"x": x}, file)
        file.seek(0)
        out.append(torch.load(file, weights_only=weights_only)["x"])
    return [(shown(y), y.device_mesh == mesh, type(y) is DTensor) for y in out]
    """,
)
program(
    "a loaded tensor can be used",
    """
    mesh = line()
    x = distribute_tensor(grid(5, 4), mesh, [Shard(0)])
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    y = torch.load(file, weights_only=True)
    z = distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)])
    z.copy_(y)
    return shown(z), (x + y).to_local()
    """,
)
program(
    "a loaded tensor can be gathered",
    """
    mesh = square()
    x = distribute_tensor(grid(5, 4), mesh, [Shard(0), Shard(1)])
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    y = torch.load(file, weights_only=True)
    return y.full_tensor(), y.redistribute(y.device_mesh, [Shard(1), R]).to_local()
    """,
)
program(
    "hooks",
    """
    x = distribute_tensor(grid(4, 3).requires_grad_(), line(), [Shard(0)])
    calls = []
    x.register_hook(lambda g: calls.append(str(g.placements)) or g * 2)
    x.register_post_accumulate_grad_hook(lambda t: calls.append(t is x))
    x.to_local().sum().backward()
    return calls, x.grad.to_local()
    """,
)
program(
    "plain arithmetic that keeps the layout",
    """
    mesh = square()
    x = distribute_tensor(grid(5, 4), mesh, [Shard(0), Shard(1)])
    y = distribute_tensor(grid(5, 4) * 2 - 3, mesh, [Shard(0), Shard(1)])
    tensors = [x + y, x - y, x * 2, x / 4, -x, 3 * x, x.to(torch.float64), x.clone(), x.detach(), torch.zeros_like(x),
            torch.ones_like(y), torch.full_like(x, 2.5), torch.empty_like(x).zero_()]
    z = x.clone()
    z += y
    z.copy_(y)
    return [shown(t) for t in tensors], shown(z)
    """,
)
program(
    "values are those of the full tensor",
    """
    mesh = line()
    x = distribute_tensor(grid(4, 3), mesh, [Shard(0)])
    y = distribute_tensor(grid(4, 3), mesh, [Shard(0)])
    results = x.sum(), x.max(), x.mean(), x.sum(0)  # torch's item() returns the value of the block alone
    return torch.equal(x, y), [(tuple(t.shape), t.full_tensor()) for t in tensors], [t.full_tensor().item() for t in tensors[:3]]
    """,
)
program(
    "zero_grad and setting grad",
    """
    x = distribute_tensor(grid(4, 3).requires_grad_(), line(), [Shard(0)])
    x.to_local().sum().backward()
    first = x.grad.to_local().clone()
    x.to_local().sum().backward()
    second = x.grad.to_local().clone()
    x.grad = None
    gone = x.grad is None
    x.grad = x.detach() * 5
    return first, second, gone, x.grad.to_local()
    """,
)
program(
    "autograd.grad, twice",
    """
    mesh = line()
    x = distribute_tensor(grid(4, 3).requires_grad_(), mesh, [Shard(0)])
    y = (x.redistribute(placements=[R]).to_local() ** 3).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad((g.to_local() ** 2).sum(), x)
    return shown(g.detach()), shown(h.detach())
    """,
)

# ---- counting communication

program(
    "collectives of redistribute",
    """
    mesh = line()
    out = []
    for a, b in ((Shard(0), R), (R, Shard(0)), (R, R), (Shard(0), Shard(0))):
        x = distribute_tensor(grid(4, 4), mesh, [a])
        with CommDebugMode() as comm_mode:
            x.redistribute(mesh, [b])
        counts = comm_mode.get_comm_counts()
        out.append((comm_mode.get_total_counts(), counts[torch.ops.c10d_functional.all_gather_into_tensor],
                    counts[torch.ops.c10d_functional.all_reduce], counts.get(torch.ops.c10d_functional.all_reduce, 0)))
    for op in (R, Shard(0)):
        x = DTensor.from_local(grid(4, 4), mesh, [Partial()])
        with CommDebugMode() as comm_mode:
            x.redistribute(mesh, [op])
        counts = comm_mode.get_comm_counts()
        out.append((comm_mode.get_total_counts(), counts[torch.ops.c10d_functional.all_reduce],
                    counts[torch.ops.c10d_functional.reduce_scatter_tensor]))
    return out
    """,
)
program(
    "collectives of the backward",
    """
    mesh = line()
    x = distribute_tensor(grid(4, 4).requires_grad_(), mesh, [Shard(0)])
    with CommDebugMode() as comm_mode:
        y = x.redistribute(mesh, [R]).to_local(grad_placements=[Partial()])
    forward = comm_mode.get_total_counts()
    with comm_mode:
        y.sum().backward()
    return forward, comm_mode.get_comm_counts()[torch.ops.c10d_functional.reduce_scatter_tensor], x.grad.to_local()
    """,
)
program(
    "collectives of distribute_tensor",
    """
    mesh = line()
    out = []
    for p in ([Shard(0)], [R], [Shard(1)]):
        for source in (0, None):
            with CommDebugMode() as comm_mode:
                distribute_tensor(grid(4, 4), mesh, p, src_data_rank=source)
            out.append((source is not None, comm_mode.get_total_counts() > 0, sorted(map(str, comm_mode.get_comm_counts()))))
    return out
    """,
)
program(
    "a mode stops counting when it is left",
    """
    x = distribute_tensor(grid(4, 4), line(), [Shard(0)])
    with CommDebugMode() as comm_mode:
        pass
    x.full_tensor()
    return comm_mode.get_total_counts(), dict(comm_mode.get_comm_counts())
    """,
)

# ---- documented modules

program(
    "every documented module can be imported",
    """
    import importlib
    import torch.distributed.tensor
    import torch.distributed.tensor.placement_types as placement_types
    import torch.distributed.tensor.device_mesh as device_mesh
    import torch.distributed.tensor.experimental
    import torch.distributed.tensor.debug as debug
    import torch.distributed.tensor.parallel
    import torch.distributed.tensor.parallel.style
    from torch.distributed.tensor.device_mesh import DeviceMesh as D, init_device_mesh as init
    from torch.distributed.tensor.debug import visualize_sharding
    return (placement_types.Shard is Shard, placement_types.Partial is Partial, placement_types.Replicate is Replicate,
            placement_types.Placement is Placement, D is DeviceMesh, init is init_device_mesh,
            device_mesh.DeviceMesh is dist.device_mesh.DeviceMesh, debug.CommDebugMode is CommDebugMode,
            callable(visualize_sharding))
    """,
)

# ---- errors

for name, text in {
    "a non-leaf": "distribute_tensor(grid(4).requires_grad_() * 2, line(), [Shard(0)])",
    "too many placements": "distribute_tensor(grid(4), line(), [Shard(0), R])",
    "too few placements": "distribute_tensor(grid(4), square(), [Shard(0)])",
    "no placements": "distribute_tensor(grid(4), square(), [])",
    "placements that are not a list": "distribute_tensor(grid(4), line(), Shard(0))",
    "another layout": "distribute_tensor(distribute_tensor(grid(4, 4), line(), [Shard(0)]), line(), [Shard(1)])",
    "another mesh": "distribute_tensor(distribute_tensor(grid(4, 4), line(), [Shard(0)]), square(), [Shard(0), R])",
    "no mesh": "distribute_tensor(grid(4))",
    "no mesh for a factory": "zeros(4)",
    "no mesh for from_local": "DTensor.from_local(grid(4))",
    "from_local of a DTensor": "DTensor.from_local(distribute_tensor(grid(4), line(), [R]), line(), [R])",
    "from_local with a stride but no shape": "DTensor.from_local(grid(4), line(), [Shard(0)], stride=(1,))",
    "different reductions": "DTensor.from_local(grid(4), square(), [Partial('sum'), Partial('max')])",
    "different reductions for distribute_tensor": "distribute_tensor(grid(4), square(), [Partial('min'), Partial('max')])",
    "redistribute without a target": "distribute_tensor(grid(4), line(), [R]).redistribute()",
    "redistribute to another mesh": "distribute_tensor(grid(4, 4), line(), [R]).redistribute(square(), [R, R])",
    "redistribute with placements for the mesh": "distribute_tensor(grid(4), line(), [R]).redistribute([Shard(0)])",
    "a plain tensor beside a DTensor": "distribute_tensor(grid(4), line(), [Shard(0)]) + grid(4)",
    "a plain tensor copied into a DTensor": "distribute_tensor(grid(4), line(), [Shard(0)]).copy_(grid(4))",
    "deepcopy of a non-leaf": "copy.deepcopy(distribute_tensor(grid(4).requires_grad_(), line(), [Shard(0)]) * 2)",
    "integers that require grad": "zeros(4, dtype=torch.int64, requires_grad=True, device_mesh=line())",
    "Shard of a string": "Shard('0')",
    "an unknown argument": "zeros(4, device_mesh=line(), color='red')",
    "a positional argument of to_local": "distribute_tensor(grid(4), line(), [R]).to_local([R])",
    "sizes that are not integers": "zeros(4.5, device_mesh=line())",
    "sizes that are negative": "zeros(-4, device_mesh=line())",
    "blocks of different shapes": "DTensor.from_local(grid(3 if rank == 1 else 2), line(), [Shard(0)], run_check=True)",
    "blocks of different dtypes": """DTensor.from_local(
        torch.ones(2, dtype=torch.float64 if rank == 1 else None), line(), [Shard(0)], run_check=True)""",
}.items():
    program(f"error: {name}", f"return {text}")

# ---- what errors say

for name, (text, phrase) in {
    "another mesh": (
        "distribute_tensor(distribute_tensor(grid(4, 4), square(), [R, R]), line(), [R])",
        "to a different device mesh",
    ),
    "other placements": (
        "distribute_tensor(distribute_tensor(grid(4), line(), [R]), line(), [Shard(0)])",
        "to a different placements",
    ),
    "too few placements": ("distribute_tensor(grid(4), square(), [R])", "must have the same length"),
    "not a leaf": (
        "distribute_tensor(grid(4).requires_grad_() * 2, line(), [R])",
        "distribute leaf tensor",
    ),
    "a DTensor for a value without placements": (
        """local_map(lambda x: x, out_placements=[R], in_placements=(None,))(
            distribute_tensor(grid(4), line(), [R]))""",
        "expects placements",
    ),
    "other in_placements": (
        """local_map(lambda x: x, out_placements=[R], in_placements=([Shard(0)],))(
            distribute_tensor(grid(4), line(), [R]))""",
        "set redistribute_inputs=True",
    ),
    "more desired layouts than layouts": (
        "PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=(R, None))",
        "input_layouts and desired_input_layouts should have same length!",
    ),
    "blocks of which some require gradients": (
        "DTensor.from_local(torch.ones(2, requires_grad=rank > 0), line(), [Shard(0)], run_check=True)",
        "",
    ),
}.items():
    program(
        f"message: {name}",
        f"""
        from torch.distributed.tensor.experimental import local_map
        from torch.distributed.tensor.parallel import PrepareModuleInput
        try:
            {text.strip()}
        except Exception as error:
            kinds = (ValueError, RuntimeError, AssertionError)
            return [isinstance(error, k) for k in kinds[2:]], {phrase!r} in str(error)
        """,
    )

# ---- collectives by module, and names that programs use although they are private

program(
    "comm mode counts the program's own collectives",
    """
    import torch.distributed._functional_collectives as funcol
    found = []
    with CommDebugMode() as comm:
        x = funcol.all_gather_tensor(grid(2, 2), 0, dist.group.WORLD)
        x = funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)
        found.append(funcol.all_reduce(x, "sum", dist.group.WORLD) + 0)
    found += [str(sorted(map(str, comm.get_comm_counts().items()))), comm.get_total_counts()]
    for call in (lambda: dist.all_reduce(grid(2)), lambda: dist.broadcast(grid(2), 0), lambda: dist.barrier()):
        with comm:
            call()
        found += [str(sorted(map(str, comm.get_comm_counts().items()))), comm.get_total_counts()]
    return found
    """,
)
program(
    "comm mode counts by module",
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net1, self.relu, self.net2 = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)
        def forward(self, x):
            return self.net2(self.relu(self.net1(x)))
    model = parallelize_module(Net(), line(), {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    comm = CommDebugMode()
    with comm:
        before = str((comm.get_parameter_info(), comm.get_sharding_info(), len(comm.comm_module_counts)))
        model(grid(2, 4).requires_grad_()).sum().backward()
    forward = {m: {str(op): n for op, n in c["forward"].items()} for m, c in comm.comm_module_counts.items()}
    info = comm.get_parameter_info()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in (model.relu,)]
    return [before, {m: c for m, c in forward.items() if c}, hooks, list(comm.get_sharding_info()),
            {m: list(p) for m, p in info.items()}, len(comm.advanced_module_tracker.module_helper_dict),
            {str(op): n for op, n in comm.comm_module_counts["Global"]["backward"].items()}]
    """,
)
program(
    "implicit communication is refused, requests are not",
    """
    from torch.distributed.tensor._random import OffsetBasedRNGTracker, _rng_tracker
    from torch.distributed.tensor._utils import ExplicitRedistributionContext
    x, y = (distribute_tensor(grid(8, 8), line(), [Shard(d)]) for d in (0, 1))
    found = [isinstance(_rng_tracker, OffsetBasedRNGTracker)]
    with ExplicitRedistributionContext():
        for call in (lambda: x + x, lambda: x + y, lambda: (x + y.redistribute(placements=[Shard(0)])), lambda: x.full_tensor()):
            try:
                found.append(tuple(call().shape))
            except RuntimeError:
                found.append("refused")
        with ExplicitRedistributionContext(enable=False):
            found.append(tuple((x + y).shape))
    return found
    """,
)
program(
    "private names",
    """
    from torch.distributed.tensor._api import _shard_tensor
    from torch.distributed.tensor._collective_utils import (
        mesh_broadcast, mesh_scatter, pad_tensor, shard_dim_alltoall, unpad_tensor)
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._ops.utils import (
        is_tensor_dim_sharded, is_tensor_evenly_shardable, is_tensor_partial, is_tensor_shardable, normalize_dim)
    from torch.distributed.tensor._random import manual_seed
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.parallel.api import parallelize_module
    from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
    mesh, two = line(), square()
    spec = DTensorSpec(two, (Shard(1), R), TensorMeta(torch.Size([6, 4]), (4, 1), torch.float32))
    partial = DTensorSpec(mesh, (Partial(),), TensorMeta(torch.Size([6]), (1,), torch.float32))
    x = DTensor(grid(6, 2), spec, requires_grad=False)
    part = torch.empty(2)
    mesh_scatter(part, list(grid(4, 2)), mesh)
    whole = grid(3) + rank
    mesh_broadcast(whole, two, 1)
    return [
        isinstance(x._spec, DTensorSpec), shown(x), spec.dim_map, spec.num_shards, spec.num_shards_map, partial.sums,
        spec.is_replicated(), spec.is_sharded(), is_tensor_partial(spec), is_tensor_partial(partial),
        is_tensor_dim_sharded(spec, 1), is_tensor_dim_sharded(spec, 0), is_tensor_shardable((3, 1), spec),
        is_tensor_evenly_shardable((3, 4), spec), normalize_dim(-1, 3), part, whole,
        pad_tensor(grid(2, 2), 1, 2), unpad_tensor(grid(2, 3), 1, 2), shown(_shard_tensor(grid(5, 3), [Shard(0)], mesh)),
        shard_dim_alltoall(grid(2, 4) + rank, 0, 1, two, 0),
        compute_local_shape_and_global_offset((6, 4), two, [Shard(1), R]),
        [Shard(0).local_shard_size_and_offset(5, 4, r) for r in range(4)],
        [Shard(1)._split_tensor(grid(2, n), 4, with_padding=p) for n in (3, 5, 8) for p in (False, True)],
    ]
    """,
)


# ---- running them


def outcome(text: str, package: str) -> tuple[str, Any]:
    """Run a program: ("returned", its result) or ("raised", the exception)."""
    source = (HEAD + "\ndef main():\n" + textwrap.indent(text, "    ")).replace(TORCH, package)
    scope: dict[str, Any] = {}
    exec(compile(source, f"<{package}>", "exec"), scope)
    try:
        return "returned", scope["main"]()
    except Exception as error:
        return "raised", error


def _words(error):
    """The message of an error, without the stack of C++ that some releases of torch add."""
    return str(error).partition("\nException raised from ")[0]


def compare(text: str) -> list[str]:
    """On one rank: the differences between the outcomes of a program with the two packages."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings are not compared
        (how, want), (our_how, got) = outcome(text, TORCH), outcome(text, OURS)
    if how != our_how:
        return [f"torch {how} {want!r}, ours {our_how} {got!r}"]
    if how == "raised":
        message = (
            "" if isinstance(got, TypeError | AttributeError) or _words(got) == _words(want) else str(got)
        )
        wrong_type = [] if isinstance(got, type(want)) else [f"torch raised {want!r}, ours {got!r}"]
        no_fix = (
            []
            if not message or ("\n  why: " in message and "\n  fix: " in message)
            else [f"no why or fix: {message}"]
        )
        return [*wrong_type, *no_fix]
    return list(differences(want, got, "result"))


def differences(want: Any, got: Any, at: str) -> Iterator[str]:
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        same = want.dtype == got.dtype and want.shape == got.shape and torch.equal(want, got)
        if not same:
            yield f"{at}: torch has {want.dtype} {want}, ours {got.dtype} {got}"
    elif isinstance(want, Mapping) and isinstance(got, Mapping):
        yield from differences(sorted(want.items()), sorted(got.items()), at)
    elif isinstance(want, Sequence) and not isinstance(want, str) and type(want) is type(got):
        if len(want) != len(got):
            yield f"{at}: torch has {want}, ours {got}"
            return
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            yield from differences(a, b, f"{at}[{i}]")
    elif want != got:
        yield f"{at}: torch has {want!r}, ours {got!r}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_for_torch_has_the_same_outcome(workers: Workers, name: str) -> None:
    found = workers.run(compare, PROGRAMS[name])
    assert found == [[]] * 4, "\n".join(f"rank {r}: {d}" for r, ds in enumerate(found) for d in ds[:6])


@pytest.mark.parametrize(
    "text",
    [
        "return DTensor.__module__",
        "return [(1, {'a': torch.ones(1 + ('shardwise' in DTensor.__module__))})]",
        "return torch.ones(2, dtype=torch.float64 if 'shardwise' in DTensor.__module__ else None)",
        "return [1] * (1 + ('shardwise' in DTensor.__module__))",
        "if 'shardwise' in DTensor.__module__: raise ValueError",
        "raise (KeyError if 'shardwise' in DTensor.__module__ else IndexError)('\\n  why: \\n  fix: ')",
        "raise ValueError(DTensor.__module__)",
    ],
)
def test_the_comparison_finds_differences(workers: Workers, text: str) -> None:
    assert all(differences != [] for differences in workers.run(compare, text))
