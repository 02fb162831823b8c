"""Programs that torch's DTensor, styles and FSDP refuse or get wrong, written for either library, each with the dense result.

A program is a function of a `Library`. It runs on four ranks and returns pairs of what it got and what one device gets.
`python -m benchmarks.refusals` runs them on both libraries, and a test runs ours in simulation.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

Pairs = list[tuple[Any, Any]]
Library = SimpleNamespace
"""The names of a library: those of `torch.distributed.tensor`, `.parallel`, `.experimental` and `torch.distributed.fsdp`."""


def ours() -> Library:
    """Our names."""
    import shardwise
    from shardwise import experimental, fsdp, parallel

    def attention(mesh: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if (mask := options.pop("attn_mask", None)) is not None:
            options["attn_mask"] = shardwise.distribute_tensor(mask, mesh, [shardwise.Replicate()])
        split = (shardwise.distribute_tensor(t, mesh, [shardwise.Shard(2)]) for t in (q, k, v))
        return full(F.scaled_dot_product_attention(*split, **options))

    return _library([shardwise, experimental, fsdp, parallel], attention, shardwise.per_rank)


def torchs() -> Library:
    """torch's names."""
    from torch.distributed import fsdp, tensor
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import experimental, parallel

    def attention(mesh: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        parts = [t.clone() for t in (q, k, v)]
        with experimental.context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]):
            out = F.scaled_dot_product_attention(*parts, **options)
        return tensor.DTensor.from_local(out, mesh, [tensor.Shard(2)]).full_tensor()

    def per_rank(fn: Callable[..., Any]) -> Any:
        return fn(dist.get_rank())

    extra = SimpleNamespace(replicate=replicate, init_device_mesh=init_device_mesh)
    return _library([tensor, experimental, parallel, fsdp, extra], attention, per_rank)


def _library(modules: list[Any], attention: Callable[..., Tensor], per_rank: Callable[..., Any]) -> Library:
    names = {name: value for m in modules for name, value in vars(m).items() if not name.startswith("_")}
    return Library(**{**names, "attention": attention, "per_rank": per_rank})


@dataclass(frozen=True)
class Program:
    """A program, with its number in the list of refusals and what it does in a few words.

    `fresh`: with torch it runs on new processes, because a failure in torch's context managers affects later programs.
    """

    number: int
    title: str
    run: Callable[[Library], Pairs]
    fresh: bool = False


PROGRAMS: list[Program] = []


def program(
    number: int, title: str, *, fresh: bool = False
) -> Callable[[Callable[[Library], Pairs]], Callable[[Library], Pairs]]:
    """Enter a function in the list."""

    def enter(run: Callable[[Library], Pairs]) -> Callable[[Library], Pairs]:
        PROGRAMS.append(Program(number, title, run, fresh))
        return run

    return enter


def outcome(number: int, library: str) -> str:
    """What a program gives with a library, `ours` or `torchs`: "right", "wrong: ..." or "error: ...", in one line."""
    (found,) = (p for p in PROGRAMS if p.number == number)
    torch.manual_seed(number)
    warnings.simplefilter("ignore")
    try:
        pairs = found.run(ours() if library == "ours" else torchs())
    except Exception as error:  # all of them are the result
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"error: {type(error).__name__}: {first}"
    wrong = [text for got, want in pairs if (text := _difference(got, want))]
    return f"wrong: {wrong[0]}" if wrong else "right"


def _difference(got: Any, want: Any) -> str | None:
    if not isinstance(want, Tensor):
        return None if got == want else f"{got} instead of {want}"
    got = full(got)
    if got.shape != want.shape:
        return f"{tuple(got.shape)} instead of {tuple(want.shape)}"
    error = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
    return None if error <= 1e-4 else f"differs by {error:.2g}"


