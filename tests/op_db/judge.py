"""The verdicts on one op's samples in `op_db`: each on drawn layouts, results and gradients against dense."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from tests.op_db.verdict import Verdict, check
from torch.testing._internal.common_methods_invocations import op_db

import shardwise as sw

__all__ = ["DTYPES", "KINDS", "OPS", "Tally", "sweep_op"]

MESHES = ((2,), (3,), (2, 2))
DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool", "bfloat16", "complex64")
JUDGED = ("float32", "int64")  # what could have stayed split is much the same in the others
OPS = {op.full_name: op for op in op_db}
KINDS = ("right", "rounded", "wrong", "error", "skipped")


@dataclass
class Tally:
    """What came of an op's samples in one dtype."""

    op: str
    dtype: str
    kinds: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    whys: list[tuple[str, int, str]] = field(
        default_factory=list
    )  # verdict, number of the sample, what was seen
    cheaper: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, number: int, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        self.routes += verdict.routes
        self.cheaper |= verdict.cheaper
        if verdict.kind != "right":
            self.whys.append((verdict.kind, number, verdict.why))


def sweep_op(
    name: str, dtype: str, most: int | None, seed: str, number: int | None = None, judge: bool = True
) -> Tally:
    """The verdicts on an op's samples in a dtype: all, at most so many drawn ones, or one by its number."""
    op, tally, start = OPS[name], Tally(name, dtype), time.perf_counter()
    torch.manual_seed(0)
    samples = list(enumerate(op.sample_inputs("cpu", getattr(torch, dtype), requires_grad=False)))
    draw = random.Random(f"{seed} {name} {dtype}")
    if number is not None:
        samples = samples[number : number + 1]
    elif most is not None and most < len(samples):
        samples = sorted(draw.sample(samples, most), key=lambda s: s[0])
    for at, sample in samples:
        # a sample's draws are its own, so that one can be looked at alone
        mine = random.Random(f"{seed} {name} {dtype} {at}")
        torch.manual_seed(at)
        shape = mine.choice(MESHES)
        with sw.simulate(math.prod(shape)):
            mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
            tally.add(at, check(op, sample, mesh, mine, judge and dtype in JUDGED))
    tally.seconds = time.perf_counter() - start
    return tally
