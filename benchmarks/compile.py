"""Compiled training steps on 2 real processes: ours, torch's DTensor, and collectives by hand; and how long captures take.

A step is forward, loss, backward, all gradients reduced, and AdamW, of the transformer of `benchmarks.train` under TP and TP+SP. The
hand-written code has plain tensors and functional collectives. It is captured and compiled as ours is, as one graph with inductor.
Torch's DTensor runs under `torch.compile`, and so does its optimizer. All are interleaved; each time is the best of several.

python -m benchmarks.compile                       all of it (about 10 minutes)
python -m benchmarks.compile --only capture
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.nn import functional

import benchmarks.train as eager
import shardwise as sw
import shardwise.parallel
from benchmarks.train import RANKS, _Collective, plan, stack
from shardwise.comm.launch import Workers
from shardwise.compile import FAST, capture, fake_mesh, whole_step
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

NAMES = (
    "hand eager",
    "hand inductor",
    "ours eager",
    "ours fx",
    "ours inductor",
    "torch eager",
    "torch inductor",
)


def _all_reduce(x: Tensor) -> Tensor:
    return functional_collectives.wait_tensor(
        functional_collectives.all_reduce(x.contiguous(), "sum", dist.group.WORLD)
    )


def _gather(x: Tensor) -> Tensor:
    out = functional_collectives.all_gather_tensor(x.contiguous(), 0, dist.group.WORLD)
    out = functional_collectives.wait_tensor(out)
    return out.unflatten(0, (RANKS, -1)).movedim(0, 1).flatten(1, 2)


def _scatter(x: Tensor) -> Tensor:
    parts = x.unflatten(1, (RANKS, -1)).movedim(1, 0).flatten(0, 1)
    out = functional_collectives.reduce_scatter_tensor(parts.contiguous(), "sum", 0, dist.group.WORLD)
    return functional_collectives.wait_tensor(out)


class ByHand(nn.Module):
    """The stack with explicit collectives on plain tensors."""

    def __init__(self, width: int, sequence: bool) -> None:
        super().__init__()
        self.blocks = stack(width)
        rank = dist.get_rank()
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                dim = 1 if name.endswith(("o", "down")) else 0
                module.weight = nn.Parameter(module.weight.detach().chunk(RANKS, dim)[rank].clone())
        self.before, self.after = (_gather, _scatter) if sequence else (eager._same, _all_reduce)
        self.back_before, self.back_after = (_scatter, _gather) if sequence else (_all_reduce, eager._same)

    def forward(self, y: Tensor) -> Tensor:
        for block in self.blocks:
            for norm, inner in ((block.norm1, block.attention), (block.norm2, block.mlp)):
                h = _Collective.apply(norm(y), self.before, self.back_before)
                y = y + _Collective.apply(inner(h), self.after, self.back_after)
        return y


def _loss(model: nn.Module, x: Tensor, size: int) -> Tensor:
    return model(x).square().sum() / size  # type: ignore[no-any-return]


def _by_hand(x: Tensor, width: int, sequence: bool, backend: str) -> Any:
    model = ByHand(width, sequence)
    local = x.chunk(RANKS, 1)[dist.get_rank()].contiguous() if sequence else x
    norms = [p for n, p in model.named_parameters() if "norm" in n]

    def loss_of(model: nn.Module, local: Tensor) -> Tensor:
        return _loss(model, local, x.numel())

    optimizer = torch.optim.AdamW(model.parameters())
    if sequence:
        optimizer.register_step_pre_hook(partial(_reduce_norms, norms))
    return _driver(model, optimizer, loss_of, local, backend)


def _reduce_norms(norms: list[Tensor], *_: Any) -> None:
    flat = _all_reduce(torch.cat([p.grad for p in norms if p.grad is not None]))
    for p, grad in zip(norms, flat.split([p.numel() for p in norms]), strict=True):
        p.grad = grad


def _driver(model: nn.Module, optimizer: Any, loss_of: Any, x: Tensor, backend: str) -> Any:
    step = whole_step(model, optimizer, loss_of, backend="fx" if backend == "eager" else backend, passes=FAST)
    if backend == "eager":
        step._find = lambda *_: None  # type: ignore[method-assign, assignment, return-value]

    def run() -> Any:
        return step(x)

    run.step = step  # type: ignore[attr-defined]
    return run


def _ours(x: Tensor, width: int, sequence: bool, backend: str) -> Any:
    mesh = sw.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model = parallelize_module(stack(width), mesh, plan(sw, shardwise.parallel, sequence))
    local = x.chunk(RANKS, 1)[dist.get_rank()].contiguous() if sequence else x

    def loss_of(model: nn.Module, local: Tensor) -> Tensor:
        return _loss(model, local, x.numel())

    return _driver(model, torch.optim.AdamW(model.parameters()), loss_of, local, backend)


def _torchs(x: Tensor, width: int, sequence: bool, backend: str) -> Any:
    mesh = torch_tensor.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model = torch_parallel.parallelize_module(
        stack(width), mesh, plan(torch_tensor, torch_parallel, sequence)
    )
    local = x.chunk(RANKS, 1)[dist.get_rank()].contiguous() if sequence else x
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # which mixes DTensors and plain tensors
    forward, update = model, optimizer.step
    if backend == "inductor":
        forward, update = torch.compile(model), torch.compile(optimizer.step)

    def run() -> Tensor:
        loss = forward(local).square().sum() / x.numel()
        loss.backward()
        pending = [p for p in model.parameters() if any(q.is_partial() for q in eager._placements(p.grad))]
        for p, grad in zip(pending, eager._reduce_each([p.grad for p in pending]), strict=True):
            p.grad = grad
        update()
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return run


def _programs(x: Tensor, width: int, sequence: bool) -> dict[str, Any]:
    make = {"hand": _by_hand, "ours": _ours, "torch": _torchs}
    return {name: make[name.split()[0]](x, width, sequence, name.split()[1]) for name in NAMES}


def measure(width: int, length: int, batch: int, sequence: bool, repeat: int) -> dict[str, Any]:
    """Seconds per step of all programs on this rank, their losses, and the collectives of the captured ones."""
    warnings.simplefilter("ignore")
    torch.compiler.reset()  # else sizes that differ from those of the last call become symbols, too deep for torch's DTensor
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(batch, length, width)
    programs = _programs(x, width, sequence)
    seconds, losses = dict.fromkeys(NAMES, math.inf), {}
    for name, run in programs.items():
        for _ in range(3):
            loss = run()
        loss = loss.to_local() if hasattr(loss, "to_local") else loss
        losses[name] = float(_all_reduce(loss.detach().clone()) if sequence else loss)
    for _ in range(repeat):
        for name, run in programs.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    counts = {
        n: len(programs[n].step.programs[0].collectives)
        if programs[n].step.programs
        else programs[n].step.reason
        for n in ("hand inductor", "ours inductor")
    }
    return {"seconds": seconds, "losses": losses, "collectives": counts}


def first_step(which: str, width: int, sequence: bool) -> float:
    """Seconds until a compiled program has taken its first step, on this rank; the optimizer has a state already."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(2, 16, width)
    run = (_ours if which == "ours" else _torchs)(x, width, sequence, "inductor")
    start = time.perf_counter()
    for _ in range(2):
        run()
    return time.perf_counter() - start


