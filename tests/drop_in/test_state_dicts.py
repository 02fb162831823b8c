"""torch's `get_*` and `set_*_state_dict` with every `StateDictOptions` field, and its checkpoints, without `install`."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.launch import Workers
from shardwise.layout import Replicate, Shard
from shardwise.placement_types import _StridedShard

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
_R = Replicate()
# uneven blocks, two axes on one dim in both orders, blocks that are no rectangles, replicated and (frozen) plain parameters
_PLACEMENTS: dict[str, list[sw.Placement]] = {
    "0.weight": [Shard(0), Shard(1)],
    "0.bias": [Shard(0), Shard(0)],
    "1.weight": [Shard(0, order=1), Shard(0, order=0)],
    "1.bias": [_R, Shard(0, factors=(3, 2), factor=1)],
    "2.weight": [_StridedShard(0, split_factor=2), Shard(0)],
    "2.bias": [_R, _R],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "full, offloaded": {"full_state_dict": True, "cpu_offload": True},
    "offloaded": {"cpu_offload": True},
    "full, flattened": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "from rank 0, offloaded": {"full_state_dict": True, "broadcast_from_rank0": True, "cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "without frozen": {"full_state_dict": True, "ignore_frozen_params": True, "strict": False},
    "without prefixes": {"full_state_dict": True, "keep_submodule_prefixes": False, "strict": False},
}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.Linear(5, 6), nn.Linear(6, 8), nn.LayerNorm(8)]
    return nn.Sequential(*layers).double()


def _place(model: nn.Module, mesh: sw.DeviceMesh) -> nn.Module:
    for name, placements in _PLACEMENTS.items():
        module, _, kind = name.rpartition(".")
        placed = placements[-mesh.ndim :] if mesh.ndim < 2 else placements
        if mesh.ndim < 2 and isinstance(placed[0], Shard) and placed[0].order is not None:
            placed = [Shard(0)]
        owner = model.get_submodule(module)
        full = getattr(owner, kind).detach()
        setattr(owner, kind, nn.Parameter(sw.distribute_tensor(full, mesh, placed, src_data_rank=None)))
    model[3].weight.requires_grad_(False)
    return model


def _fill(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    """Take an optimizer step with gradients that belong to a seed."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if isinstance(p, sw.DTensor):
            grad = sw.distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value.values() for t in _tensors(v)] if isinstance(value, dict) else []


def _differences(pair: Any, other: Any) -> list[str]:
    """The names of parameters and optimizer states that differ, of two models and their optimizers."""
    (model, optimizer), (target, target_optimizer) = pair, other
    wrong = []
    for (name, p), q in zip(model.named_parameters(), target.parameters(), strict=True):
        if not torch.equal(_full(p), _full(q)):
            wrong.append(name)
        for key, value in optimizer.state.get(p, {}).items():
            if not torch.equal(_full(value), _full(target_optimizer.state[q][key])):
                wrong.append(f"{name} {key}")
    return wrong


