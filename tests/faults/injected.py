"""Faults that are drawn and injected into a small training program, which runs on shardwise's DTensors or on torch's.

A program calls `point(name)` at places where one rank may diverge from the others. The fault of a run happens on one rank, at one
point, in one step.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

RANKS = 4
STEPS = 3
POINTS = ("data", "forward", "layer", "loss", "backward", "optimizer", "update", "end")
MODELS = ("parallel", "sharded", "ops", "replicas")


@dataclass(frozen=True)
class Injected:
    """A fault: what happens, on which rank, at which point of which step, in a program on this model."""

    kind: str
    rank: int
    point: str
    step: int
    model: str
    variant: int

    @property
    def name(self) -> str:
        return f"{self.kind} at {self.point} of step {self.step} on rank {self.rank}, {self.model}, variant {self.variant}"

    @property
    def at_fault(self) -> frozenset[int]:
        """The ranks that raise an error of their own; a block that two ranks hold is wrong on both."""
        if self.kind == "bad value" and self.model == "replicas":
            return frozenset({self.rank // 2 * 2, self.rank // 2 * 2 + 1})
        return frozenset({self.rank})

    @property
    def is_silent(self) -> bool:
        """Whether no rank would wait or raise without `sanitize`."""
        return self.kind in SILENT


class Library(SimpleNamespace):
    """The names that a program uses, of shardwise or of torch."""


class Run:
    """One rank's run of a program with a fault."""

    def __init__(self, fault: Injected | None, lib: Library, injected: Callable[[], None]) -> None:
        self.fault, self.lib, self.injected = fault, lib, injected
        self.step = 0
        self.mesh: Any = None
        self.probe: Any = None
        self.params: list[Any] = []

    def point(self, name: str) -> None:
        """Where the fault may happen."""
        fault = self.fault
        if fault is None or (name, self.step) != (fault.point, fault.step):
            return
        is_bad = dist.get_rank() == fault.rank
        if is_bad:
            self.injected()
        KINDS[fault.kind](self, is_bad, fault.variant)

    def split(self, *size: int, dtype: torch.dtype = torch.float32) -> Any:
        return self.lib.distribute_tensor(
            torch.ones(size, dtype=dtype),
            self.mesh,
            [self.lib.Shard(0)] + [self.lib.Replicate()] * (self.mesh.ndim - 1),
        )


def _raise(run: Run, is_bad: bool, variant: int) -> None:
    if is_bad:
        errors = (
            ValueError("a bad sample"),
            KeyError("labels"),
            RuntimeError("out of memory"),
            OSError("disk"),
        )
        raise errors[variant % len(errors)]


def _bad_value(run: Run, is_bad: bool, variant: int) -> None:
    """A kernel that checks values gets a bad one in the block of one rank."""
    lib = run.lib
    index = torch.zeros(8, dtype=torch.int64)
    place = {0: 0, 1: 2, 2: 4, 3: 6}[run.fault.rank] if run.mesh.ndim == 1 else (run.fault.rank // 2) * 4
    index[place] = 99
    x = lib.distribute_tensor(index, run.mesh, [lib.Shard(0)] + [lib.Replicate()] * (run.mesh.ndim - 1))
    scores = run.split(8, 5)
    calls = (
        lambda: nn.functional.cross_entropy(scores, x).backward() if scores.requires_grad else nn.functional.cross_entropy(scores, x),
        lambda: nn.functional.embedding(x, lib.distribute_tensor(torch.ones(10, 4), run.mesh, [lib.Replicate()] * run.mesh.ndim)),
        lambda: torch.gather(scores, 1, x.view(8, 1)),
        lambda: 7 // (x - 99),
    )  # fmt: skip
    calls[variant % len(calls)]().sum().full_tensor()


def _kill(run: Run, is_bad: bool, variant: int) -> None:
    if is_bad:
        os.kill(os.getpid(), (signal.SIGKILL, signal.SIGSEGV)[variant % 2])


def _stop(run: Run, is_bad: bool, variant: int) -> None:
    if is_bad:
        subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()} 2>/dev/null"])
        os.kill(os.getpid(), signal.SIGSTOP)


