"""The faults of docs/faults.md: small programs in which rank 2 of 4 is at fault. `document.py` runs them and writes the page."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.torch_internals.connections import break_connections


class Example(NamedTuple):
    """A program on a mesh of 4 ranks, what it is called, and what to do about it."""

    title: str
    program: Callable[[sw.DeviceMesh, int], Any]
    advice: str
    kind: str


def bad_index(mesh, rank):
    words = sw.distribute_tensor(torch.tensor([1, 2, 3, 4, 5, 99, 7, 8]), mesh, [Shard(0)])
    table = sw.ones(10, 4, device_mesh=mesh)
    torch.nn.functional.embedding(words, table).sum().item()


def exception(mesh, rank):
    x = sw.ones(8, device_mesh=mesh, placements=[Shard(0)])
    if rank == 2:
        raise KeyError("label of batch 7")
    x.sum().item()


def killed(mesh, rank):
    x = sw.ones(8, device_mesh=mesh, placements=[Shard(0)])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    x.sum().item()


def stopped(mesh, rank):
    x = sw.ones(8, device_mesh=mesh, placements=[Shard(0)])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    x.sum().item()


def busy(mesh, rank):
    x = sw.ones(8, device_mesh=mesh, placements=[Shard(0)])
    if rank == 2:
        time.sleep(10)
    x.sum().item()


def missing_call(mesh, rank):
    x = sw.ones(8, device_mesh=mesh, placements=[Shard(0)])
    if rank != 2:
        x.sum().item()


def other_shape(mesh, rank):
    x = sw.ones(8, 4, device_mesh=mesh, placements=[Shard(0)])
    rows = 4 if rank == 2 else 6
    x[:rows].redistribute(placements=[Replicate()])


def user_collective(mesh, rank):
    x = sw.ones(8, device_mesh=mesh, placements=[Shard(0)])
    if rank != 2:
        dist.barrier()
    x.sum().item()


def connection(mesh, rank):
    x = sw.ones(8, device_mesh=mesh, placements=[Shard(0)])
    x.sum().item()
    if rank == 2:
        break_connections()  # stands for a network that fails
    x.sum().item()


def other_ops(mesh, rank):
    x = sw.ones(8, device_mesh=mesh, placements=[Shard(0)])
    y = x * 2
    if rank == 2:
        y = y + 1
    y.exp()


def replicas_drift(mesh, rank):
    weight = sw.ones(4, device_mesh=mesh, placements=[Replicate()])
    if rank == 2:
        weight.to_local()[1] = 1.5
    weight * 2


def plain_data(mesh, rank):
    x = sw.ones(8, 3, device_mesh=mesh, placements=[Shard(0)])
    scale = torch.full((3,), float(rank == 2))
    with sw.policy(plain="replicate"):
        x * scale


def wrong_placement(mesh, rank):
    rows = torch.full((2,), float(rank))
    DTensor.from_local(rows, mesh, [Replicate()])


def wrong_gradient(mesh, rank):
    weight = sw.ones(3, device_mesh=mesh, placements=[Replicate()]).requires_grad_()
    (weight.to_local() * rank).sum().backward()


def other_seed(mesh, rank):
    sw.manual_seed(1 if rank == 2 else 0)
    sw.rand(8, device_mesh=mesh, placements=[Shard(0)])


def wrong_block(mesh, rank):
    x = sw.ones(8, device_mesh=mesh, placements=[Shard(0)])
    if rank == 2:
        x._local_tensor = torch.ones(3)
    x + 1


GUARD = [
    Example(
        "An op raises on one rank",
        bad_index,
        "Only the block of rank 2 holds the index 99. Look at the data of that rank. This needs no `guard`: every op on DTensors reports.",
        "raised",
    ),
    Example(
        "The program raises on one rank",
        exception,
        "Correct the error of the rank that is named; its own traceback is in its output. An error that every rank raises is an ordinary error.",
        "raised",
    ),
    Example(
        "A rank dies",
        killed,
        "Look for the reason in the output of that rank and in the log of the system (`dmesg` for memory that ran out), and restart from the last checkpoint. With [`sw.elastic`](checkpoint.md#without-a-disk) the others go on, or under torchrun the processes that it starts anew.",
        "died",
    ),
    Example(
        "A rank is stopped",
        stopped,
        "Let the process go on (`kill -CONT`), or end it. Found after the timeout of the guard, here 2 s.",
        "timeout",
    ),
    Example(
        "A rank does not come",
        busy,
        "The line of the missing rank says where it is: a slow disk, a lock, an endless loop, or a phase that takes long. If it is right to take that long: `guard(timeout=...)`.",
        "timeout",
    ),
    Example(
        "A rank returns without a collective that the others call",
        missing_call,
        "Look for the `if rank == ...` or the loop that is shorter on one rank, around the lines that are shown.",
        "ended",
    ),
    Example(
        "Ranks call different collectives",
        other_shape,
        "Both lines are shown. Compare the layouts, shapes and dtypes. It is found before anything is sent.",
        "diverged",
    ),
    Example(
        "A collective of torch.distributed is missing on one rank",
        user_collective,
        "Collectives that the program calls itself are compared with the others. Inside C++ code (DDP's buckets) they are found by the timeout only.",
        "diverged",
    ),
    Example(
        "A connection breaks",
        connection,
        "No rank of this machine is the cause. See the output of the ranks on other machines, and the network.",
        "lost",
    ),
]
SANITIZE = [
    Example("Ranks run different ops", other_ops, "Make the branch depend on values that all ranks have.", "order"),
    Example(
        "Replicas drift apart",
        replicas_drift,
        "Find out who wrote to the block of one rank alone; ops on DTensors write to all replicas.",
        "values",
    ),
    Example("A plain tensor differs", plain_data, "Data that belong to a rank need a layout: `from_local`.", "plain"),
    Example("Blocks are not what `from_local` says", wrong_placement, "Here `[Shard(0)]` is right.", "claim"),
    Example(
        "A gradient is not what `to_local` says",
        wrong_gradient,
        "Each rank computed its own part of the gradient: `to_local(grad_placements=[Partial()])`.",
        "gradient",
    ),
    Example("Random streams differ", other_seed, "Use one seed; each rank draws the numbers of its own block anyway.", "random"),
    Example("A block was replaced", wrong_block, "Do not assign to `_local_tensor`.", "layout"),
]  # fmt: skip
