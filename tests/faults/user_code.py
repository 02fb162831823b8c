"""Faults in code of the user that runs inside of ours or of torch: workers of a data loader, hooks, subgroups, background saves.

python -m tests.faults.user_code prints how the ranks of each program ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tests.faults.forked_world import run_world
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shardwise as sw
from shardwise import DTensor, Shard, checkpoint
from shardwise.parallel import fully_shard

BAD, RANKS = 2, 4


def fail() -> None:
    raise KeyError("a bad sample")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def if_bad(act: Callable[[], None]) -> None:
    if dist.get_rank() == BAD:
        act()


def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


class Samples(Dataset[torch.Tensor]):
    """Eight samples, of which one is bad on one rank."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.is_bad = act, dist.get_rank() == BAD

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.is_bad and i == 5:
            self.act()
        return torch.ones(4)


def data_worker(act: Callable[[], None]) -> None:
    for batch in DataLoader(Samples(act), batch_size=2, num_workers=1):
        DTensor.from_local(batch, mesh(), [Shard(0)]).sum().item()


def hook(where: str, act: Callable[[], None]) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh())
    if where == "forward":
        net[2].register_forward_hook(lambda *_: if_bad(act))
    else:
        net[0].register_full_backward_hook(lambda *_: if_bad(act))
    net(torch.randn(6, 8, requires_grad=True)).sum().backward()
    sw.ones(8, device_mesh=mesh(), placements=[Shard(0)]).sum().item()


def subgroup(act: Callable[[], None]) -> None:
    """Two pairs of ranks that have nothing to do with each other; one of them has finished when the fault is found."""
    pair = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "dp"))["dp"]
    for _ in range(3):
        sw.ones(8, device_mesh=pair, placements=[Shard(0)]).sum().item()
        if_bad(lambda: (time.sleep(0.5), act()))  # type: ignore[func-returns-value]


def computing(act: Callable[[], None]) -> None:
    """The others compute, and call no collective."""
    sw.ones(8, device_mesh=mesh(), placements=[Shard(0)]).sum().item()
    if_bad(act)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        torch.ones(20, 20) @ torch.ones(20, 20)


def background_save(act: Callable[[], None]) -> None:
    x = sw.ones(8, device_mesh=mesh(), placements=[Shard(0)])
    if_bad(lambda: setattr(os, "fsync", lambda _: act()))
    path = Path(tempfile.gettempdir()) / f"shardwise-user-code-{os.getppid()}"
    handle = checkpoint.async_save({"x": x}, path)
    x.sum().item()
    handle.wait()


PROGRAMS: dict[str, Callable[[], None]] = {
    f"{act.__name__} in {name}": partial(program, act)
    for name, program in {
        "a data worker": data_worker,
        "a forward hook": partial(hook, "forward"),
        "a backward hook": partial(hook, "backward"),
        "a subgroup": subgroup,
        "a step while others compute": computing,
        "a background save": background_save,
    }.items()
    for act in (fail, die)
}


def main() -> None:
    """Run the programs, and print how the ranks ended."""
    for name in sys.argv[1:] or PROGRAMS:

        def run(injected: Callable[[], None], program: Callable[[], None] = PROGRAMS[name]) -> None:
            with sw.guard(timeout=60):
                injected()
                program()

        found = run_world(run, RANKS, 40.0, frozenset({BAD})).ranks
        outcome = {r: [o.end, o.error, o.text, o.seconds] for r, o in found.items()}
        sys.stdout.write(json.dumps([name, outcome]) + "\n")


if __name__ == "__main__":
    main()
