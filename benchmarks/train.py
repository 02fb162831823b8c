"""A training step of a transformer on 2 real processes: ours, torch's DTensor, and hand-written collectives.

Forward, backward and all gradients reduced, under tensor parallelism (TP) and with sequence parallelism (TP+SP). Ours and
torch's run the same modules under `parallelize_module` with the same styles. The hand-written code has plain tensors, and
the collectives of Megatron: under TP one all-reduce after each pair of matrix products, in each direction; under TP+SP an
all-gather before and a reduce-scatter after each pair, and one all-reduce of all norm gradients. The three are interleaved;
each time is the best of several. Collectives and bytes are those of one step, as one rank sends them.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
import shardwise.parallel
from shardwise.comm.launch import Workers

LAYERS, RANKS, HEAD = 4, 2, 16
Step = Callable[[], Tensor]


class Attention(nn.Module):
    """Attention over the heads whose projections this rank has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # decomposed: torch's DTensor has no strategy for the backward pass of attention on CPU
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(-2, -1) * HEAD**-0.5).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


def stack(width: int) -> nn.Sequential:
    """The model, with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(LAYERS)))


def plan(lib: Any, styles: Any, sequence: bool) -> dict[str, Any]:
    """The plan of the model, in the styles of either library."""
    columns = dict.fromkeys(
        ("*.attention.q", "*.attention.k", "*.attention.v", "*.mlp.up"), styles.ColwiseParallel
    )
    rows = ("*.attention.o", "*.mlp.down")
    layout = lib.Shard(1) if sequence else lib.Replicate()
    found: dict[str, Any] = {key: style() for key, style in columns.items()}
    found |= {key: styles.RowwiseParallel(output_layouts=layout) for key in rows}
    whole = partial(
        styles.PrepareModuleInput, input_layouts=layout, desired_input_layouts=lib.Replicate(), use_local_output=False
    )  # fmt: skip
    found |= {"*.attention": whole(), "*.mlp": whole()}
    if sequence:
        found |= {"*.norm1": styles.SequenceParallel(), "*.norm2": styles.SequenceParallel()}
    return found


def _placements(x: Any) -> tuple[Any, ...]:
    return getattr(x, "placements", ())


def _reduce_each(grads: list[Any]) -> list[Any]:
    """Torch's DTensor reduces one tensor at a time."""
    return [grad.redistribute(placements=[torch_tensor.Replicate()]) for grad in grads]


def _reduce_together(grads: list[Any]) -> list[Any]:
    return list(shardwise.redistribute_many(grads, [shardwise.Replicate()])) if grads else []


def with_styles(
    lib: Any, styles: Any, reduce: Callable[[list[Any]], list[Any]], x: Tensor, width: int, sequence: bool
) -> Step:
    """A step of the parallelized modules of either library."""
    mesh = lib.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model = styles.parallelize_module(stack(width), mesh, plan(lib, styles, sequence))
    local = x.chunk(RANKS, 1)[dist.get_rank()] if sequence else x

    def step() -> Tensor:
        model.zero_grad()
        loss = model(local).square().sum() / x.numel()
        loss.backward()
        pending = [p for p in model.parameters() if any(q.is_partial() for q in _placements(p.grad))]
        grads = reduce([p.grad for p in pending])
        for p, grad in zip(pending, grads, strict=True):
            p.grad = grad
        return loss.detach()

    return step


