"""Comparing the structure of a module between ranks, before it is distributed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
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

__all__ = ["check_plain_parameters", "check_same_structure", "read_alike"]

T = TypeVar("T")

_COMPARED = "_shardwise_compared"


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

    A check that fails on some ranks only is an error on all of them, where the others would wait for the failed ones.
    """
    try:
        result = read()
    except LayoutError as error:
        check_same_structure(module, mesh, what, plan, str(error))
        raise
    check_same_structure(module, mesh, what, plan)
    return result


def check_same_structure(
    module: nn.Module, mesh: DeviceMesh, what: str, plan: str = "", problem: str = ""
) -> None:
    """Raise on all ranks alike if the ranks of a mesh have modules of different structure, plans or problems.

    It sends one small all-gather; the names are exchanged only if they differ.
    """
    if is_simulated() or mesh.size() == 1 or coord_of(mesh) is None:
        return
    lines = [f"{s.full_name}: {tuple(s.tensor.shape)} {s.tensor.dtype}" for s in slots_of(module)]
    if plan:
        lines.append(f"the plan: {plan}")
    if problem:
        lines.append(f"the problem: {problem}")
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=mesh.device_type)
    try:
        check_equal(mine, mesh, what)
    except PlainTensorError as error:
        raise _difference(lines, mesh, what) from error


def _difference(lines: list[str], mesh: DeviceMesh, what: str) -> LayoutError:
    """The error, with the first line that differs; the ranks know that they differ and exchange all lines."""
    group = group_of(mesh, tuple(range(mesh.ndim)))
    every: list[list[str]] = [[] for _ in group.ranks]
    by_name = next(g for g in _groups(mesh) if dist.get_process_group_ranks(g) == list(group.ranks))
    with own_collectives():
        dist.all_gather_object(every, lines, group=by_name)
    first = every[0]
    rank = next(i for i, other in enumerate(every) if other != first)
    ours, theirs = (sorted(set(a) - set(b))[:3] for a, b in ((first, every[rank]), (every[rank], first)))
    return LayoutError(
        f"{what} got modules of different structure: rank {group.ranks[0]} has {ours or 'nothing more'}, "
        f"rank {group.ranks[rank]} has {theirs or 'nothing more'}.",
        why=f"All ranks of the mesh ({axes_of(mesh)}) hold parts of the same parameters.",
        fix="Build the module from the same configuration on every rank.",
    )


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    return [*(mesh.get_all_groups()), dist.group.WORLD]  # type: ignore[list-item]