def _leave(run: Run, is_bad: bool, variant: int) -> None:
    if is_bad:
        if variant % 2:
            os._exit(3)
        sys.exit(0)


def _missing(run: Run, is_bad: bool, variant: int) -> None:
    if not is_bad:
        _collective(run, variant)


def _extra(run: Run, is_bad: bool, variant: int) -> None:
    if is_bad:
        _collective(run, variant)


def _collective(run: Run, variant: int) -> None:
    x = run.split(8, 4)
    (lambda: x.sum().full_tensor(), x.full_tensor, lambda: (x.t() @ x).full_tensor(), lambda: x.cumsum(0))[
        variant % 4
    ]()


def _order(run: Run, is_bad: bool, variant: int) -> None:
    for i in (variant, variant + 1) if is_bad else (variant + 1, variant):
        _collective(run, i)


def _shape(run: Run, is_bad: bool, variant: int) -> None:
    run.split(*((8, 4), (16, 4), (8, 6), (4, 4))[variant % 4 if is_bad else (variant + 1) % 4]).full_tensor()


def _dtype(run: Run, is_bad: bool, variant: int) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
    x = run.split(8, 4)
    x.to(dtypes[variant % 4 if is_bad else (variant + 1) % 4]).full_tensor()


def _branch(run: Run, is_bad: bool, variant: int) -> None:
    x = run.split(8, 8)
    lib = run.lib
    if is_bad:
        x.redistribute(placements=[lib.Shard(1)] + [lib.Replicate()] * (run.mesh.ndim - 1))
    else:
        (lambda: x.full_tensor(), lambda: x.sum(0).full_tensor())[variant % 2]()


def _batch(run: Run, is_bad: bool, variant: int) -> None:
    """Data that depend on the rank: another number of samples."""
    lib = run.lib
    local = torch.ones(3 if is_bad else 2, 4)
    x = lib.DTensor.from_local(local, run.mesh, [lib.Shard(0)] + [lib.Replicate()] * (run.mesh.ndim - 1))
    x.full_tensor()


def _endless(run: Run, is_bad: bool, variant: int) -> None:
    """A rank that computes, or waits for something else than a collective, for longer than the timeout."""
    if is_bad:
        end = time.monotonic() + 12
        while time.monotonic() < end:
            time.sleep(0.05) if variant % 2 else sum(range(1000))


def _user_collective(run: Run, is_bad: bool, variant: int) -> None:
    """A collective of torch.distributed that one rank does not call."""
    if not is_bad:
        t = torch.ones(4)
        (lambda: dist.all_reduce(t), dist.barrier, lambda: dist.broadcast(t, 0), lambda: dist.all_gather_object([None] * RANKS, 1))[
            variant % 4
        ]()  # fmt: skip


def _user_exception(run: Run, is_bad: bool, variant: int) -> None:
    if is_bad:
        raise ValueError("before a collective of torch.distributed")
    _user_collective(run, is_bad, variant)


def _seed(run: Run, is_bad: bool, variant: int) -> None:
    run.lib.manual_seed(100 + is_bad, run.mesh)
    x = run.lib.rand(
        8,
        4,
        device_mesh=run.mesh,
        placements=[run.lib.Shard(0)] + [run.lib.Replicate()] * (run.mesh.ndim - 1),
    )
    (x + 1).sum().full_tensor()


def _value(run: Run, is_bad: bool, variant: int) -> None:
    """A replicated tensor that one rank changes."""
    with torch.no_grad():
        run.probe.to_local().add_(0.5 * is_bad)
    (run.probe * 2).sum().full_tensor()


def _number(run: Run, is_bad: bool, variant: int) -> None:
    (run.split(8, 4) * (2.0 + is_bad)).sum().full_tensor()


def _claim(run: Run, is_bad: bool, variant: int) -> None:
    lib = run.lib
    x = lib.DTensor.from_local(torch.full((3,), float(is_bad)), run.mesh, [lib.Replicate()] * run.mesh.ndim)
    (x + 1).sum().full_tensor()


