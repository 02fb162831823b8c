"""Comparing the blocks of all ranks before a tensor is made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import (
    Coord,
    PerRank,
    axes_of,
    bytes_of,
    coord_of,
    group_of,
    is_sparse,
    members_of,
    parts_of,
)
from shardwise.layout import Axes, Layout, LayoutError, Placement, Replicate, block_shape

__all__ = ["checked_shape", "found_shape"]

_MOST_DIMS = 16
_Row = tuple[int, ...]  # dtype, ndim, shape padded, digest of the bits


def checked_shape(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None
) -> tuple[int, ...]:
    """The global shape of the blocks of all ranks, after comparing them; every rank comes to the same verdict.

    Without `shape` it is found from the blocks, uneven ones too.
    """
    axes = axes_of(mesh)
    rows = _rows(local, mesh)
    if rows is None:
        return tuple(shape) if shape is not None else tuple(local.shape)
    first = next(iter(rows.values()))
    for coord, row in rows.items():
        if row[:2] != first[:2]:
            raise LayoutError(
                f"the block at {_at(axes, coord)} has another dtype or number of dims than the one at "
                f"{_at(axes, next(iter(rows)))}.",
                why="all blocks are parts of one tensor",
                fix="make them alike before from_local",
            )
    shapes = {c: row[2 : 2 + row[1]] for c, row in rows.items()}
    whole = tuple(shape) if shape is not None else _whole(shapes, axes, placements)
    _check_shapes(shapes, Layout.of(whole, axes, placements))
    _check_values({c: row[2 + _MOST_DIMS :] for c, row in rows.items()}, axes, placements)
    return whole


def found_shape(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The global shape of the blocks of all ranks, uneven ones too, whatever their values."""
    rows = _rows(local, mesh, values=False)
    if rows is None:
        return tuple(local.shape)
    axes = axes_of(mesh)
    shapes = {c: row[2 : 2 + row[1]] for c, row in rows.items()}
    whole = _whole(shapes, axes, placements)
    _check_shapes(shapes, Layout.of(whole, axes, placements))
    return whole


def _rows(local: Tensor, mesh: DeviceMesh, values: bool = True) -> dict[Coord, _Row] | None:
    if isinstance(local, PerRank):
        return {c: _row(local.of_rank(r), values) for r, c in members_of(mesh).items()}
    me = coord_of(mesh)
    if me is None:
        return None
    if members_of(mesh) and torch.distributed.get_backend() == "fake":
        return {c: _row(local, values) for c in members_of(mesh).values()}
    group = group_of(mesh, tuple(range(mesh.ndim)))
    mine = torch.tensor(_row(local, values), dtype=torch.int64, device=mesh.device_type)
    got = torch.ops._c10d_functional.all_gather_into_tensor(mine, len(group.peers), group.name)
    every = torch.ops._c10d_functional.wait_tensor(got).view(len(group.peers), -1).tolist()
    return {c: tuple(row) for c, row in zip(group.peers, every, strict=True)}


def _row(block: Tensor, values: bool) -> _Row:
    kind = int.from_bytes(hashlib.sha256(f"{block.dtype}{block.layout}".encode()).digest()[:4], "big")
    shape = (*block.shape, *(-1,) * (_MOST_DIMS - block.dim()))
    return (kind, block.dim(), *shape, *(_digest(block) if values else ()))


def _digest(block: Tensor) -> tuple[int, ...]:
    if block.is_meta:
        return (0,) * 4
    if is_sparse(block):
        parts = parts_of(block)
        shapes = torch.tensor([n for p in parts for n in p.shape])
        hashed = hashlib.sha256(b"".join(map(_bits, [shapes, *parts]))).digest()
    else:
        hashed = hashlib.sha256(_bits(block)).digest()
    return tuple(int.from_bytes(hashed[i : i + 8], "big", signed=True) for i in range(0, 32, 8))


def _bits(t: Tensor) -> bytes:
    return bytes_of(t.detach().reshape(-1)).cpu().numpy().tobytes()


def _whole(shapes: dict[Coord, _Row], axes: Axes, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The sum of the blocks along the axes that split each dim."""
    origin = (0,) * len(axes)
    first = shapes[origin]
    out = []
    for d in range(len(first)):
        on = [a for a, p in enumerate(placements) if p.is_shard(d) or p.is_shard(d - len(first))]
        line = [c for c in shapes if all(c[a] == 0 for a in range(len(axes)) if a not in on)]
        out.append(sum(shapes[c][d] for c in line))
    return tuple(out)


def _check_shapes(shapes: dict[Coord, _Row], layout: Layout) -> None:
    wrong = [(c, s) for c, s in shapes.items() if tuple(s) != block_shape(layout, c)]
    if wrong:
        some = "; ".join(f"{_at(layout.axes, c)} has {s}, not {block_shape(layout, c)}" for c, s in wrong[:4])
        raise LayoutError(
            f"the blocks do not make up {layout}: {some}{'; …' if len(wrong) > 4 else ''}.",
            why="blocks are cut as torch.chunk cuts: ceil-sized, the last ones smaller or empty",
            fix="cut them so, or distribute_tensor the whole tensor",
        )


def _check_values(digests: dict[Coord, _Row], axes: Axes, placements: Sequence[Placement]) -> None:
    for a, p in enumerate(placements):
        if not isinstance(p, Replicate):
            continue
        for coord, digest in digests.items():
            first = (*coord[:a], 0, *coord[a + 1 :])
            if digests[first] != digest:
                raise LayoutError(
                    f"the block at {_at(axes, coord)} differs from the one at {_at(axes, first)}.",
                    why=f"axis {axes.names[a]} is Replicate(), so all ranks along it hold the same values",
                    fix=f"use Partial() or Shard(dim) on {axes.names[a]}, or make the blocks equal",
                )


def _at(axes: Axes, coord: Coord) -> str:
    return "(" + ", ".join(f"{n}={c}" for n, c in zip(axes.names, coord, strict=True)) + ")"
