"""Programs that call torch.distributed themselves, or use torch's DDP, FSDP and DCP, beside DTensors: right ones, and with a fault."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise import Replicate, Shard

BAD = 2


def is_bad() -> bool:
    return dist.get_rank() == BAD


def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def total() -> float:
    """A collective of ours."""
    return sw.distribute_tensor(torch.arange(8.0), mesh(), [Shard(0)]).sum().item()


def pause(seconds: float = 0.7) -> None:
    """Let one rank come late to what follows."""
    if is_bad():
        time.sleep(seconds)


def collectives() -> None:
    n, t = dist.get_world_size(), torch.ones(4)
    parts = [torch.zeros(4) for _ in range(n)]
    for call in (
        lambda: dist.all_reduce(t),
        lambda: dist.all_gather(parts, t),
        lambda: dist.broadcast(t, 1),
        lambda: dist.reduce(t, 3),
        lambda: dist.barrier(),
        lambda: dist.scatter(t, parts if dist.get_rank() == 0 else None, 0),
        lambda: dist.gather(t, parts if dist.get_rank() == 0 else None, 0),
        lambda: dist.all_to_all_single(torch.zeros(n), torch.ones(n)),
        lambda: dist.all_gather_object([None] * n, {"rank": dist.get_rank()}),
        lambda: dist.broadcast_object_list([dist.get_rank()], 0),
    ):
        pause(0.45)
        call()
        total()


def asynchronous() -> None:
    t = torch.ones(1000)
    work = dist.all_reduce(t, async_op=True)
    total()
    pause()
    other = dist.all_gather([torch.zeros(1000) for _ in range(dist.get_world_size())], t, async_op=True)
    x = sw.distribute_tensor(torch.arange(8.0), mesh(), [Shard(0)]).redistribute(
        placements=[Replicate()], async_op=True
    )
    pause()
    other.wait()
    work.wait()
    assert x.sum().item() == 28.0


def pairs() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    t = torch.full((3,), float(rank))
    for shift in (1, 2):
        pause(0.5)
        request = dist.isend(t, (rank + shift) % n)
        got = torch.zeros(3)
        dist.recv(got, (rank - shift) % n)
        request.wait()
        total()
    if rank < 2:  # two ranks alone, while the others compute
        (dist.send if rank else dist.recv)(torch.zeros(2), 1 - rank)
    else:
        time.sleep(0.6)
    total()


def groups() -> None:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    t = torch.ones(2)
    for i in range(4):  # the halves go at their own pace
        if i % 2 == rank // 2:
            time.sleep(0.5)
        dist.all_reduce(t, group=mine)
    square = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for i in range(3 + rank // 2):  # another number of collectives in each half
        x = sw.distribute_tensor(torch.ones(4), square["tp"], [Shard(0)])
        assert x.sum().item() == 4.0
        time.sleep(0.2 * (i == rank))
    total()
    for group in halves:
        dist.destroy_process_group(group) if group is mine else None
    total()


def data_parallel() -> None:
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        pause(0.5)
        net(torch.ones(4, 8) * dist.get_rank()).sum().backward()
        optimizer.step()
        total()


def torch_fsdp_and_checkpoint() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    for _ in range(2):
        pause(0.5)
        net(torch.ones(4, 8)).sum().backward()
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    dcp.save({"step": torch.tensor(3)}, checkpoint_id=folder[0])
    dcp.load(state := {"step": torch.tensor(0)}, checkpoint_id=folder[0])
    assert state["step"] == 3
    total()


def nested() -> None:
    for _ in range(3):
        with sw.guard(timeout=20):
            total()
            try:
                with sw.guard():
                    if is_bad():
                        raise KeyError("caught by the rank that raised it")
            except KeyError:
                pause()
        total()


RIGHT: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (collectives, asynchronous, pairs, groups, data_parallel, torch_fsdp_and_checkpoint, nested)
}


def raises_before(call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        total()
        if is_bad():
            raise KeyError("one rank only")
        call()
        total()

    return run


def dies_before(call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        total()
        if is_bad():
            os.kill(os.getpid(), signal.SIGKILL)
        call()
        total()

    return run


def stops_before(call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        total()
        if is_bad():
            os.kill(os.getpid(), signal.SIGSTOP)
        call()
        total()

    return run


def skips(call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        total()
        if not is_bad():
            call()
        total()

    return run


def _ddp_step() -> None:
    net = DistributedDataParallel(nn.Linear(4, 4))
    net(torch.ones(2, 4)).sum().backward()


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "async all_reduce": lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
    "barrier": dist.barrier,
    "recv": lambda: dist.recv(torch.zeros(1), BAD),
    "all_gather_object": lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
    "DDP": _ddp_step,
    "new_group": lambda: dist.new_group([0, 1, 2, 3]),
    "DTensors": lambda: sw.distribute_tensor(torch.ones(8), mesh(), [Shard(0)]).full_tensor(),
}
WRONG: dict[str, tuple[Callable[[], None], float]] = {
    f"{name} {what}": (wrap(call), wait)
    for what, call in CALLS.items()
    for name, wrap, wait in (
        ("raises before", raises_before, 0.0),
        ("dies before", dies_before, 0.0),
        ("stops before", stops_before, 2.0),
        ("skips", skips, 2.0),
    )
}
"""The program, and the seconds of the timeout that it takes to find the fault."""
