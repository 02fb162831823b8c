"""An elastic training run of which ranks are killed at drawn moments: HSDP with dropout, on whatever mesh the ranks that are left allow."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from shardwise.parallel import fully_shard
from shardwise.recovery import ElasticRun, StateLostError, rendezvous, snapshot
from shardwise.recovery import run as run_module

STEPS, BATCH, WIDTH = 8, 12, 8
MOMENTS = ["forward", "backward", "update", "commit", "copy", "restore", "meeting"]


@dataclass(frozen=True)
class Death:
    """A member that dies the n-th time that it comes to a moment of a step."""

    member: int
    moment: str
    count: int


class Net(nn.Module):
    """Two layers with dropout, in float64 so that the order of sums does not show; sizes that no mesh divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 13, dtype=torch.float64)
        self.down = nn.Linear(13, WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        self.seen += 1
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.3))


def mesh_shape(ranks: int) -> tuple[int, int]:
    """Two replicas where that is possible, else one."""
    return (2, ranks // 2) if ranks % 2 == 0 and ranks > 1 else (1, ranks)


def build(shape: tuple[int, int] | None) -> tuple[dict[str, Any], Any]:
    """The state of a run, and what lays out a batch."""
    net = Net()
    with torch.no_grad():  # weights that nobody draws
        for p in net.parameters():
            p.copy_(torch.sin(torch.arange(1, p.numel() + 1, dtype=p.dtype) ** 1.3).view(p.shape) * 0.5)
    split = lambda x: x  # noqa: E731
    if shape is not None:
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("pod", "dp"))
        fully_shard(net, mesh=mesh)
        split = lambda x: sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Shard(0)], src_data_rank=None)  # noqa: E731
    sw.manual_seed(5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
    return {"model": net, "optimizer": optimizer, "schedule": schedule, "step": 0}, split


def whole(x: Any) -> torch.Tensor:
    return x.detach().full_tensor() if isinstance(x, sw.DTensor) else x.detach()


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters, buffers and optimizer state by name."""
    found = dict(state["model"].state_dict(keep_vars=True))
    for i, p in enumerate(state["model"].parameters()):
        found |= {f"{i}.{k}": v for k, v in state["optimizer"].state.get(p, {}).items()}
    return found


def one_step(state: dict[str, Any], split: Any, at: Any = lambda moment: None) -> tuple[float, str]:
    """A step; its loss and a digest of its dropout mask."""
    numbers = torch.arange(BATCH * WIDTH, dtype=torch.float64).view(BATCH, WIDTH)
    data = torch.sin(numbers * (state["step"] + 1)) * 2
    mask = F.dropout(split(torch.ones(BATCH, WIDTH, dtype=torch.float64)), 0.5)
    at("forward")
    loss = (state["model"](split(data)) - split(data)).pow(2).mean()
    at("backward")
    loss.backward()
    hook = state["optimizer"].register_step_pre_hook(lambda *_: at("update"))
    state["optimizer"].step()
    hook.remove()
    state["optimizer"].zero_grad()
    state["schedule"].step()
    state["step"] += 1
    return whole(loss).item(), hashlib.sha256(whole(mask).numpy().tobytes()).hexdigest()[:16]


def uninterrupted() -> list[tuple[float, str]]:
    """The losses and masks of a run on one device."""
    with sw.one_device():
        state, split = build(None)
        return [one_step(state, split) for _ in range(STEPS)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()


class Killer:
    """Kills this process at its moment, and notes when."""

    def __init__(self, deaths: list[Death], work: Path, member: int) -> None:
        self.deaths = [d for d in deaths if d.member == member]
        self.work, self.member, self.counts = work, member, dict.fromkeys(MOMENTS, 0)

    def __call__(self, moment: str) -> None:
        self.counts[moment] += 1
        for death in self.deaths:
            if death.moment == moment and self.counts[moment] == death.count:
                (self.work / f"killed-{self.member}").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, owner: Any, name: str, moment: str) -> None:
        """Come to a moment whenever a function is called."""
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self(moment)
            return real(*args, **kwargs)

        setattr(owner, name, call)


_killers: list[Killer] = []


def killer_of(deaths: list[Death], work: Path, member: int) -> Killer:
    """The killer of this process: one for all of its lives in a run."""
    if not _killers or _killers[0].work != work:
        _killers[:] = [killer := Killer(deaths, work, member)]
        killer.hook(run_module, "agree_on", "commit")
        killer.hook(snapshot.Snapshot, "copy_blocks", "copy")
        killer.hook(run_module, "fill", "restore")
        killer.hook(rendezvous.Rendezvous, "meet", "meeting")
    return _killers[0]


def train(run: ElasticRun, work: Path, deaths: list[Death]) -> dict[str, Any]:
    """Train to the last step; what this rank has seen."""
    member = run.members[dist.get_rank()]
    at = killer_of(deaths, work, member)
    state, split = build(mesh_shape(dist.get_world_size()))
    try:
        restored = run.restore(state)
    except StateLostError:  # two ranks died before the next commit, and a block had no others: begin anew
        restored = False
        if len(set(range(4)) - set(run.members)) < 2:
            raise
    out: dict[str, Any] = {"at": None, "losses": {}, "restored": restored, "wrong": []}
    if restored:
        out["at"] = state["step"]
        saved = torch.load(work / f"full-{state['step']}.pt")
        for name, x in tensors_of(state).items():  # bit-equal to a planned redistribution
            expected = saved[name]
            if isinstance(x, sw.DTensor):
                placed = sw.distribute_tensor(expected, x.device_mesh, x.placements, src_data_rank=None)
                x, expected = x.detach().to_local(), placed.to_local()
            if not same_bits(x.detach(), expected):
                out["wrong"].append(name)
    while state["step"] < STEPS:
        step = state["step"]
        out["losses"][step] = one_step(state, split, at)
        if "done" not in out:
            out["done"] = time.time()
        full = {name: whole(x).clone() for name, x in tensors_of(state).items()}
        if dist.get_rank() == 0:
            torch.save(full, aside := work / f".{member}-{random.random()}")
            os.rename(aside, work / f"full-{state['step']}.pt")
        run.commit(state)
    out["members"], out["generation"], out["moved"] = run.members, run.generation, run.received_bytes
    return out
