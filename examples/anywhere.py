"""One training script for one device, for the processes of torchrun, and for simulated ranks: the same losses.

python -m examples.anywhere                                  one device
torchrun --nproc-per-node 4 -m examples.anywhere             4 processes, mesh dp=2, tp=2
python -m examples.anywhere --simulate 6                     6 ranks in this process, mesh dp=3, tp=2
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from shardwise.parallel import parallelize_module

STEPS = 6


def train() -> list[float]:
    """Train on all ranks that there are; nothing below the first three lines depends on their number."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    tp = 2 if ranks % 2 == 0 else 1
    mesh = sw.init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    sw.manual_seed(3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 50), nn.GELU(), nn.Dropout(0.1), nn.Linear(50, 16))
    parallelize_module(model, mesh, {"0": "colwise", "3": "rowwise"})
    sw.materialize(model)
    x = sw.distribute_tensor(torch.arange(192.0).view(12, 16).sin(), mesh, [sw.Shard(0), sw.Replicate()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"dp={ranks // tp} tp={tp}  " + " ".join(f"{loss:.6f}" for loss in losses))
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    """Train in the way that the command line and the environment say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulate", type=int, default=1, metavar="RANKS", help="ranks in this process")
    options = parser.parse_args(arguments)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        try:
            return train()
        finally:
            dist.destroy_process_group()
    with sw.simulate(options.simulate):
        return train()


if __name__ == "__main__":
    main()
