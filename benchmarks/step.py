"""A training step of a tensor-parallel transformer on 2 real processes: ours, torch's DTensor, and code written by hand.

Four blocks of attention and MLP, forward and backward. By hand: plain tensors with one all-reduce after each pair of
products in each direction. The DTensor programs are one text for both libraries: weights lie split, activations are
brought back to Replicate where the hand-written code reduces. The three take turns; each time is the best of several.
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
    """What each rank knows at first: the whole of each weight."""
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
}  # by rows, so that heads are apart, then by columns


class Enter(torch.autograd.Function):
    """What comes from all ranks alike: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous()
        dist.all_reduce(total)
        return total


class Leave(torch.autograd.Function):
    """Parts become their sum, on all ranks alike."""

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
    enter: Callable[..., Any],
    leave: Callable[..., Any],
) -> Any:
    """One layer; `heads` are those that a view is to make, on this rank or in all."""
    batch, length, _ = x.shape

    def apart(t: Any) -> Any:
        return t.view(batch, length, heads, -1).transpose(1, 2)

    h = enter(layer_norm(x, x.shape[-1:], w["n1"]))
    # written out: torch's DTensor has no strategy for the backward of attention on a CPU
    q, k, v = (apart(linear(h, w[name])) for name in ("q", "k", "v"))
    mixed = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v
    x = x + leave(linear(mixed.transpose(1, 2).reshape(batch, length, -1), w["o"]))
    h = enter(layer_norm(x, x.shape[-1:], w["n2"]))
    return x + leave(linear(gelu(linear(h, w["up"])), w["down"]))


def by_hand(x: Tensor, whole: Weights, heads: int) -> Callable[[], Tensor]:
    rank = dist.get_rank()
    mine = [
        {
            n: (t.chunk(RANKS, SPLIT[n])[rank] if n in SPLIT else t).clone().requires_grad_()
            for n, t in w.items()
        }
        for w in whole
    ]

    def step() -> Tensor:
        y = x
        for w in mine:
            y = block(y, w, heads // RANKS, Enter.apply, Leave.apply)
        loss = y.square().mean()
        loss.backward()
        return loss.detach()

    return step


def with_dtensors(lib: Any, x: Tensor, whole: Weights, heads: int) -> Callable[[], Tensor]:
    mesh = lib.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    everywhere = [lib.Replicate()]
    laid = [
        {
            n: lib.distribute_tensor(
                t, mesh, [lib.Shard(SPLIT[n])] if n in SPLIT else everywhere
            ).requires_grad_()
            for n, t in w.items()
        }
        for w in whole
    ]
    start = lib.distribute_tensor(x, mesh, everywhere)

    def step() -> Tensor:
        y = start
        for w in laid:
            y = block(y, w, heads, lambda h: h, lambda part: part.redistribute(placements=everywhere))
        loss = y.square().mean()
        loss.backward()
        return loss.full_tensor().detach()

    return step


def measure(width: int, length: int, batch: int, repeat: int) -> tuple[list[float], list[float]]:
    """Seconds per step and the loss, of each of the three."""
    torch.set_num_threads(1)
    whole, heads = weights(width), 8
    torch.manual_seed(1)
    x = torch.randn(batch, length, width)
    steps = [
        by_hand(x, whole, heads),
        with_dtensors(theirs, x, whole, heads),
        with_dtensors(ours, x, whole, heads),
    ]
    losses = [float(step()) for step in steps]
    best = [math.inf] * len(steps)
    for _ in range(repeat):
        for i, step in enumerate(steps):
            dist.barrier()
            begin = time.perf_counter()
            step()
            best[i] = min(best[i], time.perf_counter() - begin)
    return best, losses


def main() -> None:
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
                    raise RuntimeError(f"the three do not agree: losses {losses}")
            print(
                f"{width:>6}{length * batch:>8}{hand:>12.2f}{torchs:>10.2f}{mine:>9.2f}{torchs / hand:>13.2f}{mine / hand:>12.2f}"
            )


if __name__ == "__main__":
    main()
