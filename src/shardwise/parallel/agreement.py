"""Comparing the structure of a module between ranks, before it is distributed."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, coord_of, is_simulated
from shardwise.comm.mesh import group_of
from shardwise.layout import LayoutError
from shardwise.parallel.module_tensors import slots_of
from shardwise.tensor.consistency import check_equal
from shardwise.tensor.errors import PlainTensorError

__all__ = ["check_same_structure"]


def check_same_structure(module: nn.Module, mesh: DeviceMesh, what: str, plan: str = "") -> None:
    """Raise on all ranks alike if the ranks of a mesh have modules of different structure or different plans.

    It sends one small all-gather; the names are exchanged only if they differ.
    """
    if is_simulated() or mesh.size() == 1 or coord_of(mesh) is None:
        return
    lines = [f"{s.full_name}: {tuple(s.tensor.shape)} {s.tensor.dtype}" for s in slots_of(module)]
    if plan:
        lines.append(f"the plan: {plan}")
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