def _through(how: dict[str, Any], mesh: sw.DeviceMesh) -> list[str]:
    """What differs after a state went from one model to another: from torch's full state, and between the models."""
    from torch.distributed.checkpoint import state_dict as sd

    options = sd.StateDictOptions(**how)
    models = [(m := _place(_net(), mesh), _fill(m, seed)) for seed in (1, 2)]
    source, target = models
    dense = _net()
    dense[3].weight.requires_grad_(False)
    dense_optimizer = _fill(dense, 1)
    state, optimizer_state = sd.get_state_dict(*source, options=options)
    wrong = []
    has_all = dist.get_rank() == 0 or not how.get("cpu_offload")
    if how.get("full_state_dict") and not has_all and (state or optimizer_state):
        wrong.append("a rank other than 0 has an offloaded state")
    if how.get("full_state_dict") and has_all:
        plain = {key: value for key, value in how.items() if key != "broadcast_from_rank0"}
        expected = sd.get_state_dict(dense, dense_optimizer, options=sd.StateDictOptions(**plain))
        for ours, theirs in zip((state, optimizer_state), expected, strict=True):
            if list(ours) != list(theirs):
                wrong.append(f"keys {list(ours)}")
            pairs = list(zip(_tensors(ours), _tensors(theirs), strict=True))
            if not pairs or any(isinstance(a, sw.DTensor) or not torch.equal(a, b) for a, b in pairs):
                wrong.append("full state")
    if not how.get("full_state_dict") and not any(isinstance(t, sw.DTensor) for t in _tensors(state)):
        wrong.append("blocks")
    if how.get("full_state_dict") and how.get("cpu_offload"):
        options = sd.StateDictOptions(**how | {"broadcast_from_rank0": True})  # only rank 0 has it
    if how.get("keep_submodule_prefixes") is False or how.keys() >= {
        "full_state_dict",
        "flatten_optimizer_state_dict",
    }:
        return wrong  # torch cannot set these, of plain tensors neither
    if options.broadcast_from_rank0:
        if dist.get_rank() != 0:
            state, optimizer_state = {}, {}
        sd.set_model_state_dict(target[0], state, options=options)
        sd.set_optimizer_state_dict(*target, optimizer_state, options=options)
    else:
        sd.set_state_dict(*target, model_state_dict=state, optim_state_dict=optimizer_state, options=options)
    return wrong + _differences(source, target)