def full(t: Any) -> Tensor:
    """The value of a tensor of either library, on this rank or, in a simulation, on the first."""
    t = t.detach() if isinstance(t, Tensor) else t
    t = t.full_tensor() if hasattr(t, "full_tensor") else t
    return t.ranks[0] if hasattr(t, "ranks") else t


def _mesh(lib: Library, shape: tuple[int, ...] = (4,), names: tuple[str, ...] = ("tp",)) -> Any:
    return lib.init_device_mesh("cpu", shape, mesh_dim_names=names)


def _grid(lib: Library) -> Any:
    return _mesh(lib, (2, 2), ("dp", "tp"))


def _trained(
    lib: Library, model: nn.Module, prepare: Callable[[nn.Module], Any], parts: int = 4, width: int = 4
) -> Pairs:
    """Parameters after a step of SGD on each rank's rows, and of one device on all rows.

    Ranks are divided among `parts` parts of the batch, the first ranks first.
    """
    dense, data = copy.deepcopy(model), torch.randn(8, width)
    prepared = prepare(model)
    model = prepared if isinstance(prepared, nn.Module) else model
    rows = lib.per_rank(lambda rank: data.chunk(parts)[rank * parts // 4])
    for net, x in ((dense, data), (model, rows)):
        net(x).pow(2).mean().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    return list(zip(model.parameters(), (p.detach() for p in dense.parameters()), strict=True))


@program(1, "fully_shard of modules that share a parameter, in separate calls")
def _tied(lib: Library) -> Pairs:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    mesh = _mesh(lib)

    def prepare(net: nn.Module) -> None:
        for module in (net[0], net[2], net):
            lib.fully_shard(module, mesh=mesh)

    return _trained(lib, model, prepare)


@program(2, "fully_shard along dim 1, uneven")
def _dim_1(lib: Library) -> Pairs:
    def last(p: nn.Parameter) -> Any:
        return lib.Shard(p.dim() - 1)

    mesh = _mesh(lib)
    return _trained(
        lib,
        nn.Linear(5, 3),
        lambda net: lib.fully_shard(net, mesh=mesh, shard_placement_fn=last),
        width=5,
    )


class _Scaled(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.weight.dim() == 2 else x * self.weight


@program(3, "fully_shard of a scalar parameter")
def _scalar(lib: Library) -> Pairs:
    mesh = _mesh(lib)
    return _trained(lib, _Scaled(torch.tensor(1.5)), lambda net: lib.fully_shard(net, mesh=mesh))


@program(4, "fully_shard of a non-contiguous parameter")
def _strided(lib: Library) -> Pairs:
    mesh = _mesh(lib)
    return _trained(lib, _Scaled(torch.randn(5, 4).t()), lambda net: lib.fully_shard(net, mesh=mesh))


@program(5, "deepcopy of a fully_shard module")
def _copied(lib: Library) -> Pairs:
    mesh = _mesh(lib)

    def prepare(net: nn.Module) -> nn.Module:
        for layer in (net[0], net[1], net):
            lib.fully_shard(layer, mesh=mesh)
        return copy.deepcopy(net)

    return _trained(lib, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), prepare)


@program(6, "FSDP x TP with a hidden size that tp does not divide")
def _uneven(lib: Library) -> Pairs:
    mesh = _grid(lib)

    def prepare(net: nn.Module) -> None:
        plan = {"0": lib.ColwiseParallel(), "2": lib.RowwiseParallel()}
        lib.parallelize_module(net, mesh["tp"], plan)
        lib.fully_shard(net, mesh=mesh["dp"])

    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    return _trained(lib, model, prepare, parts=2, width=5)


def _clipped(parameters: list[Tensor], dense: list[Tensor]) -> Pairs:
    norms = []
    for each in (parameters, dense):
        for p in each:
            p.pow(2).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(each, 1.0))
    return [(norms[0], norms[1]), *((p.grad, q.grad) for p, q in zip(parameters, dense, strict=True))]


@program(7, "clip_grad_norm_ of parameters on (dp, tp) and on (dp)")
def _two_meshes(lib: Library) -> Pairs:
    mesh, dense = _grid(lib), [torch.randn(4, 6, requires_grad=True), torch.randn(5, requires_grad=True)]
    split = [(mesh, [lib.Shard(0), lib.Shard(1)]), (mesh["dp"], [lib.Shard(0)])]
    parameters = [
        nn.Parameter(lib.distribute_tensor(t.detach(), *on)) for t, on in zip(dense, split, strict=True)
    ]
    return _clipped(parameters, dense)


@program(8, "clip_grad_norm_ of DTensor and plain parameters")
def _beside_plain(lib: Library) -> Pairs:
    mesh, dense = _mesh(lib), [torch.randn(4, 6, requires_grad=True), torch.randn(5, requires_grad=True)]
    split = nn.Parameter(lib.distribute_tensor(dense[0].detach(), mesh, [lib.Shard(0)]))
    return _clipped([split, nn.Parameter(dense[1].detach().clone())], dense)


class _Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        return self.first(x) + self.second(x) if late else self.first(x)


@program(9, "accumulation in bf16 with a parameter first used in the last micro-batch")
def _late(lib: Library) -> Pairs:
    mesh, model = _mesh(lib), _Late()
    for p in model.parameters():
        p.data = torch.randint(-2, 3, p.shape).float()  # exact in bfloat16
    dense, data = copy.deepcopy(model), torch.randint(-2, 3, (2, 8, 4)).float()
    precision = lib.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    lib.fully_shard(model, mesh=mesh, mp_policy=precision)
    rows = lib.per_rank(lambda rank: data.chunk(4, 1)[rank])
    for i in range(2):
        model.set_requires_gradient_sync(i == 1)
        model(rows[i], i == 1).sum().backward()
        (dense(data[i], i == 1).sum() / 4).backward()
    return [(p.grad, q.grad) for p, q in zip(model.parameters(), dense.parameters(), strict=True)]


@program(10, "reshard_after_forward=2 with TP parameters")
def _reshard(lib: Library) -> Pairs:
    mesh = _mesh(lib, (4, 1), ("dp", "tp"))

    def prepare(net: nn.Module) -> None:
        plan = {"0": lib.ColwiseParallel(), "2": lib.RowwiseParallel()}
        lib.parallelize_module(net, mesh["tp"], plan)
        lib.fully_shard(net, mesh=mesh["dp"], reshard_after_forward=2)

    return _trained(lib, nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), prepare)


