"""Comparing ranks, in programs that may differ between them: the structure of modules, plain parameters, what is communicated for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, coord_of, is_simulated
from shardwise.comm.mesh import group_of
from shardwise.layout import LayoutError
from shardwise.parallel.module_tensors import slots_of
from shardwise.tensor.consistency import check_equal
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.errors import PlainTensorError
from shardwise.torch_internals.collectives import own_collectives
from shardwise.torch_internals.graph_calls import call_while_tracing
from shardwise.torch_internals.process_groups import resolve_group

__all__ = ["check_plain_parameters", "check_ranks", "compare_ranks", "read_alike"]

T = TypeVar("T")

_COMPARED = "_shardwise_compared"
_checking: ContextVar[bool] = ContextVar("shardwise_check_ranks", default=False)


@contextmanager
def check_ranks() -> Iterator[None]:
    """Compare the ranks before each collective of data-parallel modules: a rank that skips a module is an error on all ranks.

    Without it such a rank may wait for the others until the process group times out, if they are on several machines. It sends
    a line of text per rank before each gather and each reduction: for finding a fault, not for training.

    Raises:
        RuntimeError: at the first collective in which ranks differ, on all ranks, with what each of them is about to do.
    """
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def compare_ranks(mesh: DeviceMesh, what: str) -> None:
    """Raise on all ranks of the mesh if they are about to do different things; without effect outside of `check_ranks`."""
    if not _checking.get() or is_simulated():  # which runs one program for all ranks
        return
    found = _texts(mesh, what)
    if len(set(found.values())) > 1:
        shown = "\n".join(f"    rank {rank}: {text}" for rank, text in found.items())
        raise RuntimeError(
            f"The ranks of a data-parallel model are about to communicate for different modules:\n{shown}\n"
            "  why: A rank called other modules than the others, or in another order, or has no gradients for some of them.\n"
            "  fix: Call the same modules on all ranks; for parameters that some ranks do not use, "
            "model.set_reduce_scatter_unused_params(True)."
        )


@call_while_tracing
def check_plain_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise on all ranks alike if a plain parameter, added after the module was parallelized, differs between ranks.

    Each parameter is compared once, by a small all-gather.
    """
    if is_simulated() or mesh.size() == 1:
        return
    for p in module.parameters():
        # the id, because a copy has the attributes of the original
        if isinstance(p, DTensor) or getattr(p, _COMPARED, None) == id(p):
            continue
        try:
            check_equal(p.detach(), mesh, "A module")
        except PlainTensorError as error:
            name = next(n for n, other in module.named_parameters() if other is p)
            raise PlainTensorError(
                f"The plain parameter {name} of a parallelized module differs between ranks.",
                why="A parameter that was added after parallelize_module counts as replicated, so every rank must hold the "
                "same values.",
                fix="Initialise it alike: torch.manual_seed(0) before it is created, or add it before parallelize_module, "
                "which takes the values of one rank.",
            ) from error
        setattr(p, _COMPARED, id(p))


def read_alike(read: Callable[[], T], module: nn.Module, mesh: DeviceMesh, what: str, plan: str = "") -> T:
    """The result of a function that checks a module, after the ranks have compared their modules and what the check found.

    A check that fails on some ranks only is an error on all of them, where the others would wait for the failed ones. It sends
    one small all-gather; the names are exchanged only if they differ.
    """
    try:
        result = read()
    except LayoutError as error:
        _check_same_structure(module, mesh, what, plan, str(error))
        raise
    _check_same_structure(module, mesh, what, plan, "")
    return result


def _check_same_structure(module: nn.Module, mesh: DeviceMesh, what: str, plan: str, problem: str) -> None:
    """Raise on all ranks alike if the ranks of a mesh have modules of different structure, plans or problems."""
    if is_simulated() or mesh.size() == 1 or coord_of(mesh) is None:
        return
    lines = [f"{s.full_name}: {tuple(s.tensor.shape)} {s.tensor.dtype}" for s in slots_of(module)]
    lines += [f"the {name}: {text}" for name, text in (("plan", plan), ("problem", problem)) if text]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=mesh.device_type)
    try:
        check_equal(mine, mesh, what)
    except PlainTensorError as error:
        # they know that they differ, and exchange all lines
        (first, text), *others = ((r, set(t.split("\n"))) for r, t in _texts(mesh, "\n".join(lines)).items())
        rank, other = next(pair for pair in others if pair[1] != text)
        ours, theirs = (sorted(a - b)[:3] for a, b in ((text, other), (other, text)))
        raise LayoutError(
            f"{what} got modules of different structure: rank {first} has {ours or 'nothing more'}, "
            f"rank {rank} has {theirs or 'nothing more'}.",
            why=f"All ranks of the mesh ({axes_of(mesh)}) hold parts of the same parameters.",
            fix="Build the module from the same configuration on every rank.",
        ) from error


def _texts(mesh: DeviceMesh, mine: str) -> dict[int, str]:
    """A text of each rank of a mesh."""
    group = group_of(mesh, tuple(range(mesh.ndim)))
    every = [""] * len(group.ranks)
    with own_collectives():
        dist.all_gather_object(every, mine, group=resolve_group(group.name))
    return dict(zip(group.ranks, every, strict=True))