class _Renamed(nn.Module):
    """A model whose state has the names of a submodule, by hooks."""

    def __init__(self, mesh: sw.DeviceMesh) -> None:
        super().__init__()
        self.inner = _place(_net(), mesh)
        self.register_state_dict_post_hook(self._remove)
        self.register_load_state_dict_pre_hook(self._add)

    @staticmethod
    def _remove(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in list(state):
            state[name.replace("inner.", "", 1)] = state.pop(name)

    @staticmethod
    def _add(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for name in list(state):
            state["inner." + name] = state.pop(name)

    def _fqn_modifiers(self) -> dict[str, str]:
        return dict.fromkeys("0123", "inner")


def _other_states(mesh: sw.DeviceMesh) -> list[str]:
    """`dsd_fqn_modifiers`, `strict`, and a model on the meta device that takes the state of rank 0."""
    from torch.distributed.checkpoint import state_dict as sd

    wrong = []
    source, target = _Renamed(mesh), _Renamed(mesh)
    _fill(source, 1)
    full = {name: _full(value) for name, value in source.inner.state_dict().items()}
    for how in ({"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}):
        options = sd.StateDictOptions(**how, dsd_fqn_modifiers="_fqn_modifiers")
        state = sd.get_model_state_dict(source, options=options)
        if set(state) != set(full) or not all(torch.equal(full[name], state[name]) for name in full):
            wrong.append(f"renamed {list(state)}")
        sd.set_model_state_dict(target, state, options=options)
        pairs = zip(source.parameters(), target.parameters(), strict=True)
        if not all(torch.equal(_full(p), _full(q)) for p, q in pairs):
            wrong.append("renamed")
    options = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    meta = copy.deepcopy(target.inner).to("meta")
    sd.set_model_state_dict(meta, dict(full) if dist.get_rank() == 0 else {}, options=options)
    pairs = zip(meta.parameters(), source.inner.parameters(), strict=True)
    if any(p.is_meta or not torch.equal(_full(p), _full(q)) for p, q in pairs):
        wrong.append("meta")
    del full["0.weight"]
    try:
        sd.set_model_state_dict(target.inner, dict(full) if dist.get_rank() == 0 else {}, options=options)
        wrong.append("strict")
    except RuntimeError as error:
        if "0.weight" not in str(error):
            wrong.append(str(error))
    options.strict = False
    state = dict(full) if dist.get_rank() == 0 else {}
    sd.set_model_state_dict(target.inner, state, options=options)
    return wrong


def _saved(mesh: sw.DeviceMesh) -> list[str]:
    """`async_save` copies our tensors to the CPU first."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as sd

    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    source, target = ((m := _place(_net(), mesh), _fill(m, seed)) for seed in (1, 2))
    model, optimizer = sd.get_state_dict(*source)
    dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=names[0]).result()
    model, optimizer = sd.get_state_dict(*target)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=names[0])
    sd.set_state_dict(*target, model_state_dict=model, optim_state_dict=optimizer)
    return _differences(source, target)


def _sent(mesh: sw.DeviceMesh) -> list[str]:
    """`PGTransport` sends blocks, and makes tensors of the class that the sender had."""
    from torch.distributed.checkpoint._pg_transport import PGTransport

    pg, cpu = dist.distributed_c10d._get_default_group(), torch.device("cpu")
    transport = PGTransport(pg, timedelta(seconds=30), cpu)
    x = sw.distribute_tensor(torch.arange(12.0), mesh, [sw.Shard(0)] * mesh.ndim)
    if dist.get_rank() == 0:
        transport.send_checkpoint([1], {"x": x, "n": 3})
    if dist.get_rank() != 1:
        return []
    got = transport.recv_checkpoint(0)
    same = type(got["x"]) is sw.DTensor and torch.equal(
        got["x"]._local_tensor, torch.arange(12.0 / mesh.size())
    )
    return [] if same and got["n"] == 3 and got["x"].placements == x.placements else [str(got)]


def state_dicts() -> dict[str, list[str]]:
    """What is wrong, by option."""
    warnings.simplefilter("ignore")
    world = dist.get_world_size()
    mesh = sw.init_device_mesh("cpu", (2, 2) if world == 4 else (world,))
    out = {name: _through(how, mesh) for name, how in OPTIONS.items()}
    out |= {"others": _other_states(mesh), "checkpoint": _saved(mesh), "sent": _sent(mesh)}
    return {name: wrong for name, wrong in out.items() if wrong}


@pytest.mark.processes
def test_every_option_on_four_processes(workers: Workers):
    assert workers.run(state_dicts) == [{}] * 4


@pytest.mark.processes
@pytest.mark.skipif(not DEEP, reason="two more processes; SHARDWISE_DEEP=1")
def test_every_option_on_two_processes():
    assert sw.launch(state_dicts, 2) == [{}] * 2


def test_a_full_state_in_simulation():
    from torch.distributed.checkpoint import state_dict as sd

    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2))
        options = sd.StateDictOptions(full_state_dict=True)
        state = sd.get_model_state_dict(_place(_net(), mesh), options=options)
        assert all(not isinstance(v, sw.DTensor) for v in state.values())
        target = _place(_net(), mesh)
        for p in target.parameters():
            p.data.zero_()
        sd.set_model_state_dict(target, state, options=options)
        for p, q in zip(target.parameters(), _net().parameters(), strict=True):
            assert torch.equal(_full(p), q.detach())


@pytest.mark.parametrize("first", ["shardwise", "torch.distributed.checkpoint.state_dict"])
def test_the_order_of_imports_does_not_matter(first: str):
    second = "shardwise" if first != "shardwise" else "torch.distributed.checkpoint.state_dict"
    program = f"""
import {first}, {second}, torch
import shardwise as sw
from torch.distributed import _state_dict_utils as utilities, tensor
from torch.distributed.checkpoint import default_planner, planner_helpers, state_dict
assert state_dict._gather_state_dict is utilities._gather_state_dict
with sw.simulate(2):
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(3.0), mesh, [sw.Shard(0)])
    full = state_dict._gather_state_dict({{"x": [x]}})["x"][0]
    assert type(full) is not type(x) and full.sum() == 3, full
    for module in (utilities, default_planner, planner_helpers):
        assert isinstance(x, module.DTensor) and not isinstance(full, module.DTensor)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(sw.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
