"""Compare an op's samples in `op_db`, in random layouts, with the dense results and gradients."""

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

__all__ = ["DTYPES", "DTYPES_OF", "KINDS", "OPS", "Tally", "sweep_op"]

MESHES = ((2,), (3,), (2, 2))
DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool", "bfloat16", "complex64")
SPLITS_SOUGHT_IN = ("float32", "int64")  # which splits are possible hardly depends on the dtype
OPS = {op.full_name: op for op in op_db}
DTYPES_OF = {
    name: dtypes
    for name, op in OPS.items()
    if not name.startswith("jiterator_")  # these are compiled for CUDA only
    and (dtypes := [d for d in DTYPES if getattr(torch, d) in op.supported_dtypes("cpu")])
}
"""The dtypes of each op that runs on a CPU; samples of it do in each of them."""
KINDS = ("right", "rounded", "wrong", "error", "skipped")


@dataclass
class Tally:
    """The verdicts on an op's samples in one dtype.

    `whys` has the verdict, the number of the sample and the difference, for each sample that was not right.
    """

    op: str
    dtype: str
    kinds: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    whys: list[tuple[str, int, str]] = field(default_factory=list)
    missed_splits: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, number: int, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        self.routes += verdict.routes
        self.missed_splits |= verdict.missed_splits
        if verdict.kind != "right":
            self.whys.append((verdict.kind, number, verdict.why))

    @property
    def compared(self) -> int:
        """How many samples were compared with the dense op."""
        return self.kinds.total() - self.kinds["skipped"]


def sweep_op(
    name: str, dtype: str, most: int | None, seed: str, number: int | None = None, find_splits: bool = True
) -> Tally:
    """Compare samples of an op in a dtype.

    Args:
        most: compare at most so many samples, chosen at random; those that fail on one device do not count.
        number: compare only the sample of this number.
        find_splits: look for splits that a fallback could have kept.
    """
    op, tally, start = OPS[name], Tally(name, dtype), time.perf_counter()
    torch.manual_seed(0)
    samples = list(enumerate(op.sample_inputs("cpu", getattr(torch, dtype), requires_grad=False)))
    if number is not None:
        samples = samples[number : number + 1]
    elif most is not None:
        samples = random.Random(f"{seed} {name} {dtype}").sample(samples, len(samples))
    for at, sample in samples:
        if tally.compared == most:
            break
        # each sample has its own seed, so that it can be repeated alone
        draw = random.Random(f"{seed} {name} {dtype} {at}")
        torch.manual_seed(at)
        shape = draw.choice(MESHES)
        with sw.simulate(math.prod(shape)):
            mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
            tally.add(at, check(op, sample, mesh, draw, find_splits and dtype in SPLITS_SOUGHT_IN))
    tally.seconds = time.perf_counter() - start
    return tally
