"""A training step of a tensor-parallel transformer on 2 real processes: ours, torch's DTensor, and hand-written code.

Four blocks of attention and MLP, forward and backward. The hand-written code has plain tensors and one all-reduce after each
pair of matrix products, in each direction. The DTensor program is the same for both libraries: weights are split, and
activations are replicated where the hand-written code reduces. The three are interleaved; each time is the best of several.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

import shardwise as ours
from shardwise.comm.launch import Workers

LAYERS, RANKS = 4, 2
Weights = list[dict[str, Tensor]]


def weights(width: int) -> Weights:
    """The full weights, the same on every rank."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape) / math.sqrt(width)

    return [
        {"n1": torch.ones(width), "n2": torch.ones(width)}
        | {name: normal(width, width) for name in ("q", "k", "v", "o")}
        | {"up": normal(4 * width, width), "down": normal(width, 4 * width)}
        for _ in range(LAYERS)
    ]


SPLIT = {
    "q": 0,
    "k": 0,
    "v": 0,
    "up": 0,
    "o": 1,
    "down": 1,
}  # column-parallel, so that each rank has its own heads, then row-parallel


class SumGradients(torch.autograd.Function):
    """Identity on a replicated tensor; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous()
        dist.all_reduce(total)
        return total


class SumValues(torch.autograd.Function):
    """The sum over the ranks; its gradient is replicated already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def block(
    x: Any,
    w: dict[str, Any],
    heads: int,
    sum_gradients: Callable[..., Any],
    sum_values: Callable[..., Any],
) -> Any:
    """One layer; `heads` is the number of heads in `x`: those of this rank for blocks, all of them for DTensors."""
    batch, length, _ = x.shape

    def split_heads(t: Any) -> Any:
        return t.view(batch, length, heads, -1).transpose(1, 2)

    h = sum_gradients(layer_norm(x, x.shape[-1:], w["n1"]))
    # decomposed: torch's DTensor has no strategy for the backward pass of attention on CPU
    q, k, v = (split_heads(linear(h, w[name])) for name in ("q", "k", "v"))
    mixed = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v
    x = x + sum_values(linear(mixed.transpose(1, 2).reshape(batch, length, -1), w["o"]))
    h = sum_gradients(layer_norm(x, x.shape[-1:], w["n2"]))
    return x + sum_values(linear(gelu(linear(h, w["up"])), w["down"]))


def by_hand(x: Tensor, full: Weights, heads: int) -> Callable[[], Tensor]:
    rank = dist.get_rank()
    local = [
        {
            n: (t.chunk(RANKS, SPLIT[n])[rank] if n in SPLIT else t).clone().requires_grad_()
            for n, t in w.items()
        }
        for w in full
    ]

    def step() -> Tensor:
        y = x
        for w in local:
            y = block(y, w, heads // RANKS, SumGradients.apply, SumValues.apply)
        loss = y.square().mean()
        loss.backward()
        return loss.detach()

    return step


def with_dtensors(lib: Any, x: Tensor, full: Weights, heads: int) -> Callable[[], Tensor]:
    mesh = lib.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    replicated = [lib.Replicate()]
    distributed = [
        {
            n: lib.distribute_tensor(
                t, mesh, [lib.Shard(SPLIT[n])] if n in SPLIT else replicated
            ).requires_grad_()
            for n, t in w.items()
        }
        for w in full
    ]
    start = lib.distribute_tensor(x, mesh, replicated)

    def step() -> Tensor:
        y = start
        for w in distributed:
            y = block(y, w, heads, lambda h: h, lambda part: part.redistribute(placements=replicated))
        loss = y.square().mean()
        loss.backward()
        return loss.full_tensor().detach()

    return step


def measure(width: int, length: int, batch: int, repeat: int) -> tuple[list[float], list[float]]:
    """Seconds per step and the loss, for each of the three."""
    torch.set_num_threads(1)
    full, heads = weights(width), 8
    torch.manual_seed(1)
    x = torch.randn(batch, length, width)
    steps = [
        by_hand(x, full, heads),
        with_dtensors(theirs, x, full, heads),
        with_dtensors(ours, x, full, heads),
    ]
    losses = [float(step()) for step in steps]
    best = [math.inf] * len(steps)
    for _ in range(repeat):
        for i, step in enumerate(steps):
            dist.barrier()
            start = time.perf_counter()
            step()
            best[i] = min(best[i], time.perf_counter() - start)
    return best, losses


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=30)
    options = parser.parse_args()
    print(
        f"{'width':>6}{'tokens':>8}{'by hand ms':>12}{'torch ms':>10}{'ours ms':>9}{'torch /hand':>13}{'ours /hand':>12}"
    )
    with Workers(RANKS) as workers:
        for width, length, batch in ((64, 16, 2), (256, 64, 4), (512, 128, 4)):
            results = workers.run(measure, width, length, batch, options.repeat)
            hand, torchs, mine = (max(r[0][i] for r in results) * 1e3 for i in range(3))
            for _, losses in results:
                if not torch.allclose(torch.tensor(losses), torch.tensor(losses[0]).expand(3), rtol=1e-4):
                    raise RuntimeError(f"the three programs have different losses: {losses}")
            print(
                f"{width:>6}{length * batch:>8}{hand:>12.2f}{torchs:>10.2f}{mine:>9.2f}{torchs / hand:>13.2f}{mine / hand:>12.2f}"
            )


if __name__ == "__main__":
    main()
