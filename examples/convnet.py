"""A ConvNet with batch norm whose images are split along their height: convolutions exchange halos of one row.

python -m examples.convnet           2x2 processes: batch split over dp, height over sp; and one process
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from examples.losses import compare_losses
from shardwise.comm import counting

SHAPE = (2, 2)


def build() -> nn.Sequential:
    """Three stages; any convolution, pool or norm may be used."""
    stages: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16), (16, 32)):
        stages += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        stages += [nn.MaxPool2d(2)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def images(size: int) -> tuple[Tensor, Tensor]:
    """Stripes of ten widths, with their width as the label."""
    labels = torch.arange(16) % 10
    grid = torch.arange(float(size)).expand(16, 3, size, size)
    return (grid * (labels + 1).view(-1, 1, 1, 1) / 6).sin(), labels


def train(shape: tuple[int, ...], steps: int, size: int) -> tuple[list[float], Counter[str], int]:
    """The losses, the bytes sent by kind, and the bytes of the first activation on this rank."""
    x, y = images(size)
    with nullcontext() if shape else sw.one_device():
        sw.manual_seed(0)
        with torch.device("meta"):
            model = build()
        if shape:
            mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "sp"))
            sw.distribute_module(model, mesh)  # all parameters and buffers replicated
            x = sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Shard(2)])
            y = sw.distribute_tensor(y, mesh, [sw.Shard(0), sw.Replicate()])
        sw.materialize(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        with counting() as ledger:
            for _ in range(steps):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        sent: Counter[str] = Counter()
        for entry in ledger.entries:
            sent[entry.step] += int(entry.bytes)
        with torch.no_grad():
            first = model[0](x)
        return losses, sent, (first.to_local() if isinstance(first, sw.DTensor) else first).nbytes


def main(steps: int = 12, size: int = 64) -> None:
    """Train on processes and on one, and compare."""
    torch.set_num_threads(1)
    (found, sent, held), *_ = sw.launch(train, 4, SHAPE, steps, size)
    alone, _, whole = train((), steps, size)
    print("2x2 ranks " + " ".join(f"{x:.3f}" for x in found[::2][:10]))
    print("one       " + " ".join(f"{x:.3f}" for x in alone[::2][:10]))
    for kind, amount in sent.most_common():
        print(f"{kind:16}{amount / steps:12,.0f} bytes per rank and step")
    print(f"first activation {held:,} bytes per rank, {whole:,} on one device")
    compare_losses(found, alone, 1e-3)


if __name__ == "__main__":
    main()
