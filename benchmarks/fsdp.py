"""Data-parallel training steps compared with torch's FSDP2 and DDP: time in one interleaved run, bytes and collectives.

Two gloo processes with one thread each train the same residual MLP, each block of it in a group of its own. All candidates make
a step in turn, so that the load of the machine is the same for all; the times are medians over the turns. The second line of a
size is the CPU time of a rank, which other programs on the machine disturb less.
"""

import argparse
import copy
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from shardwise import launch
from shardwise.comm import counting
from shardwise.fsdp import fully_shard
from shardwise.parallel import explain, replicate

SIZES = {"small": (32, 6, 8), "medium": (256, 6, 64), "large": (768, 4, 256)}
"""The width, the number of blocks and the rows of a batch."""


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
        "replicate": replicate(copy.deepcopy(model), mesh=mesh),
        "DDP": nn.parallel.DistributedDataParallel(copy.deepcopy(model)),
    }


def measure(size: str, turns: int) -> tuple[dict[str, float], dict[str, float], dict[str, float], float, int]:
    """Seconds and CPU seconds per step and losses of each candidate, and the bytes per step, predicted and counted."""
    width, blocks, rows = SIZES[size]
    torch.manual_seed(0)
    nets = candidates(Residual(width, blocks))
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=1e-3) for name, net in nets.items()}
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    times: dict[str, list[float]] = {name: [] for name in nets}
    busy: dict[str, list[float]] = {name: [] for name in nets}
    losses: dict[str, float] = {}
    for _ in range(turns + 3):
        for name, net in nets.items():
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            times[name].append(time.perf_counter() - start)
            busy[name].append(time.process_time() - cpu)
            losses[name] = loss.item()
    with counting() as ledger:
        nets["fully_shard"](x).pow(2).mean().backward()
    medians, cpus = (
        {name: statistics.median(some[3:]) for name, some in kind.items()} for kind in (times, busy)
    )
    return medians, cpus, losses, explain(nets["fully_shard"]).bytes_per_rank, int(ledger.bytes)


def peak_memory(size: str) -> dict[str, int]:
    """The bytes that a step of each candidate allocates at most, beyond what it has before."""
    width, blocks, rows = SIZES[size]
    x, found = torch.randn(rows, width), {}
    for name, net in candidates(Residual(width, blocks)).items():
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for turn in range(3):
            with (
                profile(activities=[ProfilerActivity.CPU], profile_memory=True)
                if turn == 2
                else nullcontext() as seen
            ):
                net(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            seen.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        memory = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
        found[name] = max(itertools.accumulate(change for _, change in memory))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--sizes", nargs="*", default=["small", "large"], choices=list(SIZES))
    turns, sizes = vars(parser.parse_args()).values()
    print(
        f"{'size':8}{'fully_shard':>12}{'FSDP2':>10}{'ratio':>8}{'replicate':>12}{'DDP':>10}{'ratio':>8}   bytes per rank"
    )
    peaks = launch(peak_memory, 2, "medium")[0]
    print("peak memory of a medium step: " + ", ".join(f"{n} {b:,} B" for n, b in peaks.items()))
    for size in sizes:
        results = launch(measure, 2, size, turns)
        for name, loss in results[0][2].items():
            assert abs(loss - results[0][2]["DDP"]) < 1e-4 * abs(loss), name
        note = f"{results[0][3]:,.0f} predicted, {results[0][4]:,} counted"
        for kind, label, text in ((0, size, note), (1, "  CPU", "")):
            ours, torchs, replicated, ddp = (max(r[kind][n] for r in results) * 1e3 for n in results[0][0])
            print(
                f"{label:8}{ours:>9.2f} ms{torchs:>7.2f} ms{ours / torchs:>8.2f}{replicated:>9.2f} ms{ddp:>7.2f} ms"
                f"{replicated / ddp:>8.2f}   {text}"
            )


if __name__ == "__main__":
    main()
