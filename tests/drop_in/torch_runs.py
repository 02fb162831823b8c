"""torch's own parallelism of modules and its checkpoints on our tensor, compared with one device; run in forks."""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _net(width: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.LayerNorm(8)]
    return nn.Sequential(*layers).double()


def _full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _batch(seed: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _train(model: nn.Module, optimizer: Any, rank: int, parts: int, micro: int, steps: int = 2) -> Tensor:
    norm = torch.zeros(())
    for step in range(steps):
        for i in range(micro):
            rows = _batch(10 * step + i).chunk(parts)[rank]
            model(rows).square().mean().backward()
        norm = _full(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norm


def _compare(model: nn.Module, rank: int, parts: int, micro: int = 2, width: int = 12) -> float:
    """Train a distributed model and a dense one: the greatest difference of parameters and norms."""
    dense = _net(width)
    norms = []
    for m, r, n in ((model, rank, parts), (dense, 0, 1)):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        norms.append(_train(m, optimizer, r, n, micro))
    pairs = zip(model.parameters(), dense.parameters(), strict=True)
    worst = max((_full(p) - q).abs().max().item() for p, q in pairs)
    return max(worst, (norms[0] - norms[1]).abs().item())


def _styles() -> dict[str, Any]:
    return {"0": ColwiseParallel(), "2": RowwiseParallel()}


def modules() -> dict[str, float]:
    """torch's `fully_shard` and `replicate` in all forms; by name the greatest difference from one device."""
    warnings.simplefilter("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    out = {}

    def shard(model: nn.Module, mesh: Any, **how: Any) -> nn.Module:
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh, **how)
        return fully_shard(model, mesh=mesh, **how)

    out["fully_shard"] = _compare(shard(_net(), line), rank, world)
    out["fully_shard, uneven"] = _compare(shard(_net(5), line), rank, world, width=5)
    out["fully_shard, not resharded"] = _compare(
        shard(_net(), line, reshard_after_forward=False), rank, world
    )
    out["fully_shard, offload"] = _compare(
        shard(_net(), line, offload_policy=CPUOffloadPolicy(pin_memory=False)), rank, world
    )
    wide = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    out["fully_shard, mixed precision"] = _compare(shard(_net(), line, mp_policy=wide), rank, world)
    with torch.device("meta"):
        meta = _net()
    shard(meta, line)
    meta.to_empty(device="cpu")
    set_model_state_dict(meta, _net().state_dict(), options=StateDictOptions(full_state_dict=True))
    out["fully_shard, meta init"] = _compare(meta, rank, world)
    from torch.distributed._composable.replicate_with_fsdp import replicate

    out["replicate"] = _compare(replicate(_net(), mesh=line), rank, world)
    tensor_parallel = parallelize_module(_net(), line, _styles())
    out["parallelize_module"] = _compare(tensor_parallel, 0, 1)
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        out["fully_shard, HSDP"] = _compare(shard(_net(), square), rank, world)
        both = parallelize_module(_net(), square["tp"], _styles())
        out["fully_shard x TP"] = _compare(shard(both, square["dp"]), square.get_local_rank("dp"), 2)
        both = parallelize_module(_net(), square["tp"], _styles())
        ddp = nn.parallel.DistributedDataParallel(both, device_mesh=square["dp"])
        out["DistributedDataParallel x TP"] = _ddp_difference(ddp, square)
    return out


def _ddp_difference(ddp: nn.Module, mesh: Any) -> float:
    """DDP keeps the blocks as parameters: their gradients, put together, are those of one device."""
    dense = _net()
    rows = _batch(0)
    ddp(rows.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
    dense(rows).square().mean().backward()
    worst = 0.0
    for p, q in zip(ddp.parameters(), dense.parameters(), strict=True):
        spec = getattr(p, "_dtensor_spec", None)
        grad = p.grad
        if spec is not None:
            grad = DTensor.from_local(
                grad, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride
            ).full_tensor()
        worst = max(worst, (grad - q.grad).abs().max().item())
    return worst


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "full, offloaded": {"full_state_dict": True, "cpu_offload": True},
    "offloaded": {"cpu_offload": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "flattened optimizer": {"flatten_optimizer_state_dict": True},
    "without frozen": {"ignore_frozen_params": True, "strict": False},
    "without prefixes": {"keep_submodule_prefixes": False, "strict": False},
}


def _trained(mesh: Any, tp: bool, seed: int) -> tuple[nn.Module, Any]:
    model = _net()
    model[3].weight.requires_grad_(False)
    if tp:
        parallelize_module(model, mesh["tp"], _styles())
    fully_shard(model, mesh=mesh["dp"] if tp else mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(_batch(seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_dicts() -> dict[str, float]:
    """`get_*` and `set_*_state_dict` with every option: the greatest difference after going from one model to another."""
    warnings.simplefilter("ignore")
    world = dist.get_world_size()
    tp = world == 4
    if tp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    out = {}
    for name, how in OPTIONS.items():
        source, source_optimizer = _trained(mesh, tp, 1)
        target, target_optimizer = _trained(mesh, tp, 2)
        options = StateDictOptions(**how)
        state, optimizer_state = get_state_dict(source, source_optimizer, options=options)
        full = how.get("full_state_dict", False)
        plain = [v for v in state.values() if isinstance(v, Tensor) and not isinstance(v, DTensor)]
        if full and (dist.get_rank() == 0 or not how.get("cpu_offload")) and len(plain) != len(state):
            raise AssertionError(f"{name}: the full state has DTensors")
        if how.get("broadcast_from_rank0") and dist.get_rank() != 0:
            state, optimizer_state = {}, {}
        elif full and how.get("cpu_offload"):
            # only rank 0 has it, and gives it to the others
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        if options.broadcast_from_rank0:
            # set_state_dict takes an empty model state to mean the optimizer only, on the rank that has it
            set_model_state_dict(target, state, options=options)
            set_optimizer_state_dict(target, target_optimizer, optimizer_state, options=options)
        else:
            states = {"model_state_dict": state, "optim_state_dict": optimizer_state}
            set_state_dict(target, target_optimizer, **states, options=options)
        out[name] = _state_difference(source, source_optimizer, target, target_optimizer)
    source, source_optimizer = _trained(mesh, tp, 1)
    target, target_optimizer = _trained(mesh, tp, 2)
    set_model_state_dict(target, get_model_state_dict(source))
    set_optimizer_state_dict(target, target_optimizer, get_optimizer_state_dict(source, source_optimizer))
    out["separately"] = _state_difference(source, source_optimizer, target, target_optimizer)
    out["checkpoint"] = _checkpoint(mesh, tp)
    return out


def _checkpoint(mesh: Any, tp: bool) -> float:
    """Save one model and its optimizer with `torch.distributed.checkpoint`, and load them into another."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    source, source_optimizer = _trained(mesh, tp, 1)
    target, target_optimizer = _trained(mesh, tp, 2)
    model, optimizer = get_state_dict(source, source_optimizer)
    dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=names[0]).result()
    model, optimizer = get_state_dict(target, target_optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=names[0])
    set_state_dict(target, target_optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return _state_difference(source, source_optimizer, target, target_optimizer)


def _state_difference(source: nn.Module, optimizer: Any, target: nn.Module, target_optimizer: Any) -> float:
    worst = 0.0
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        worst = max(worst, (_full(p) - _full(q)).abs().max().item())
        for key, value in optimizer.state.get(p, {}).items():
            other = target_optimizer.state[q][key]
            worst = max(worst, (_full(value) - _full(other)).abs().max().item())
    return worst


def pipeline() -> float:
    """torch's pipeline schedule over stages that are tensor parallel: the greatest difference of gradients."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    warnings.simplefilter("ignore")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "tp"))
    stage_index = mesh.get_local_rank("pp")
    dense = nn.ModuleList([_net(), _net()])
    mine = copy.deepcopy(dense[stage_index])
    parallelize_module(mine, mesh["tp"], _styles())
    stage = PipelineStage(mine, stage_index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(
        stage, n_microbatches=2, loss_fn=lambda out, target: (out - target).square().mean()
    )
    x, target = _batch(1), _batch(2)
    if stage_index == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)
    halves = zip(x.chunk(2), target.chunk(2), strict=True)
    sum((dense[1](dense[0](a)) - b).square().mean() / 2 for a, b in halves).backward()  # type: ignore[union-attr]
    pairs = zip(mine.parameters(), dense[stage_index].parameters(), strict=True)
    return max((_full(p.grad) - q.grad).abs().max().item() for p, q in pairs)


def tensors() -> list[str]:
    """What torch does with tensors of its own DTensor, done with ours; the names of what went wrong."""
    wrong = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def check(name: str, right: bool) -> None:
        if not right:
            wrong.append(name)

    full = torch.arange(10.0).view(5, 2)
    x, y = (distribute_tensor(full + i, mesh, [Shard(0)]) for i in range(2))
    torch.testing.assert_close(x, y - 1)
    try:
        torch.testing.assert_close(x, y)
        wrong.append("assert_close accepts different values")
    except AssertionError:
        pass
    torch.utils.swap_tensors(x, y)
    check("swap_tensors", torch.equal(x.full_tensor(), full + 1))
    for flag in (
        torch.__future__.set_swap_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ):
        flag(True)
        layer = parallelize_module(nn.Linear(6, 4), mesh, ColwiseParallel())
        weight = layer.weight.full_tensor()
        layer.double()
        check(
            flag.__name__,
            layer.weight.dtype == torch.float64
            and isinstance(layer.weight, DTensor)
            and torch.equal(layer.weight.full_tensor(), weight.double()),
        )
        flag(False)
    source = parallelize_module(nn.Linear(6, 4), mesh, ColwiseParallel())
    with torch.device("meta"):
        target = nn.Linear(6, 4)
    target.load_state_dict(source.state_dict(), assign=True)
    check(
        "assign",
        isinstance(target.weight, DTensor)
        and torch.equal(target.weight.full_tensor(), source.weight.full_tensor()),
    )
    meta = distribute_tensor(torch.empty(5, 2, device="meta"), mesh, [Shard(0)], src_data_rank=None)
    check("meta", meta.is_meta and meta._local_tensor.is_meta)
    check("deepcopy", torch.equal(copy.deepcopy(x).full_tensor(), full + 1))
    check("replicate", distribute_tensor(full, mesh, [Replicate()]).placements == (Replicate(),))
    from torch.optim import optimizer

    check("foreach", DTensor in optimizer._foreach_supported_types)
    return wrong


def compiled() -> dict[str, float]:
    """`torch.compile` of functions of DTensors and of blocks: the greatest difference of results and gradients from eager."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def function(x: Tensor) -> Tensor:
        return (x * 2).sin()

    out = {}
    full = _batch(0)
    dense = full.clone().requires_grad_()
    function(dense).sum().backward()
    x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    y = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    out["result"] = (_full(y) - function(full)).abs().max().item()
    out["gradient"] = (_full(x.grad) - dense.grad).abs().max().item()

    def of_blocks(block: Tensor) -> Tensor:
        return (
            DTensor.from_local(block, mesh, [Shard(0)])
            .redistribute(placements=[Replicate()])
            .to_local()
            .sin()
        )

    y = torch.compile(of_blocks, backend="aot_eager", fullgraph=True)(full)
    out["blocks"] = (y - of_blocks(full)).abs().max().item()
    return out
