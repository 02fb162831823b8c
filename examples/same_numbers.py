"""One training run on one device and on 1, 2, 3 and 2x2 ranks: initial weights and dropout masks are bitwise equal.

python -m examples.same_numbers
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from shardwise import Replicate, Shard

WIDTH, STEPS, SEED = 24, 50, 2026
WAYS: dict[str, tuple[int, ...]] = {
    "one device": (),
    "1 rank": (1,),
    "2 ranks": (2,),
    "3 ranks": (3,),
    "2x2 ranks": (2, 2),
}


class Block(nn.Module):
    """A transformer block with dropout on the attention weights and after attention and MLP."""

    def __init__(self, width: int, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


def placements_by_name(mesh: sw.DeviceMesh) -> dict[str, list[sw.Placement]]:
    """The placements of the split weights: column-parallel, then row-parallel, over the last mesh axis."""
    rest: list[sw.Placement] = [Replicate()] * (mesh.ndim - 1)
    names = {"qkv": 0, "up": 0, "out": 1, "down": 1}
    return {f"{name}.weight": [*rest, Shard(dim)] for name, dim in names.items()}


def distribute_parameters(model: nn.Module, mesh: sw.DeviceMesh) -> None:
    """Replace the parameters by distributed ones without values; no rank allocates a full weight."""
    by_name = placements_by_name(mesh)
    for name, module in model.named_modules():
        for key, p in list(module._parameters.items()):
            if p is not None:
                placements = by_name.get(f"{name}.{key}", [Replicate()] * mesh.ndim)
                module._parameters[key] = nn.Parameter(
                    sw.empty(*p.shape, device_mesh=mesh, placements=placements, dtype=p.dtype)
                )


def initialize(model: nn.Module) -> None:
    """Initialize the parameters in the order of the modules."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def full(t: Tensor) -> Tensor:
    """The full tensor of a DTensor, or the tensor itself."""
    if not isinstance(t, sw.DTensor):
        return t
    result = t.full_tensor()
    return result.ranks[0] if isinstance(result, sw.PerRank) else result


def train(mesh: sw.DeviceMesh | None, steps: int = STEPS) -> tuple[str, str, list[float]]:
    """A digest of the initial weights, one of a dropout mask, and the losses."""
    model = Block(WIDTH)
    if mesh is not None:
        distribute_parameters(model, mesh)
    sw.manual_seed(SEED)
    initialize(model)
    weights = [full(p.detach()).clone() for p in model.parameters()]
    grid = torch.arange(4 * 8 * WIDTH, dtype=torch.float32).view(4, 8, WIDTH)
    x, y = grid.sin(), (grid * 1.7).cos()
    if mesh is not None:
        batch_split = [Shard(0)] + [Replicate()] * (mesh.ndim - 1) if mesh.ndim > 1 else [Replicate()]
        x, y = (sw.distribute_tensor(t, mesh, batch_split) for t in (x, y))
    mask = full(F.dropout(torch.ones_like(x), 0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(full(loss.detach())))
    return digest(weights), digest([mask]), losses


def digest(tensors: list[Tensor]) -> str:
    """A short hash of the bits of some tensors."""
    data = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(data).hexdigest()[:12]


@contextmanager
def world(shape: tuple[int, ...]) -> Iterator[Any]:
    """Simulate a mesh, or one device for an empty shape."""
    if not shape:
        with sw.one_device():
            yield None
    else:
        with sw.simulate(torch.Size(shape).numel()):
            yield sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def main() -> None:
    """Train in each way and print what is equal."""
    torch.set_num_threads(1)  # the tensors are small
    reference: list[float] = []
    print(
        f"{'':12}{'initial weights':>17}{'mask':>15}{'first loss':>12}{'last loss':>12}{'max difference':>16}"
    )
    for name, shape in WAYS.items():
        with world(shape) as mesh:
            weights, mask, losses = train(mesh)
        reference = reference or losses
        difference = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        print(f"{name:12}{weights:>17}{mask:>15}{losses[0]:12.6f}{losses[-1]:12.6f}{difference:16.1e}")


if __name__ == "__main__":
    main()