class _Layer(nn.Module):
    def __init__(self, width: int, head: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.head = nn.RMSNorm(width), nn.RMSNorm(width), head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class _Model(nn.Module):
    def __init__(self, layers: int, width: int, head: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Layer(width, head, inner) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def capture_seconds(shape: tuple[int, int], sizes: tuple[int, ...], length: int) -> tuple[float, int]:
    """Seconds to capture a step under FSDP and TP on a mesh that is not there, and the number of nodes."""
    with fake_mesh(shape, ("dp", "tp")) as mesh:
        with torch.device("meta"):
            model, x = _Model(*sizes), torch.empty(1, length, dtype=torch.int64)
        out: Any = {"use_local_output": False}
        styles: dict[str, Any] = {
            f"layers.*.{n}": ColwiseParallel(**out) for n in ("q", "k", "v", "gate", "up")
        }
        styles |= {f"layers.*.{n}": RowwiseParallel(**out) for n in ("o", "down")}
        whole = sw.Replicate()
        styles["embedding"] = RowwiseParallel(input_layouts=whole, output_layouts=whole, **out)
        styles["output"] = ColwiseParallel(**out)
        sw.distribute_module(parallelize_module(model, mesh["tp"], styles), mesh["tp"])
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: Tensor) -> Tensor:
            with sw.policy(plain="replicate"):
                loss = functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        start = time.perf_counter()
        program = capture(step, x, optimizer=optimizer, modules=[model])
        return time.perf_counter() - start, len(program.graph.nodes)


def print_captures() -> None:
    """Print how long captures take."""
    small, best = (4, 512, 64, 1024, 1024), {}
    for _ in range(4):
        for shape in ((2, 2), (512, 2)):
            seconds, nodes = capture_seconds(shape, small, 128)
            best[shape] = (min(seconds, best.get(shape, (math.inf, 0))[0]), nodes)
    (few, few_nodes), (many, many_nodes) = best.values()
    print(f"capture of 4 layers, FSDP and TP: {few:.2f} s on 4 ranks, {many:.2f} s on 1,024 (target 3 s)")
    print(
        f"  1,024 against 4 ranks: {many / few:.2f} x the time (target 1.2), {many_nodes / few_nodes:.2f} x the nodes"
    )
    seconds, nodes = capture_seconds((16, 8), (32, 4096, 128, 11008, 32000), 4096)
    print(
        f"capture of 32 layers of 7B parameters on 128 ranks: {seconds:.1f} s (target 20 s), {nodes:,} nodes"
    )


def print_steps(widths: list[int], repeat: int) -> None:
    """Print the times of steps."""
    sizes = {64: (16, 2), 256: (64, 4)}
    print(f"{'ms per step':12}{'width':>6}" + "".join(f"{n:>16}" for n in NAMES))
    with Workers(RANKS) as workers:
        for sequence in (False, True):
            for width in widths:
                ranks = workers.run(measure, width, *sizes.get(width, (64, 4)), sequence, repeat)
                t = {n: max(r["seconds"][n] for r in ranks) * 1e3 for n in NAMES}
                print(
                    f"{'TP+SP' if sequence else 'TP':12}{width:>6}" + "".join(f"{t[n]:16.2f}" for n in NAMES)
                )
                losses = torch.tensor(list(ranks[0]["losses"].values()))
                if not torch.allclose(losses, losses[0], rtol=1e-3):
                    raise SystemExit(f"The programs have different losses: {ranks[0]['losses']}")
                print(
                    f"  ours/hand, inductor {t['ours inductor'] / t['hand inductor']:.2f} (target 1.05)"
                    f"; ours/torch, inductor {t['ours inductor'] / t['torch inductor']:.2f} (target 0.95)"
                    f"; fx/eager {t['ours fx'] / t['ours eager']:.2f} (target 0.7 at small sizes)"
                    f"; collectives {ranks[0]['collectives']}",
                    flush=True,
                )


def print_compile_times() -> None:
    """Print how long it takes to compile, without and with what inductor keeps from another process."""
    found = {}
    for which in ("ours", "torch"):
        with tempfile.TemporaryDirectory() as kept:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = kept
            for state in ("cold", "warm"):
                with Workers(RANKS) as workers:
                    found[which, state] = max(workers.run(first_step, which, 64, True))
    for state in ("cold", "warm"):
        ours, theirs = found["ours", state], found["torch", state]
        print(
            f"two steps, {state}: ours {ours:.1f} s, torch {theirs:.1f} s, {ours / theirs:.2f} x (target 1)",
            flush=True,
        )


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--only", choices=["capture", "steps", "compile"])
    options = parser.parse_args()
    if options.only in (None, "capture"):
        print_captures()
    if options.only in (None, "steps"):
        print_steps(options.widths, options.repeat)
    if options.only in (None, "compile"):
        print_compile_times()


if __name__ == "__main__":
    main()
