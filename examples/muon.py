"""Train with Muon on fully sharded weights, on 4 processes and on one: each matrix is orthogonalized by one rank.

python -m examples.muon
torchrun --nproc-per-node 4 -m examples.muon
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from examples.language_model import LanguageModel, batch_of, documentation
from shardwise.comm import counting, is_simulated
from shardwise.parallel import OwnerOptimizer, fully_shard

RANKS, BATCH, LENGTH = 4, 8, 32


def train(ranks: int, steps: int) -> tuple[list[float], float, int]:
    """The losses, the bytes that the last step of Muon sent per rank, and the bytes of its matrices."""
    torch.manual_seed(0)
    model = LanguageModel(width=32, layers=2, heads=4, length=LENGTH, dropout=0.0)
    mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)) if ranks > 1 else None
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = (
        OwnerOptimizer(matrices, torch.optim.Muon, lr=0.02)
        if ranks > 1
        else torch.optim.Muon(matrices, lr=0.02)
    )
    adam = torch.optim.AdamW(others, lr=3e-3)
    losses, text = [], documentation(50_000)
    for step in range(steps):
        inputs, targets = batch_of(text, step, BATCH, LENGTH)
        if ranks > 1:  # each rank has its own rows
            inputs, targets = (sw.per_rank(lambda rank, t=t: t.chunk(ranks)[rank]) for t in (inputs, targets))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        adam.step()
        with counting() as ledger:
            muon.step()
        model.zero_grad()
        losses.append(mean(loss, mesh))
    sent = float(ledger.bytes) / (ranks if is_simulated() else 1)  # a simulation counts all ranks
    return losses, sent, sum(m.numel() * m.element_size() for m in matrices)


def mean(loss: torch.Tensor, mesh: sw.DeviceMesh | None) -> float:
    """The mean of a loss over the ranks."""
    if mesh is None:
        return loss.item()
    return sw.DTensor.from_local(loss.detach(), mesh, [sw.Partial("avg")]).full_tensor().item()


def main(steps: int = 20) -> None:
    """Train on processes and on one, and compare."""
    torch.set_num_threads(1)
    results = sw.launch(train, RANKS, RANKS, steps)
    (found, _, size), sent = results[0], sum(r[1] for r in results) / RANKS
    alone, *_ = train(1, steps)
    gathering = size / RANKS * (RANKS - 1)  # every rank sends its part of every matrix to all others
    print(f"{RANKS} ranks " + " ".join(f"{x:.4f}" for x in found[:9]))
    print("one     " + " ".join(f"{x:.4f}" for x in alone[:9]))
    worst = max(abs(a - b) for a, b in zip(found, alone, strict=True))
    print(f"The losses differ by at most {worst:.1e}.")
    print(f"Muon sends {sent:,.0f} B per rank and step for {size:,} B of matrices,")
    print(f"{sent / gathering * RANKS:.0f}/{RANKS} of what gathering them everywhere would send.")
    if worst > 1e-2:
        raise SystemExit("That is more than rounding.")


if __name__ == "__main__":
    main()