KINDS: dict[str, Callable[[Run, bool, int], None]] = {
    "exception": _raise,
    "bad value": _bad_value,
    "killed": _kill,
    "stopped": _stop,
    "left": _leave,
    "missing call": _missing,
    "extra call": _extra,
    "other order": _order,
    "other shape": _shape,
    "other dtype": _dtype,
    "branch": _branch,
    "other batch": _batch,
    "busy": _endless,
    "missing user collective": _user_collective,
    "exception before a user collective": _user_exception,
    "seed": _seed,
    "changed value": _value,
    "other number": _number,
    "wrong claim": _claim,
}
SILENT = frozenset({"seed", "changed value", "other number", "wrong claim"})
WATCHDOG = frozenset({"stopped", "busy", "missing user collective"})
"""Faults that only the timeout can find."""


def draw_faults(count: int, seed: int = 0) -> list[Injected]:
    """Different faults, each kind equally often."""
    rng = random.Random(seed)
    kinds = list(KINDS)
    return [
        Injected(
            kinds[i % len(kinds)],
            rng.randrange(RANKS),
            rng.choice(POINTS),
            rng.randrange(STEPS),
            MODELS[i // len(kinds) % len(MODELS)] if i >= len(kinds) else rng.choice(MODELS),
            rng.randrange(12),
        )
        for i in range(count)
    ]


class _Pointed(nn.Module):
    """A point in a forward pass."""

    def __init__(self, run: Run, name: str) -> None:
        super().__init__()
        self.run, self.name = run, name

    def forward(self, x: Any) -> Any:
        self.run.point(self.name)
        return x


def _model(run: Run, kind: str) -> nn.Module:
    lib = run.lib
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), _Pointed(run, "layer"), nn.Linear(16, 8), nn.Linear(8, 4)
    )
    if kind == "parallel":
        plan = {
            "0": lib.ColwiseParallel(),
            "3": lib.RowwiseParallel(),
            "4": lib.ColwiseParallel(output_layouts=lib.Replicate()),
        }
        lib.parallelize_module(net, run.mesh, plan)
    elif kind == "sharded":
        for layer in (net[0], net[3]):
            lib.fully_shard(layer, mesh=run.mesh)
        lib.fully_shard(net, mesh=run.mesh)
    else:
        for part in net.modules():
            for name, p in list(part._parameters.items()):
                if p is not None:
                    split = lib.Shard(0) if kind == "ops" and p.dim() == 2 else lib.Replicate()
                    placements = [lib.Replicate()] * (run.mesh.ndim - 1) + [split]
                    setattr(part, name, nn.Parameter(lib.distribute_tensor(p.detach(), run.mesh, placements)))
    return net


def train(run: Run) -> float:
    """Three steps of training; the fault, if there is one, happens in one of them."""
    lib = run.lib
    kind = run.fault.model if run.fault is not None else "parallel"
    if kind == "replicas":
        run.mesh = lib.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    else:
        run.mesh = lib.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    run.probe = lib.distribute_tensor(torch.ones(4), run.mesh, [lib.Replicate()] * run.mesh.ndim)
    net = _model(run, kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: run.point("optimizer"))
    is_plain = kind in ("parallel", "sharded")
    total = 0.0
    for run.step in range(STEPS):
        run.point("data")
        x = torch.ones(8, 8)
        if not is_plain:
            x = lib.distribute_tensor(x, run.mesh, [lib.Shard(0)] + [lib.Replicate()] * (run.mesh.ndim - 1))
        run.point("forward")
        y = net(x)
        if y.requires_grad:
            y.register_hook(lambda grad: run.point("backward"))
        loss = y.square().mean()
        run.point("loss")
        loss.backward()
        run.point("update")
        optimizer.step()
        optimizer.zero_grad()
        total = loss.full_tensor().item() if hasattr(loss, "full_tensor") else loss.item()
        run.point("end")
    # ranks that have diverged meet here at the latest, as in a program that ends with a checkpoint
    run.split(8, 2).full_tensor()
    return total