class _Collective(torch.autograd.Function):
    """A collective whose gradient is another one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0]), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return total


def _gather(x: Tensor) -> Tensor:
    out = x.new_empty(RANKS * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out.unflatten(0, (RANKS, -1)).movedim(0, 1).flatten(1, 2)


def _scatter(x: Tensor) -> Tensor:
    parts = x.unflatten(1, (RANKS, -1)).movedim(1, 0).flatten(0, 1)
    out = parts.new_empty(len(x), *parts.shape[1:])
    dist.reduce_scatter_tensor(out, parts.contiguous())
    return out


def by_hand(x: Tensor, width: int, sequence: bool) -> Step:
    """A step of plain modules with explicit collectives."""
    rank, model = dist.get_rank(), stack(width)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            dim = 1 if name.endswith(("o", "down")) else 0
            module.weight = nn.Parameter(module.weight.detach().chunk(RANKS, dim)[rank].clone())
    before, after = (_gather, _scatter) if sequence else (_same, _all_reduce)
    back_before, back_after = (_scatter, _gather) if sequence else (_all_reduce, _same)
    local = x.chunk(RANKS, 1)[rank].contiguous() if sequence else x
    norms = [p for n, p in model.named_parameters() if "norm" in n]

    def forward(y: Tensor) -> Tensor:
        for block in model:
            for norm, inner in ((block.norm1, block.attention), (block.norm2, block.mlp)):
                h = _Collective.apply(norm(y), before, back_before)
                y = y + _Collective.apply(inner(h), after, back_after)
        return y

    def step() -> Tensor:
        model.zero_grad()
        loss = forward(local).square().sum() / x.numel()
        loss.backward()
        if sequence:
            flat = torch.cat([p.grad for p in norms if p.grad is not None])
            dist.all_reduce(flat)
            for p, grad in zip(norms, flat.split([p.numel() for p in norms]), strict=True):
                p.grad = grad
        return loss.detach()

    return step


_SENT: dict[str, Callable[[int, int], float]] = {
    "all_gather": lambda nbytes, n: nbytes * (n - 1),
    "allgather": lambda nbytes, n: nbytes * (n - 1),
    "reduce_scatter": lambda nbytes, n: nbytes * (n - 1) / n,
    "all_reduce": lambda nbytes, n: nbytes * 2 * (n - 1) / n,
    "allreduce": lambda nbytes, n: nbytes * 2 * (n - 1) / n,
    "all_to_all": lambda nbytes, n: nbytes * (n - 1) / n,
    "alltoall": lambda nbytes, n: nbytes * (n - 1) / n,
}


class Counting(TorchDispatchMode):
    """Counts the collectives of either kind, c10d's and functional ones, and the bytes that this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives, self.bytes = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            name = func._schema.name.split("::")[1].lstrip("_")
            kind = next((k for k in _SENT if name.startswith(k)), None)
            if kind is not None:
                # c10d's collectives write to their first argument, and read the second if there is one
                read = args[0] if func.namespace != "c10d" or kind == "allreduce" else args[1]
                self.collectives += 1
                self.bytes += _SENT[kind](sum(t.nbytes for t in _tensors(read)), RANKS)
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterable[Tensor]:
    return [value] if isinstance(value, Tensor) else value


@dataclass
class Measured:
    """Seconds, collectives and bytes of a step, and its loss, for each of the three programs."""

    seconds: list[float]
    collectives: list[int]
    bytes: list[float]
    losses: list[float]


def measure(width: int, length: int, batch: int, sequence: bool, repeat: int) -> Measured:
    """Run the three programs on this rank."""
    warnings.simplefilter("ignore", FutureWarning)  # names of collectives that torch 2.13 renamed
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(batch, length, width)
    steps = [
        by_hand(x, width, sequence),
        with_styles(torch_tensor, torch_parallel, _reduce_each, x, width, sequence),
        with_styles(shardwise, shardwise.parallel, _reduce_together, x, width, sequence),
    ]
    result = Measured([math.inf] * 3, [], [], [])
    for step in steps:
        loss = step()
        if sequence:
            loss = _all_reduce(loss)
        result.losses.append(float(loss))
        with Counting() as counted:
            step()
        result.collectives.append(counted.collectives)
        result.bytes.append(counted.bytes)
    for _ in range(repeat):
        for i, step in enumerate(steps):
            dist.barrier()
            start = time.perf_counter()
            step()
            result.seconds[i] = min(result.seconds[i], time.perf_counter() - start)
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 256, 512])
    options = parser.parse_args()
    print(
        "2 processes, 4 layers; times in ms; collectives and kB of one rank in one step: by hand / torch / ours"
    )
    print(
        f"{'':6}{'width':>6}{'by hand':>9}{'torch':>9}{'ours':>9}{'ours/hand':>11}{'ours/torch':>12}", end=""
    )
    print(f"{'collectives':>16}{'kB sent':>24}")
    sizes = {64: (16, 2), 256: (64, 4), 512: (128, 4)}
    with Workers(RANKS) as workers:
        for sequence in (False, True):
            for width in options.widths:
                length, batch = sizes.get(width, (64, 4))
                ranks = workers.run(measure, width, length, batch, sequence, options.repeat)
                hand, theirs, ours = (max(r.seconds[i] for r in ranks) * 1e3 for i in range(3))
                for r in ranks:
                    if not torch.allclose(torch.tensor(r.losses), torch.tensor(r.losses[0]), rtol=1e-4):
                        raise SystemExit(f"The three programs have different losses: {r.losses}")
                counts = " / ".join(map(str, ranks[0].collectives))
                sent = " / ".join(f"{b / 1e3:.0f}" for b in ranks[0].bytes)
                print(
                    f"{'TP+SP' if sequence else 'TP':6}{width:>6}{hand:>9.2f}{theirs:>9.2f}{ours:>9.2f}"
                    f"{ours / hand:>11.2f}{ours / theirs:>12.2f}{counts:>16}{sent:>24}"
                )


if __name__ == "__main__":
    main()