class _OnModelAxes(nn.Module):
    def __init__(self, lib: Library, mesh: Any, weight: Tensor) -> None:
        super().__init__()
        self.lib, self.mesh = lib, mesh
        splits = [lib.Shard(0), lib.Shard(1), lib.Shard(0)]
        self.weight = nn.Parameter(lib.distribute_tensor(weight, mesh, splits))

    def forward(self, x: Tensor) -> Tensor:
        replicated = [self.lib.Replicate()] * 3
        x = self.lib.DTensor.from_local(x, self.mesh, replicated)
        return F.linear(x, self.weight).redistribute(placements=replicated).to_local()


@program(11, "fully_shard on a mesh of 5 axes, with a parameter on 3 model axes")
def _many_axes(lib: Library) -> Pairs:
    mesh = _mesh(lib, (2, 2, 1, 1, 1), ("dp", "tp", "ep", "cp", "pp"))
    dense, data = nn.Linear(4, 6, bias=False), torch.randn(8, 4)
    model = _OnModelAxes(lib, mesh["tp", "ep", "cp"], dense.weight.detach())
    lib.fully_shard(model, mesh=mesh["dp"])
    model(lib.per_rank(lambda rank: data.chunk(2)[rank // 2])).pow(2).mean().backward()
    dense(data).pow(2).mean().backward()
    return [(model.weight.grad, dense.weight.grad)]


@program(12, "parameters on a mesh of their own beside replicated ones")
def _own_mesh(lib: Library) -> Pairs:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    mesh, model = _mesh(lib, (2, 2), ("dp", "ep")), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    experts = set(model[2].parameters())

    def choose(p: nn.Parameter) -> Any:
        return lib.ShardPlacementResult(lib.Shard(0), FSDPMeshInfo(mesh["dp"], 0)) if p in experts else None

    def prepare(net: nn.Module) -> None:
        dims = lib.DataParallelMeshDims(replicate=("dp", "ep"))
        lib.fully_shard(net, mesh=mesh, shard_placement_fn=choose, dp_mesh_dims=dims)

    return _trained(lib, model, prepare, parts=2)


@program(13, "fully_shard of a ModuleList")
def _module_list(lib: Library) -> Pairs:
    mesh = _mesh(lib)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    def prepare(net: nn.Module) -> None:
        lib.fully_shard(net.layers, mesh=mesh)
        lib.fully_shard(net, mesh=mesh)

    return _trained(lib, Stack(), prepare)


@program(14, "replicate on a mesh of 2 axes")
def _replicate(lib: Library) -> Pairs:
    mesh = _mesh(lib, (2, 2), ("pod", "dp"))
    return _trained(lib, nn.Linear(4, 4), lambda net: lib.replicate(net, mesh=mesh))


def _loss(lib: Library, mesh: Any, placements: list[Any], **options: Any) -> Pairs:
    """Loss and gradient of logits under loss_parallel; targets are plain, as in torch's documentation, on one axis."""
    dense, target = torch.randn(6, 8, requires_grad=True), torch.randint(8, (6,))
    logits = lib.distribute_tensor(dense.detach(), mesh, placements).requires_grad_()
    split = [p if p == lib.Shard(0) else lib.Replicate() for p in placements]
    given = target if mesh.ndim == 1 else lib.distribute_tensor(target, mesh, split)
    with lib.loss_parallel():
        loss = F.cross_entropy(logits, given, **options)
        loss.backward()
    expected = F.cross_entropy(dense, target, **options)
    expected.backward()
    return [(loss, expected.detach()), (logits.grad, dense.grad)]


@program(15, "loss_parallel with label smoothing")
def _smoothing(lib: Library) -> Pairs:
    return _loss(lib, _mesh(lib), [lib.Shard(1)], label_smoothing=0.1)


@program(16, "loss_parallel with a mean on a mesh of 2 axes")
def _mean(lib: Library) -> Pairs:
    return _loss(lib, _grid(lib), [lib.Shard(0), lib.Shard(1)])


@program(17, "loss_parallel with classes split over two axes")
def _classes_twice(lib: Library) -> Pairs:
    return _loss(lib, _grid(lib), [lib.Shard(1), lib.Shard(1)])


@program(18, "an exception inside loss_parallel, then log_softmax")
def _left_on(lib: Library) -> Pairs:
    with contextlib.suppress(KeyError), lib.loss_parallel():
        raise KeyError
    try:
        dense, weight = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
        x = lib.distribute_tensor(dense.detach(), _mesh(lib), [lib.Shard(1)]).requires_grad_()
        w = lib.distribute_tensor(weight, x.device_mesh, [lib.Shard(1)])
        (F.log_softmax(x, -1) * w).sum().backward()
        (F.log_softmax(dense, -1) * weight).sum().backward()
        return [(x.grad, dense.grad)]
    finally:
        with lib.loss_parallel():
            pass  # leaving it switches it off, whatever was on


@program(19, "implicit_replication, nested")
def _nested(lib: Library) -> Pairs:
    x, plain = torch.randn(4, 3), torch.randn(4, 3)
    split = lib.distribute_tensor(x, _mesh(lib), [lib.Shard(0)])
    with lib.implicit_replication():
        with lib.implicit_replication():
            pass
        return [(split + plain, x + plain)]


@program(20, "p.data = p.data.to(float64)")
def _retyped(lib: Library) -> Pairs:
    x = torch.randn(4, 3)
    p = nn.Parameter(lib.distribute_tensor(x, _mesh(lib), [lib.Shard(0)]))
    p.data = p.data.to(torch.float64)
    dtypes = [str(t.dtype) for t in (p, p.to_local(), p.full_tensor(), p + p)]
    return [(dtypes, ["torch.float64"] * 4), (p, x.double())]


class _Conv1D(nn.Module):
    """A linear layer that keeps its weight as (in, out), as GPT-2's does."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class _Experts(nn.Module):
    """A linear layer for each expert, with weights (experts, out, in)."""

    def __init__(self, experts: int, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


@program(21, "column and row parallel Conv1D and 3-D expert parameters")
def _any_module(lib: Library) -> Pairs:
    pairs = []
    cases = [
        (nn.Sequential(_Conv1D(6, 4), nn.GELU(), _Conv1D(4, 6)), torch.randn(3, 4)),
        (nn.Sequential(_Experts(2, 8, 4), nn.GELU(), _Experts(2, 4, 8)), torch.randn(2, 3, 4)),
    ]
    for dense, x in cases:
        model = copy.deepcopy(dense)
        plan = {
            "0": lib.ColwiseParallel(use_local_output=False),
            "2": lib.RowwiseParallel(use_local_output=False),
        }
        lib.parallelize_module(model, _mesh(lib), plan)
        got, want = model(x), dense(x)
        got.pow(2).sum().backward()
        want.pow(2).sum().backward()
        pairs.append((got, want.detach()))
        pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), dense.parameters(), strict=True)]
    return pairs


@program(22, 'parallelize_module with the key "" and src_data_rank=None')
def _own_data(lib: Library) -> Pairs:
    layer = nn.Linear(4, 8, bias=False)
    layer.weight = nn.Parameter(lib.per_rank(lambda rank: torch.full((8, 4), float(rank))))
    lib.parallelize_module(layer, _mesh(lib), {"": lib.ColwiseParallel()}, src_data_rank=None)
    return [(layer.weight, torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 4))]


@program(23, "a plan whose key matches nothing")
def _no_match(lib: Library) -> Pairs:
    net = nn.Sequential(nn.Linear(4, 4))
    refused = "not refused, not parallelized"
    try:
        lib.parallelize_module(net, _mesh(lib), {"layer0": lib.ColwiseParallel()})
    except Exception as error:
        refused = "an error that names the key" if "layer0" in str(error) else str(error)
    return [(refused, "an error that names the key")]


def _attended(lib: Library, **options: Any) -> Pairs:
    q, k, v = (torch.randn(2, 2, 16, 4) for _ in range(3))
    want = F.scaled_dot_product_attention(q, k, v, **options)
    return [(lib.attention(_mesh(lib), q, k, v, **options), want)]


@program(24, "attention over a split sequence on CPU", fresh=True)
def _causal(lib: Library) -> Pairs:
    return _attended(lib, is_causal=True)


@program(25, "attention over a split sequence, not causal", fresh=True)
def _not_causal(lib: Library) -> Pairs:
    return _attended(lib)


@program(26, "attention over a split sequence with a mask", fresh=True)
def _masked(lib: Library) -> Pairs:
    return _attended(lib, attn_mask=torch.rand(16, 16) > 0.3)


@program(30, "fully_shard and TP on the same axis")
def _same_axis(lib: Library) -> Pairs:
    mesh, dense, x = _mesh(lib), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(8, 4)
    model = copy.deepcopy(dense)
    plan = {"0": lib.ColwiseParallel(), "2": lib.RowwiseParallel()}
    lib.parallelize_module(model, mesh, plan)
    lib.fully_shard(model, mesh=mesh)  # splits what tp has replicated, such as the last bias
    for net in (model, dense):
        net(x).pow(2).mean().backward()
    return [(p.grad, q.grad) for p, q in zip(model.parameters(), dense.parameters(), strict=True)]
