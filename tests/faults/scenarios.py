"""Faults on one rank of a world: functions that every rank runs, and what all ranks must say afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

import shardwise as sw
from shardwise import checkpoint

BAD = 2  # the rank with the fault


def mesh():
    return sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def split(values, dim=0):
    return sw.distribute_tensor(torch.as_tensor(values), mesh(), [sw.Shard(dim)])


def total(x):
    """A sum that every rank needs, and so a collective."""
    return x.double().sum().item()


def is_bad():
    return dist.get_rank() == BAD


def numbers():
    return split(torch.arange(32.0).view(8, 4))


def embedding():
    total(functional.embedding(split([1, 2, 3, 4, 5, 99, 7, 8]), sw.ones(10, 4, device_mesh=mesh())))


def take():
    total(sw.ones(10, device_mesh=mesh()).take(split([0, 1, 2, 3, 4, 99, 5, 6])))


def cross_entropy():
    scores = split(torch.ones(8, 5))
    functional.cross_entropy(scores, split([0, 1, 2, 3, 4, 99, 0, 1])).item()


def binary_cross_entropy():
    p = split([0.5, 0.5, 0.5, 0.5, 0.5, 7.0, 0.5, 0.5])
    functional.binary_cross_entropy(p, split(torch.ones(8))).item()


def division():
    total(split([8, 8, 8, 8, 8, 8, 8, 8]) // split([1, 1, 1, 1, 1, 0, 1, 1]))


def svdvals():
    x = torch.eye(2).repeat(4, 1, 1)
    x[2, 0, 0] = float("nan")
    total(torch.linalg.svdvals(split(x)))


def scatter_add():
    index = torch.zeros(8, 4, dtype=torch.int64)
    index[5, 1] = 99
    total(split(torch.zeros(8, 4)).scatter_add_(1, split(index), split(torch.ones(8, 4))))


def nll_loss():
    functional.nll_loss(split(torch.ones(8, 5)), split([0, 1, 2, 3, 4, 99, 0, 1]), reduction="sum").item()


def exception():
    x = numbers()
    if is_bad():
        raise KeyError("label of batch 7")
    total(x)


def exception_in_backward():
    x = numbers().requires_grad_()
    y = x * 2
    if is_bad():
        y.register_hook(lambda grad: grad + torch.ones(3))
    y.sum().backward()
    total(numbers())


def exit_quietly():
    x = numbers()
    if is_bad():
        raise SystemExit(0)
    total(x)


def missing_call():
    x = numbers()
    if not is_bad():
        total(x)


def missing_background_save():
    x = numbers()
    if not is_bad():
        path = Path(tempfile.gettempdir()) / f"shardwise-missing-save-{os.getppid()}"
        checkpoint.async_save({"x": x}, path).wait()


def other_order():
    x = numbers()
    calls = [lambda: total(x), lambda: x.full_tensor()]
    for call in reversed(calls) if is_bad() else calls:
        call()


def other_dtype():
    x = numbers()
    total(x)
    x.to(torch.float32 if is_bad() else torch.float64).full_tensor()


def other_shape():
    x = numbers()
    x[: 4 if is_bad() else 6].redistribute(tp=sw.Replicate())


def user_collective():
    numbers().full_tensor()
    if is_bad():
        raise KeyError("before the barrier")
    dist.barrier()


def stopped():
    x = numbers()
    total(x)
    if is_bad():
        subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    total(x)


def killed():
    x = numbers()
    total(x)
    if is_bad():
        os.kill(os.getpid(), signal.SIGKILL)
    total(x)


class Expected(NamedTuple):
    """What all ranks but the bad one raise: the kind, a part of the message; and what the bad rank raises itself."""

    kind: str
    says: str
    own: str


SCENARIOS: dict[str, tuple[Callable[[], object], Expected]] = {
    f.__name__: (f, Expected(*expected))
    for f, *expected in [
        (embedding, "raised", "aten.embedding.default of", "IndexError"),
        (take, "raised", "aten.take.default of", "IndexError"),
        (cross_entropy, "raised", "Target 99 is out of bounds", "IndexError"),
        (nll_loss, "raised", "Target 99 is out of bounds", "IndexError"),
        (binary_cross_entropy, "raised", "between 0 and 1", "RuntimeError"),
        (division, "raised", "ZeroDivisionError", "RuntimeError"),
        (svdvals, "raised", "linalg_svd", "_LinAlgError"),
        (scatter_add, "raised", "index 99 is out of bounds", "RuntimeError"),
        (exception, "raised", "KeyError: 'label of batch 7'", "KeyError"),
        (exception_in_backward, "raised", "scenarios.py", "RuntimeError"),
        (exit_quietly, "ended", "while others wait", "SystemExit"),
        (missing_call, "ended", "while others wait", ""),
        (missing_background_save, "ended", "checkpoint.save", ""),
        (user_collective, "raised", "before the barrier", "KeyError"),
        (other_order, "diverged", "all-gather over tp: [8:tp, 4] -> [8, 4] f32", "PeerError"),
        (other_dtype, "diverged", "-> [8, 4] f64", "PeerError"),
        (other_shape, "diverged", "-> [6, 4] f32", "PeerError"),
        (stopped, "timeout", "is stopped", "PeerError"),
        (killed, "died", "died", ""),
    ]
}


def alike() -> list[str]:
    """Errors that every rank raises are ordinary errors, however late some ranks are."""
    x = numbers()
    caught = []
    for wrong in (lambda: x.view(5, 5), lambda: x @ x, lambda: x.sum(7)):
        try:
            wrong()
        except (RuntimeError, IndexError) as error:
            caught.append(type(error).__name__)
        if is_bad():
            time.sleep(1.3)
        total(x)
    return caught


def caught_alone() -> float:
    """A rank that catches an error of its own, and goes on as the others do, breaks nothing."""
    x = numbers()
    if is_bad():
        try:
            functional.embedding(torch.tensor([99]), torch.ones(2, 2))
        except IndexError:
            time.sleep(0.6)
    return total(x)
