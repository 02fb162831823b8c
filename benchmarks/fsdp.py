"""Data-parallel training steps compared with torch's FSDP2 and DDP and with code by hand: time, bytes and memory.

Two gloo processes with one thread each train the same residual MLP, each block of it in a group of its own. All candidates make
a step in turn, in an order that is drawn anew for each turn, so that the load of the machine and what ran before are the same
for all. `replicate` is in DDP's form, with plain parameters, and "on a mesh" in that of a mesh, whose parameters are DTensors; "torch's"
is torch's function of that form, `replicate_with_fsdp`. The times are those of the
fastest tenth of the turns. The second line of a size is the CPU time of a rank, which other programs on the machine disturb less.
Peak memory is that of all tensors of a rank beyond the parameters as they are stored, and includes buffers that an engine keeps
between steps.
"""

import argparse
import copy
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.fsdp_by_hand import ByHand
from shardwise import launch
from shardwise.comm import counting
from shardwise.fsdp import fully_shard
from shardwise.parallel import explain, replicate

SIZES = {"small": (32, 6, 8), "medium": (256, 6, 64), "large": (768, 4, 256), "long": (768, 4, 512)}
"""The width, the number of blocks and the rows of a batch. Matrix products dominate in "long"; a third of "large" does not depend on the rows: communication and copies."""


class Residual(nn.Module):
    """Blocks of two linear layers."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream, and a linear layer."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """The model under each engine."""
    from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))

    def sharded(shard: Callable[..., Any]) -> nn.Module:
        net = copy.deepcopy(model)
        for block in net.blocks:
            shard(block, mesh=mesh)
        shard(net, mesh=mesh)
        return net

    return {
        "fully_shard": sharded(fully_shard),
        "FSDP2": sharded(torch_fully_shard),
        "replicate": replicate(copy.deepcopy(model), device_mesh=mesh),
        "on a mesh": replicate(copy.deepcopy(model), mesh=mesh),
        "torch's": torch_replicate(copy.deepcopy(model), mesh=mesh),
        "DDP": nn.parallel.DistributedDataParallel(copy.deepcopy(model)),
    }


def steps_of(
    model: nn.Module, foreach: bool | None
) -> tuple[dict[str, nn.Module], dict[str, Callable[[Tensor], Tensor]]]:
    """The models, and for each candidate a function that makes a training step and returns the loss."""
    nets = candidates(model)

    def step_of(net: nn.Module) -> Callable[[Tensor], Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, foreach=foreach)

        def step(x: Tensor) -> Tensor:
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return nets, {name: step_of(net) for name, net in nets.items()} | {"hand": ByHand(model, lr=1e-3).step}


def measure(
    size: str, turns: int, foreach: bool | None
) -> tuple[dict[str, float], dict[str, float], dict[str, float], float, int]:
    """Seconds and CPU seconds per step and losses of each candidate, and the bytes per step, predicted and counted."""
    width, blocks, rows = SIZES[size]
    torch.manual_seed(0)
    nets, steps = steps_of(Residual(width, blocks), foreach)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    times: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    order = random.Random(0)  # the same on all ranks: what ran before a candidate changes its time
    for _ in range(turns + 3):
        for name, step in order.sample(list(steps.items()), len(steps)):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            loss = step(x)
            times[name].append(time.perf_counter() - start)
            busy[name].append(time.process_time() - cpu)
            losses[name] = loss.item()
    with counting() as ledger:
        nets["fully_shard"](x).pow(2).mean().backward()
    fast, cpus = ({name: _fast(some[3:]) for name, some in kind.items()} for kind in (times, busy))
    return fast, cpus, losses, explain(nets["fully_shard"]).bytes_per_rank, int(ledger.bytes)


def _fast(times: list[float]) -> float:
    """The slowest of the fastest tenth."""
    return sorted(times)[len(times) // 10]


class Memory(TorchDispatchMode):
    """The bytes of all tensors that ops return while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and not t.is_meta:
                self.watch(t)
        return out

    def watch(self, t: Tensor) -> int:
        """Count the memory of a tensor as long as it exists; returns the bytes of all memory."""
        storage = getattr(t, "_local_tensor", t).untyped_storage()
        key = storage._cdata
        self._alive.setdefault(key, weakref.ref(storage, lambda _: self._alive.pop(key, None)))
        sizes = [s.nbytes() for ref in list(self._alive.values()) if (s := ref()) is not None]
        self.peak = max(self.peak, sum(sizes))
        return sum(sizes)


def peak_memory(size: str) -> dict[str, tuple[int, int]]:
    """The bytes of all tensors of a rank at most in two steps, without the parameters; and what `explain` predicts."""
    width, blocks, _ = SIZES[size]
    found, x = {}, torch.randn(4, width)  # few rows: a prediction is of parameters and gradients
    for name, net in candidates(Residual(width, blocks)).items():
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        stored = sum(getattr(p, "_local_tensor", p).nbytes for p in net.parameters())
        with Memory() as memory:
            for p in net.parameters():
                memory.watch(p)
            for _ in range(2):
                net(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ours = name not in ("FSDP2", "DDP", "torch's")
        found[name] = memory.peak - stored, explain(net).peak_bytes if ours else 0
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--sizes", nargs="*", default=["small", "large", "long"], choices=list(SIZES))
    parser.add_argument(
        "--foreach", action="store_true", help="the optimizer's version for lists of tensors, for all engines"
    )
    turns, sizes, foreach = vars(parser.parse_args()).values()
    peaks = launch(peak_memory, 2, "medium")[0]
    print("peak memory of a medium step, beyond the stored parameters:")
    for name, (peak, predicted) in peaks.items():
        print(f"  {name:12}{peak:>12,} B" + (f"   {predicted:,} B predicted" if predicted else ""))
    names = ("fully_shard", "FSDP2", "hand", "replicate", "DDP", "on a mesh", "torch's")
    print(
        f"{'size':8}"
        + "".join(f"{n:>13}" for n in names)
        + "    /FSDP2   /hand    /DDP  /torch's  bytes per rank"
    )
    for size in sizes:
        results = launch(measure, 2, size, turns, foreach or None)
        for name, loss in results[0][2].items():
            assert abs(loss - results[0][2]["DDP"]) < 1e-4 * abs(loss), name
        note = f"{results[0][3]:,.0f} predicted, {results[0][4]:,} counted"
        for kind, label, text in ((0, size, note), (1, "  CPU", "")):
            took = {n: max(r[kind][n] for r in results) * 1e3 for n in names}
            ours, replicated = took["fully_shard"], took["replicate"]
            ratios = (
                ours / took["FSDP2"],
                ours / took["hand"],
                replicated / took["DDP"],
                took["on a mesh"] / took["torch's"],
            )
            shown = "".join(f"{took[n]:>10.2f} ms" for n in names)
            print(f"{label:8}{shown}  " + "".join(f"{r:>8.2f}" for r in ratios) + f"   {text}")


if __name__ == "__main__":
    main()
