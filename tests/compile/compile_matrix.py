"""Running the matrix: each program eagerly and compiled, on a mesh of real processes.

python -m tests.compile.compile_matrix [--backend aot_eager] [program ...]
"""

import argparse
import logging
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from tests.compile.matrix import BREAKS, GRAPHS, PROGRAMS
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.comm.launch import Workers

BACKENDS = ("eager", "aot_eager", "inductor")


def dense(value):
    """A result as values that can be compared: the layout and the numbers."""
    if isinstance(value, sw.DTensor):
        return (value.placements, tuple(value.shape), value.full_tensor().detach().clone())
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def run(fn, args):
    """What a function returns, and the gradients with respect to its arguments and parameters."""
    sw.manual_seed(7)
    out = fn(*args)
    leaves = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    inputs = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
    if isinstance(fn, torch.nn.Module):
        inputs += [p for p in fn.parameters() if p.requires_grad]
    if leaves:
        loss = sum(t.float().square().mean() for t in leaves[:2])
        (loss.full_tensor() if isinstance(loss, sw.DTensor) else loss).backward()
    # gradients may have any layout, which follows from the ops that a compiler makes of the program
    grads = [t.grad.full_tensor() if isinstance(t.grad, sw.DTensor) else t.grad for t in inputs]
    found = [dense(t) for t in pytree.tree_leaves(out)] + [dense(t) for t in grads]
    return found, sw.rand(3)


def differences(expected, got):
    """What differs between two results, as text."""
    found = []
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        if type(a) is not type(b):
            found.append(f"{i}: {type(a).__name__} and {type(b).__name__}")
            continue
        if isinstance(a, tuple):
            if a[:2] != b[:2]:
                found.append(f"{i}: {a[:2]} and {b[:2]}")
                continue
            a, b = a[2], b[2]
        if isinstance(a, torch.Tensor):
            tolerance = 1e-5 if a.dtype in (torch.float32, torch.float64) else 2e-2
            if a.dtype != b.dtype or a.shape != b.shape:
                found.append(f"{i}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}")
            elif not torch.allclose(a.double(), b.double(), tolerance, tolerance, equal_nan=True):
                found.append(f"{i}: differs by {(a.double() - b.double()).abs().max()}")
        elif a != b:
            found.append(f"{i}: {a!r} and {b!r}")
    return found


def check(name, backend, repeat=2):
    """`ok`, or what is wrong with a program compiled by a backend."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return check_on(mesh, name, backend, repeat)


def check_on(mesh, name, backend, repeat=2):
    make = PROGRAMS[name]
    fn, args = make(mesh)
    expected, after = zip(*[run(fn, args) for _ in range(repeat)], strict=True)
    fn, args = make(mesh)
    counter = CompileCounterWithBackend(backend)
    fullgraph = name not in BREAKS
    compiled = torch.compile(fn, backend=counter, fullgraph=fullgraph)
    try:
        found, position = zip(*[run(compiled, args) for _ in range(repeat)], strict=True)
    except Exception as error:
        return f"error: {describe(error)}"
    wrong = [d for a, b in zip(expected, found, strict=True) for d in differences(a, b)]
    wrong += [
        "the stream is elsewhere" for a, b in zip(after, position, strict=True) if not torch.equal(a, b)
    ]
    if wrong:
        return f"wrong: {'; '.join(wrong)}"
    graphs = GRAPHS.get(name, 1)
    if counter.frame_count != graphs:
        return f"{counter.frame_count} graphs instead of {graphs}"
    return "ok"


def describe(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' / '.join(lines[:6])[:700]} ({where.name}:{where.lineno})"


def check_all(names, backend):
    logging.disable(logging.WARNING)
    return {name: check(name, backend) for name in names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="aot_eager", choices=BACKENDS)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    good = 0
    with Workers(2, timeout=600) as team:
        for name in given.names or PROGRAMS:
            try:
                answers = [a[name] for a in team.run(check_all, [name], given.backend)]
            except Exception as error:
                answers = [f"died: {str(error)[:300]}"]
            good += answers == ["ok"] * len(answers)
            sys.stdout.write(f"{name}: {' | '.join(dict.fromkeys(answers))}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{good} of {len(given.names or PROGRAMS)}\n")
