"""Training that is killed and goes on: from a checkpoint on another mesh, and from the memory of the ranks that are left.

python -m examples.resume

The first run splits weights over 2x2 ranks (FSDP and tensor parallelism) until a rank is killed; the second loads its newest
checkpoint on 3 ranks (FSDP alone). In the third, hybrid sharding on 2x2 ranks, a rank is killed and the other three go on
without a checkpoint. All have the losses of one device without interruption, dropout included.
"""

from __future__ import annotations

import os
import signal
import tempfile

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from examples.language_model import LanguageModel, batch_of, documentation
from shardwise import checkpoint
from shardwise.parallel import DataParallelMeshDims, fully_shard, parallelize_module
from shardwise.recovery import ElasticRun

BATCH, LENGTH = 12, 32
PLAN = {
    "blocks.*.[qkv]": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Trainer:
    """A model, an optimizer, a schedule and a position in the data, on a mesh of these axes; on one device without axes."""

    def __init__(self, **axes: int) -> None:
        sw.manual_seed(0)
        with torch.device("meta"):  # no process ever holds all weights
            self.model = LanguageModel(width=32, layers=2, heads=4, length=LENGTH, dropout=0.1)
        self.mesh = (
            sw.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)) if axes else None
        )
        if "tp" in axes:
            parallelize_module(self.model, self.mesh["tp"], PLAN)
            fully_shard(self.model, mesh=self.mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        elif axes:
            fully_shard(self.model, mesh=self.mesh)
        sw.materialize(self.model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        self.state = {"model": self.model, "optimizer": optimizer, "schedule": schedule, "step": 0}
        self.text = documentation(50_000)

    def step(self) -> float:
        """Train on the next batch; its loss."""
        inputs, targets = batch_of(self.text, self.state["step"], BATCH, LENGTH)
        if self.mesh is not None:
            split = [sw.Replicate() if axis == "tp" else sw.Shard(0) for axis in self.mesh.mesh_dim_names]
            inputs, targets = (
                sw.distribute_tensor(t, self.mesh, split, src_data_rank=None) for t in (inputs, targets)
            )
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self.state["optimizer"].step()
        self.state["optimizer"].zero_grad()
        self.state["schedule"].step()
        self.state["step"] += 1
        return loss.item()


def alone(steps: int) -> dict[int, float]:
    """The losses of one device."""
    with sw.one_device():
        trainer = Trainer()
        return {step: trainer.step() for step in range(steps)}


def from_disk(path: str, axes: dict[str, int], steps: int, killed_at: int | None) -> dict[int, float]:
    """Go on from the newest checkpoint, if there is one; the losses by step."""
    trainer, losses = Trainer(**axes), {}
    with checkpoint.CheckpointManager(path, keep=2, every=2) as manager:
        manager.load(trainer.state)
        while (step := trainer.state["step"]) < steps:
            losses[step] = trainer.step()
            if step == killed_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            manager.save_if_due(trainer.state, step + 1)
    return losses


def from_memory(run: ElasticRun, steps: int, killed_at: int) -> dict[int, float]:
    """Go on from the last commit of the ranks that are left; the losses by step since then."""
    ranks = dist.get_world_size()
    trainer, losses = Trainer(pod=2 if ranks == 4 else 1, dp=2 if ranks == 4 else ranks), {}
    run.restore(trainer.state)
    while (step := trainer.state["step"]) < steps:
        losses[step] = trainer.step()
        if step == killed_at and run.generation == 0 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        run.commit(trainer.state)
    return losses


def show(name: str, losses: dict[int, float], expected: dict[int, float]) -> float:
    """Print the losses of a run; their largest difference from what is expected."""
    print(f"{name:24}from step {min(losses)}: " + " ".join(f"{x:.4f}" for x in list(losses.values())[:6]))
    return max(abs(x - expected[step]) for step, x in losses.items())


def main(steps: int = 8, killed_at: int = 5) -> None:
    """Train with interruptions and without, and compare."""
    torch.set_num_threads(1)
    expected = alone(steps)
    show("one device", expected, expected)
    with tempfile.TemporaryDirectory() as path:
        try:
            sw.launch(from_disk, 4, path, {"dp": 2, "tp": 2}, steps, killed_at)
        except sw.LaunchError as error:
            print(str(error).partition("\n")[0])
        resumed, *_ = sw.launch(from_disk, 3, path, {"dp": 3}, steps, None)
    survivors = [found for found in sw.elastic(from_memory, 4, steps, killed_at) if found is not None]
    worst = max(
        show("checkpoint, 3 ranks", resumed, expected),
        show(f"memory, {len(survivors)} ranks left", survivors[0], expected),
    )
    print(f"The losses differ by at most {worst:.1e}.")
    if worst > 1e-4:
        raise SystemExit("That is more than rounding.")


if __name__ == "__main__":
    main()
