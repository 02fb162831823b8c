"""Training one model densely and distributed, and the greatest differences between the two."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tests.clients.float64 import Float64
from torch import Tensor, nn

import shardwise as sw

__all__ = [
    "Differences",
    "Record",
    "compare",
    "micro_batches",
    "train",
    "train_on_own_rows",
    "without_ignored_labels",
]

Batch = Mapping[str, Tensor]
Parallelize = Callable[[nn.Module, sw.DeviceMesh], object]

LEARNING_RATE = 1e-2


@dataclass
class Record:
    """What one run computed."""

    outputs: list[Tensor]
    """Of the first micro-batch: logits, or the last hidden states."""
    loss: Tensor
    grads: dict[str, Tensor | None]
    """After the first step's micro-batches."""
    params: dict[str, Tensor]
    """After the last step."""


@dataclass
class Differences:
    """The greatest relative differences between two runs, by kind, with the name of the tensor."""

    worst: dict[str, tuple[float, str]] = field(default_factory=dict)

    def note(self, kind: str, name: str, got: Tensor | None, want: Tensor | None) -> None:
        """Add the difference of one tensor."""
        difference = _difference(got, want)
        if difference >= self.worst.get(kind, (-1.0, ""))[0]:
            self.worst[kind] = (difference, name)

    def beyond(self, tolerance: float) -> dict[str, tuple[float, str]]:
        """Those that are greater than a tolerance."""
        return {kind: worst for kind, worst in self.worst.items() if not worst[0] <= tolerance}


def _difference(got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None:
        present = got if got is not None else want
        return 0.0 if present is None or not present.any() else float("inf")
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.numel():
        return 0.0
    got, want = torch.nan_to_num(got, 1e30), torch.nan_to_num(want, 1e30)
    return float((got - want).abs().max() / want.abs().max().clamp(min=1.0))


def train(model: nn.Module, batches: Sequence[Batch], steps: int) -> Record:
    """Train for some steps, each over all micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    first: tuple[list[Tensor], Tensor] | None = None
    grads: dict[str, Tensor | None] = {}
    for step in range(steps):
        for batch in batches:
            outputs, loss = _forward(model, batch)
            first = first or ([_full(t) for t in outputs], _full(loss))
            (loss / len(batches)).backward()
        if step == 0:
            grads = {n: None if p.grad is None else _full(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    if first is None:
        raise ValueError("nothing to train on")
    return Record(*first, grads, {n: _full(p) for n, p in model.named_parameters()})


def _forward(model: nn.Module, batch: Batch) -> tuple[list[Tensor], Tensor]:
    out = model(**batch)
    main = [out[k] for k in ("logits", "last_hidden_state") if out.get(k) is not None][:1]
    if out.get("loss") is not None:
        return main, out["loss"]
    weights = torch.ones_like(main[0]).cumsum(-1) / main[0].shape[-1]  # another one for each feature
    return main, (main[0] * weights).square().mean()


def _full(t: Tensor) -> Tensor:
    """A plain copy of a tensor, which all ranks must hold alike."""
    if isinstance(t, sw.DTensor):
        t = t.detach().full_tensor()
    if isinstance(t, sw.PerRank):
        first, *others = t.ranks
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)
        t = first
    return t.detach().clone()


def micro_batches(
    vocabulary: int, number: int = 2, batch: int = 2, length: int = 6
) -> list[dict[str, Tensor]]:
    """Random token ids with themselves as labels; some labels are ignored."""
    out = []
    for i in range(number):
        ids = torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[0, 1] = -100
        out.append({"input_ids": ids, "labels": labels})
    return out


@contextlib.contextmanager
def on_mesh(shape: Sequence[int], names: Sequence[str]) -> Iterator[sw.DeviceMesh]:
    """A mesh in a simulation."""
    world = torch.Size(shape).numel()
    with sw.simulate(world):
        yield sw.init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))


def distribute_batch(batch: Batch, mesh: sw.DeviceMesh) -> dict[str, Tensor]:
    """The micro-batch as the model takes it: split over `dp` if the mesh has that axis, else plain."""
    names = mesh.mesh_dim_names or ()
    if "dp" not in names:
        return dict(batch)
    placements = [sw.Shard(0) if n == "dp" else sw.Replicate() for n in names]
    return {k: sw.distribute_tensor(t, mesh, placements) for k, t in batch.items()}


def without_ignored_labels(batches: Sequence[Batch]) -> list[Batch]:
    """The same with all labels in use: the mean over all rows is then the mean over ranks of the means over their rows."""
    return [{k: torch.where(t == -100, 5, t) if k == "labels" else t for k, t in b.items()} for b in batches]


def train_on_own_rows(model: nn.Module, batches: Sequence[Batch], mesh: sw.DeviceMesh) -> Record:
    """Train for one step, each rank on its own plain rows of each micro-batch; outputs and loss are those of all rows."""
    size = mesh["dp"].size()

    def rows(t: Tensor) -> Tensor:
        blocks = t.chunk(size)
        return sw.per_rank(lambda rank: blocks[rank // mesh["tp"].size()])

    def join(t: Tensor, placement: sw.Placement) -> Tensor:
        return _full(sw.DTensor.from_local(t, mesh["dp"], [placement]))

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    first: tuple[list[Tensor], Tensor] | None = None
    for batch in batches:
        outputs, loss = _forward(model, {k: rows(t) for k, t in batch.items()})
        first = first or (
            [join(t.detach(), sw.Shard(0)) for t in outputs],
            join(loss.detach(), sw.Partial("avg")),
        )
        (loss / len(batches)).backward()
    if first is None:
        raise ValueError("nothing to train on")
    grads = {n: None if p.grad is None else _full(p.grad) for n, p in model.named_parameters()}
    optimizer.step()
    return Record(*first, grads, {n: _full(p) for n, p in model.named_parameters()})


def compare(
    model: nn.Module,
    batches: Sequence[Batch],
    parallelize: Parallelize,
    mesh: Mapping[str, int],
    steps: int = 5,
    dense: Record | None = None,
) -> Differences:
    """Train a copy of the model densely and another on a simulated mesh, and compare."""
    with Float64():
        dense = dense or train(copy.deepcopy(model), batches, steps)
        with on_mesh(tuple(mesh.values()), tuple(mesh)) as device_mesh:
            distributed = copy.deepcopy(model)
            parallelize(distributed, device_mesh)
            got = train(distributed, [distribute_batch(b, device_mesh) for b in batches], steps)
    return difference(got, dense)


def difference(got: Record, want: Record) -> Differences:
    """The greatest differences between two runs."""
    out = Differences()
    for i, (g, w) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        out.note("output", str(i), g, w)
    out.note("loss", "loss", got.loss, want.loss)
    for name, w in want.grads.items():
        out.note("gradient", name, got.grads.get(name), w)
    for name, p in want.params.items():
        out.note("parameter", name, got.params.get(name), p)
    return out
