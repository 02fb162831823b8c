"""The collectives that compiled programs run on each rank of a mesh, recorded without the other ranks.

Each rank of a fake mesh compiles the programs of the matrix and runs them, forward and backward. Collectives are replaced by
functions that note the call and return zeros: nothing can hang, and the notes of all ranks are compared.

python -m tests.compile.collective_sequences [--backend inductor] [--ranks 3] [program ...]
"""

import argparse
import logging
import sys
import warnings
from contextlib import contextmanager
from typing import NamedTuple

import torch
from tests.compile.compile_matrix import run
from tests.compile.matrix import BREAKS, PROGRAMS

import shardwise as sw

NOT_ON_3 = frozenset({"tp_mlp_with_sequence_parallel", "tp_attention_block"})
"""Programs whose code reads sizes of blocks, and expects equal ones."""


class Seen(NamedTuple):
    """A collective as one rank sees it."""

    kind: str
    group: str
    dtype: torch.dtype
    sizes: tuple
    """What all ranks must have alike; of an all-to-all what is received from and sent to each rank."""


@contextmanager
def noted_collectives():
    """The collectives inside the block, as a list of `Seen`; their results are zeros."""
    seen = []

    def note(kind, x, group, *sizes):
        seen.append(Seen(kind, group, x.dtype, sizes))

    def all_to_all(x, receive, send, group):
        note("all_to_all", x, group, tuple(receive), tuple(send))
        return x.new_zeros(sum(receive), *x.shape[1:])

    def all_reduce(x, op, group):
        note("all_reduce", x, group, op, tuple(x.shape))
        return x.clone()

    def all_reduce_(x, op, group):
        note("all_reduce", x, group, op, tuple(x.shape))
        return x

    def all_gather(x, size, group):
        note("all_gather", x, group, tuple(x.shape))
        return x.new_zeros(x.shape[0] * size, *x.shape[1:])

    def all_gather_out(x, size, group, *, out):
        note("all_gather", x, group, tuple(x.shape))
        return out.zero_()

    def reduce_scatter(x, op, size, group):
        note("reduce_scatter", x, group, op, tuple(x.shape))
        return x.new_zeros(x.shape[0] // size, *x.shape[1:])

    def broadcast(x, source, group):
        note("broadcast", x, group, source, tuple(x.shape))
        return torch.zeros_like(x)

    kernels = {
        "all_to_all_single": all_to_all,
        "all_reduce": all_reduce,
        "all_reduce_": all_reduce_,
        "all_gather_into_tensor": all_gather,
        "all_gather_into_tensor_out": all_gather_out,
        "reduce_scatter_tensor": reduce_scatter,
        "broadcast": broadcast,
    }
    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
        yield seen


def sequence(make, backend, rank, ranks, fullgraph=True):
    """What one rank runs in a program, forward and backward."""
    torch._dynamo.reset()
    with sw.compile.fake_mesh((ranks,), ("tp",), rank=rank) as mesh, noted_collectives() as seen:
        fn, args = make(mesh)
        del seen[:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own code while it traces
            run(torch.compile(fn, backend=backend, fullgraph=fullgraph), args)
        return list(seen)


def mismatch(sequences):
    """What differs between the sequences of ranks, as text; None if nothing does."""
    if len({len(s) for s in sequences}) > 1:
        return f"numbers of collectives {[len(s) for s in sequences]}"
    for i, calls in enumerate(zip(*sequences, strict=True)):
        if len({c[:3] for c in calls}) > 1:
            return f"collective {i}: {calls}"
        if calls[0].kind != "all_to_all":
            if len({c.sizes for c in calls}) > 1:
                return f"collective {i}: {calls}"
        elif any(a.sizes[1][q] != b.sizes[0][p] for p, a in enumerate(calls) for q, b in enumerate(calls)):
            return f"collective {i}: {calls}"
    return None


def compare(name, backend, ranks):
    """What differs between ranks in a program of the matrix, and the number of its collectives."""
    make, whole = PROGRAMS[name], name not in BREAKS
    sequences = [sequence(make, backend, r, ranks, whole) for r in range(ranks)]
    return mismatch(sequences), len(sequences[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    good = 0
    logging.disable(logging.WARNING)
    for name in given.names or PROGRAMS:
        try:
            found, count = compare(name, given.backend, given.ranks)
        except Exception as error:
            found, count = f"{type(error).__name__}: {str(error)[:400]}", 0
        good += found is None
        sys.stdout.write(f"{name}: {found or f'ok, {count}'}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{good} of {len(given.names or PROGRAMS)}\n")
