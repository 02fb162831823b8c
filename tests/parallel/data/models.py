"""Models for the tests of data parallelism, each with a feature that engines find hard, and their training.

A model is trained on one device and data-parallel with the same batches; each rank has its own part of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.comm import is_simulated

ROWS, WIDTH, CLASSES = 4, 5, 3  # of a rank's batch


class Mlp(nn.Module):
    """Sizes that no mesh divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 7), nn.Linear(7, 6), nn.LayerNorm(6)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Odd(nn.Module):
    """A scalar, a non-contiguous, a frozen and an unused parameter, and one that has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.columns = nn.Parameter(torch.randn(6, WIDTH).t())
        self.frozen = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.row = nn.Parameter(torch.randn(1, 6))
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.columns * self.scale + self.row).tanh() @ self.frozen
        return self.head(self.layers[0](x))


class Tied(nn.Module):
    """One weight in two submodules, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.layers[1].weight = self.layers[0].weight
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            x = x + layer(x).tanh()
        return self.head(x)


class Attention(nn.Module):
    """Self-attention over the rows of a batch, with activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 9, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).unsqueeze(1)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if torch.is_grad_enabled() else layer(x)
        return self.head(x).squeeze(1)


class Recurrent(nn.Module):
    """A module that keeps references to its parameters, and a parameter that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, 6, batch_first=True)])
        self.sometimes = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out, _ = self.layers[0](x.unsqueeze(1))
        out = out.squeeze(1)
        return self.head(self.sometimes(out) if self.calls % 2 == 0 else out)


class TensorParallel(nn.Module):
    """Linear layers whose parameters are split over `tp`, on which each rank computes with its own data."""

    mesh: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 7)])
        self.down = nn.Linear(7, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def split(self, mesh: Any) -> None:
        self.mesh = mesh
        for module, name, placement in [
            (self.layers[0], "weight", Shard(0)),
            (self.layers[0], "bias", Shard(0)),
            (self.down, "weight", Shard(1)),
            (self.down, "bias", Replicate()),
        ]:
            param = getattr(module, name)
            split = sw.distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
            setattr(module, name, nn.Parameter(split, requires_grad=param.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Replicate()])
        x = self.down(self.layers[0](x).tanh())
        if self.mesh is not None:
            x = x.redistribute(placements=[Replicate()]).to_local()
        return self.head(self.norm(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "odd": Odd,
    "tied": Tied,
    "attention": Attention,
    "recurrent": Recurrent,
    "tensor parallel": TensorParallel,
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with its initial parameters, the same ones each time."""
    torch.manual_seed(3)
    return MODELS[name]().to(dtype)


def batches(ranks: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of all ranks, for each backward pass."""
    rng = torch.Generator().manual_seed(4)
    out = []
    for _ in range(count):
        x = torch.randn(ranks, ROWS, WIDTH, generator=rng, dtype=torch.float64)
        out.append((x, torch.randn(ranks, ROWS, CLASSES, generator=rng, dtype=torch.float64)))
    return out


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss: a mean over rows."""
    return functional.mse_loss(model(x).to(y.dtype), y)


def optimizer_of(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that treats a gradient of zero and none at all in different ways."""
    return torch.optim.AdamW(params, lr=0.03, weight_decay=0.1)


def full(t: Any) -> Tensor:
    """The value of a parameter or gradient, which must be the same on all ranks."""
    found = t.detach()
    if not isinstance(found, DTensor):
        return found.clone()
    with torch.no_grad():
        value = found.full_tensor()
    if is_simulated():
        assert all(torch.equal(a, value.ranks[0]) for a in value.ranks)
        return value.ranks[0]
    return value


def train_dense(
    name: str, ranks: int, steps: int, micro: int
) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses, the gradients of the first step and the parameters after the last, on one device."""
    model = build(name)
    optimizer, losses, grads = optimizer_of(model.parameters()), [], {}
    data = iter(batches(ranks, steps * micro))
    for step in range(steps):
        for _ in range(micro):
            x, y = next(data)
            loss = loss_of(model, x.flatten(0, 1), y.flatten(0, 1)) / micro
            loss.backward()
            losses.append(float(loss.detach()))
        if step == 0:
            grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, {n: p.detach().clone() for n, p in model.named_parameters()}
