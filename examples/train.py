"""Train a language model on 4 processes and on one, and compare: one program, two sets of layouts.

python -m examples.train                              starts 4 processes
torchrun --nproc-per-node 4 -m examples.train         uses those of torchrun
"""

from __future__ import annotations

import argparse
import os
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from examples.language_model import LanguageModel, batch_of, documentation, generate
from examples.training_report import LossBar, console, plot, size
from shardwise.comm import counting
from shardwise.parallel import DataParallelMeshDims, fully_shard, parallelize_module

PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.norm*": "sequence_parallel",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "norm": "sequence_parallel",
    "head": "colwise",
}
"""Tensor and sequence parallelism over the axis `tp`; the batch and what is stored are split over the axis `dp`."""

BATCH, LENGTH, SEED, PROMPT = 16, 96, 2026, "Return the "


@dataclass
class Run:
    """What a training run reports."""

    losses: list[float] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    memory: int = 0
    seconds: float = 0.0
    sample: str = ""


def train(steps: int, shape: tuple[int, ...], title: str, characters: int = 80) -> Run:
    """Train on a mesh of this shape, or on one device if the shape is empty."""
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) if shape else None
    with nullcontext() if mesh else sw.one_device():
        sw.manual_seed(SEED)
        with torch.device("meta"):  # no process ever holds all weights
            model = LanguageModel(length=LENGTH)
        if mesh is not None:
            parallelize_module(model, mesh, PLAN)
            shard_over_data(model, mesh)
        sw.materialize(model)
        with counting() as ledger, LossBar(title, steps, mesh is None or dist.get_rank() == 0) as bar:
            run = fit(model, mesh, steps, bar, lambda: float(ledger.bytes))
        for entry in ledger.entries:
            run.sent[entry.step] += int(entry.bytes)
        model.eval()
        if mesh is not None:
            model.set_reshard_after_forward(False)  # gather the weights once for all characters
        run.sample = generate(model, PROMPT, characters, lambda text: whole(model(everywhere(text, mesh))))
    return run


def shard_over_data(model: LanguageModel, mesh: sw.DeviceMesh) -> None:
    """Split what is left of the weights over `dp`, too; each block is gathered while it computes."""
    data = DataParallelMeshDims(shard="dp")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, dp_mesh_dims=data)
    fully_shard(model, mesh=mesh, dp_mesh_dims=data)


def everywhere(t: Tensor, mesh: sw.DeviceMesh | None) -> Tensor:
    """The same tensor on every rank."""
    if mesh is None:
        return t
    return sw.distribute_tensor(t, mesh, [sw.Replicate(), sw.Replicate()], src_data_rank=None)


def whole(t: Tensor) -> Tensor:
    """The value of a tensor."""
    return t.full_tensor() if isinstance(t, sw.DTensor) else t


def fit(
    model: LanguageModel, mesh: sw.DeviceMesh | None, steps: int, bar: LossBar, sent: Callable[[], float]
) -> Run:
    """The training loop: nothing but the layout of the batch depends on the mesh."""
    text, run, start = documentation(), Run(), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        inputs, targets = batch_of(text, step, BATCH, LENGTH)
        if mesh is not None:  # every rank has drawn the batch and keeps its part, so nothing is sent
            split = [sw.Shard(0), sw.Replicate()]
            inputs, targets = (
                sw.distribute_tensor(t, mesh, split, src_data_rank=None) for t in (inputs, targets)
            )
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.losses.append(loss.item())
        run.seconds = time.perf_counter() - start
        bar.update(step + 1, run.losses[-1], (step + 1) * BATCH * LENGTH / run.seconds, sent())
        run.memory = run.memory or memory_of(model, optimizer)
        optimizer.zero_grad()
        schedule.step()
    return run


def memory_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The bytes of parameters, gradients and optimizer state that this process holds."""
    parameters = list(model.parameters())
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    held = [*parameters, *(p.grad for p in parameters if p.grad is not None), *state]
    blocks = [t.to_local() if isinstance(t, sw.DTensor) else t for t in held]
    return sum(b.numel() * b.element_size() for b in blocks)


def main() -> None:
    """Train on 4 processes, then on one, and print the comparison."""
    parser = argparse.ArgumentParser(description="Train a language model on 4 processes and on one.")
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    out, is_first = console(), int(os.environ.get("RANK", 0)) == 0
    if is_first:
        count = sum(p.numel() for p in LanguageModel(length=LENGTH).parameters())
        out.print(
            f"A language model with {count / 1e6:.1f} M parameters learns Python's documentation on 4\n"
            "processes, a mesh of dp=2 and tp=2. Heads, MLP and vocabulary are split over tp,\n"
            "and between them the sequence; the batch and all weights are split over dp, and\n"
            "blocks are gathered while they compute. Then one process does the same.\n"
        )
    ranks = sw.launch(train, 4, steps, (2, 2), "4 processes")
    if is_first:
        report(ranks, train(steps, (), "one process"))


def report(ranks: list[Run], one: Run) -> None:
    """Print the loss curves and the figures of both runs."""
    out, many = console(), ranks[0]
    difference = max(abs(a - b) for a, b in zip(many.losses, one.losses, strict=True))
    kinds = Counter[str]()
    for run in ranks:
        kinds.update(run.sent)
    out.print(f"\nloss\n{plot({'4 processes': many.losses, 'one process': one.losses})}\n", markup=False)
    rows = {
        "greatest difference of a loss": f"{difference:.1e}",
        "weights, gradients, Adam": f"{size(many.memory)} on each rank, {size(one.memory)} on one device",
        "sent by all ranks": size(sum(kinds.values())),
        **{f"  {kind}": size(n) for kind, n in kinds.most_common()},
        "time": f"{many.seconds:.0f} s on 4 processes, {one.seconds:.0f} s on one",
        "same sample of text": "yes" if many.sample == one.sample else "no",
    }
    for name, value in rows.items():
        out.print(f"{name:30} {value}", markup=False)
    shown = "".join(c if c.isprintable() else " " for c in many.sample)
    out.print(
        "\n" + textwrap.fill(shown, 78, initial_indent="  ", subsequent_indent="  ") + "\n", markup=False
    )
    out.print("Next: edit PLAN in examples/train.py, or run `python -m examples.same_numbers`.", markup=False)
    if difference > 1e-2:
        raise SystemExit("The runs differ.")


if __name__ == "__main__":
    main()
