"""The time of the first call of an op, with nothing cached: choosing the route, planning, compiling the recipe, running.

On a fake process group of 256 ranks in 1 to 4 axes, and of 16 and 4,096 ranks in 4 axes to show that the number of ranks
does not matter. Each repetition uses new sizes, so nothing that depends on a layout is cached; process groups exist, as
they do after the first step of any program. `--torch` adds torch's DTensor, which takes minutes.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.nn.functional import embedding, layer_norm, scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as ours

LIMIT = 5.0  # ms
MESHES = {16: [(2, 2, 2, 2)], 256: [(256,), (16, 16), (4, 8, 8), (4, 4, 4, 4)], 4096: [(8, 8, 8, 8)]}


def calls(lib: Any, mesh: Any, size: int) -> dict[str, Callable[[], Any]]:
    """The ops, on tensors in which the even mesh axes have one placement and the odd ones another."""
    sizes = tuple(mesh.shape)
    even, odd = math.prod(sizes[::2]), math.prod(sizes[1::2])
    shard, replicate = lib.Shard, lib.Replicate()

    def distribute(shape: tuple[int, ...], first: Any, second: Any, integers: bool = False) -> Any:
        placements = [(first, second)[i % 2] for i in range(len(sizes))]
        block = list(shape)
        for n, placement in zip(sizes, placements, strict=True):
            if placement.is_shard():
                block[placement.dim] //= n
        local = torch.zeros(block, dtype=torch.int64) if integers else torch.randn(block)
        return lib.DTensor.from_local(local, mesh, placements, run_check=False)

    rows = even * odd * size
    a, b = distribute((rows, 8), shard(0), replicate), distribute((rows, 8), replicate, shard(0))
    w, k = distribute((8, rows), replicate, shard(1)), distribute((8, rows), shard(1), shard(1))
    x, g = distribute((rows, 4, 8), shard(0), shard(0)), distribute((8,), replicate, replicate)
    q, v = (distribute((even * size, odd * 2, 2, 8), shard(0), second) for second in (shard(1), replicate))
    ids = distribute((rows, 2), replicate, shard(0), integers=True)
    return {
        "mm": lambda: a @ w,
        "mm, contracted": lambda: k @ b,
        "add": lambda: a + b,
        "layer_norm": lambda: layer_norm(x, (8,), g, g),
        "SDPA": lambda: scaled_dot_product_attention(q, q, v),
        "view": lambda: x.view(rows * 4, 8),
        "embedding": lambda: embedding(ids, a),
    }


def timed(lib: Any, mesh: Any, repeat: int) -> dict[str, float]:
    """The shortest of several first calls, in ms."""
    best: dict[str, float] = {}
    for number in range(repeat + 1):
        for name, call in calls(lib, mesh, number + 2).items():
            start = time.perf_counter()
            call()
            ms = (time.perf_counter() - start) * 1e3
            if number:  # the first one creates process groups
                best[name] = min(best.get(name, math.inf), ms)
    return best


def main() -> None:
    """Time all ops on all meshes; exit with 1 if one takes longer than the limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--torch", action="store_true", help="also time torch's DTensor, up to 2 axes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    worst = 0.0
    for world, shapes in MESHES.items():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        for shape in shapes:
            names = tuple("abcd"[: len(shape)])
            mesh = ours.init_device_mesh("cpu", shape, mesh_dim_names=names)
            mine = timed(ours, mesh, options.repeat)
            torchs = timed(theirs, mesh, 1) if options.torch and len(shape) < 3 else {}
            worst = max(worst, *mine.values())
            for name, ms in mine.items():
                torch_time = f"  torch {torchs[name]:8.1f}" if name in torchs else ""
                print(f"{world:5} ranks {'x'.join(map(str, shape)):9} {name:15} {ms:6.2f} ms{torch_time}")
        dist.destroy_process_group()
    print(f"\nworst {worst:.2f} ms; the limit is {LIMIT:.0f}")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
