"""The overhead of a cached op, relative to that of torch's DTensor.

The overhead is the time beyond that of the same op on a plain tensor of the block's shape. The three are interleaved in one
run, and each is the best of several. No op here communicates, so one process on a fake group is enough.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.nn.functional import gelu, layer_norm, linear, silu
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as ours

MESHES = ((2,), (2, 2))


def cases(lib: Any, mesh: Any, grad: bool) -> dict[str, Callable[[], Any]]:
    """The ops on tensors of a library, or on plain tensors if it is None."""

    def distribute(t: torch.Tensor, kind: str) -> Any:
        if lib is None:
            return t.clone().requires_grad_(grad and t.is_floating_point())
        first = {"S0": lib.Shard(0), "S1": lib.Shard(1), "R": lib.Replicate(), "P": lib.Partial()}[kind]
        placements = [first] + [lib.Replicate()] * (mesh.ndim - 1)
        x = lib.DTensor.from_local(t.clone(), mesh, placements)
        return x.detach().requires_grad_(grad and t.is_floating_point())

    a, b = distribute(torch.randn(8, 16), "S0"), distribute(torch.randn(8, 16), "S0")
    w, v = distribute(torch.randn(16, 16), "R"), distribute(torch.randn(16), "R")
    x3 = distribute(torch.randn(4, 8, 16), "S0")
    p = distribute(torch.randn(8, 16), "P")
    mask = distribute(torch.rand(8, 16) > 0.5, "S0")
    plain = a.detach().clone()
    local = torch.randn(8, 16, requires_grad=grad)
    params = [distribute(torch.randn(8, 16), "S0").detach().requires_grad_() for _ in range(4)]
    for q in params:
        q.grad = distribute(torch.randn(8, 16), "S0").detach()
    optimizer = torch.optim.AdamW(params, foreach=True)
    split = None if lib is None else [lib.Shard(0)] + [lib.Replicate()] * (mesh.ndim - 1)

    def round_trip() -> Any:
        return local * 1 if lib is None else lib.DTensor.from_local(local, mesh, split).to_local()

    return {
        "add": lambda: a + b,
        "mul scalar": lambda: a * 2.0,
        "add scalar": lambda: a + 1.0,
        "sub": lambda: a - b,
        "div": lambda: a / b,
        "neg": lambda: -a,
        "exp": lambda: a.exp(),
        "gelu": lambda: gelu(a),
        "silu": lambda: silu(a),
        "where": lambda: torch.where(mask, a, b),
        "compare": lambda: a > b,
        "mm": lambda: a @ w,
        "linear": lambda: linear(a, w, v),
        "linear 3-d": lambda: linear(x3, w),
        "view": lambda: x3.view(x3.shape[0], -1),
        "transpose": lambda: a.transpose(0, 1),
        "permute": lambda: x3.permute(0, 2, 1),
        "unsqueeze": lambda: a.unsqueeze(-1),
        "slice": lambda: a[:, 2:8],
        "select": lambda: a[:, 3],
        "cat": lambda: torch.cat([a, b], 1),
        "split": lambda: a.split(4, 1),
        "softmax": lambda: a.softmax(-1),
        "layer_norm": lambda: layer_norm(a, (16,), v, v),
        "sum": lambda: a.sum(),
        "sum dim": lambda: a.sum(1),
        "mean": lambda: a.mean(1),
        "cast": lambda: a.to(torch.float64),
        "clone": lambda: a.clone(),
        "detach": lambda: a.detach(),
        "in-place add": lambda: plain.add_(1.0),
        "partial neg": lambda: -p,
        "zeros_like": lambda: torch.zeros_like(a),
        "from_local to_local": round_trip,
        "AdamW foreach step": lambda: optimizer.step(),
    }


def seconds_per_call(fn: Callable[[], Any], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        fn()
    return (time.perf_counter() - start) / number


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    ratios = []
    print(f"{'op':22}{'mesh':8}{'grad':6}{'plain µs':>9}{'torch +µs':>11}{'ours +µs':>10}{'ratio':>8}")
    for shape in MESHES:
        mesh = (
            theirs.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
            if math.prod(shape) == 4
            else theirs.DeviceMesh("cpu", torch.arange(2))
        )
        for grad in (False, True):
            sets = [cases(lib, mesh, grad) for lib in (None, theirs, ours)]
            for name in sets[0]:
                if options.only and options.only not in name:
                    continue
                fns = [s[name] for s in sets]
                number = options.number // (10 if "step" in name else 1)
                try:
                    for fn in fns:
                        seconds_per_call(fn, 3)
                    with torch.set_grad_enabled(grad):
                        runs = [[seconds_per_call(fn, number) for fn in fns] for _ in range(options.repeat)]
                except Exception as error:
                    print(f"{name:22}{shape!s:8}{grad!s:6} {type(error).__name__}: {str(error)[:150]}")
                    continue
                plain, torchs, mine = (min(r[i] for r in runs) * 1e6 for i in range(3))
                ratio = (mine - plain) / (torchs - plain)
                ratios.append((ratio, name, shape, grad))
                print(
                    f"{name:22}{shape!s:8}{grad!s:6}{plain:>9.1f}{torchs - plain:>11.1f}{mine - plain:>10.1f}{ratio:>8.2f}"
                )
    positive = [max(r, 0.01) for r, *_ in ratios]
    mean = math.exp(sum(map(math.log, positive)) / len(positive))
    worst = max(ratios)
    print(
        f"\ngeometric mean {mean:.2f} over {len(ratios)}; worst {worst[0]:.2f} ({worst[1]}, {worst[2]}, grad={worst[3]})"
    )


if __name__ == "__main__":
    main()
