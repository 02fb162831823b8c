"""Hybrid sharding with gradient accumulation: weights are split within a pod and replicated across pods.

The sums of gradients stay within the pods until the last micro-batch, so the slow links between pods carry them once.

python -m examples.hsdp
torchrun --nproc-per-node 4 -m examples.hsdp
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from examples.language_model import LanguageModel, batch_of, documentation
from shardwise.comm import counting, is_simulated
from shardwise.parallel import explain, fully_shard

SHAPE, MICRO, BATCH, LENGTH = (2, 2), 3, 8, 32


def train(shape: tuple[int, ...], steps: int) -> tuple[list[float], dict[str, float], str]:
    """The losses, the bytes of the last step by axis, and the layouts."""
    torch.manual_seed(0)
    model = LanguageModel(width=32, layers=2, heads=4, length=LENGTH, dropout=0.0)
    ranks, mesh = torch.Size(shape).numel(), None
    if shape:
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("pod", "dp"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, text, sent = [], documentation(50_000), {}
    for step in range(steps):
        total = 0.0
        with counting() as ledger:
            for micro in range(MICRO):
                inputs, targets = batch_of(text, step * MICRO + micro, BATCH, LENGTH)
                if mesh is not None:  # each rank has its own rows
                    model.set_requires_all_reduce(micro == MICRO - 1)
                    inputs, targets = (
                        sw.per_rank(lambda rank, t=t: t.chunk(ranks)[rank]) for t in (inputs, targets)
                    )
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / MICRO
                loss.backward()
                total += mean(loss, mesh)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        sent = {}
        for entry in ledger.entries:
            axes = "×".join(entry.axes)
            sent[axes] = sent.get(axes, 0.0) + float(entry.bytes) / (ranks if is_simulated() else 1)
    return losses, sent, str(explain(model)).splitlines()[4] if shape else ""


def mean(loss: torch.Tensor, mesh: sw.DeviceMesh | None) -> float:
    """The mean of a loss over the ranks."""
    if mesh is None:
        return loss.item()
    return sw.DTensor.from_local(loss.detach(), mesh, [sw.Partial("avg")] * mesh.ndim).full_tensor().item()


def main(steps: int = 6) -> None:
    """Train on a mesh of pods and on one device, and compare."""
    torch.set_num_threads(1)
    (found, sent, layouts), *_ = sw.launch(train, 4, SHAPE, steps)
    alone, *_ = train((), steps)
    print(layouts.strip().replace(", gradient", "\ngradient") + "\n")
    print("2x2 ranks " + " ".join(f"{x:.4f}" for x in found[:8]))
    print("one       " + " ".join(f"{x:.4f}" for x in alone[:8]))
    worst = max(abs(a - b) for a, b in zip(found, alone, strict=True))
    print(f"The losses differ by at most {worst:.1e}.")
    for axes, count in sorted(sent.items()):
        print(f"{count:12,.0f} B per rank over {axes} in a step of {MICRO} micro-batches")
    if worst > 1e-4:
        raise SystemExit("That is more than rounding.")


if __name__ == "__main__":
    main()
