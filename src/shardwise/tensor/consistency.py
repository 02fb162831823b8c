"""Comparing the local tensors of all ranks, before they count as blocks of one tensor or as replicated."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import Coord, PerRank, Sent, axes_of, coord_of, is_sparse, members_of, parts_of
from shardwise.comm.codec import bytes_of
from shardwise.comm.ledger import is_counting, record
from shardwise.comm.mesh import group_of
from shardwise.layout import Axes, Layout, LayoutError, Placement, Replicate, block_shape
from shardwise.tensor.errors import PlainTensorError
from shardwise.torch_internals.collectives import all_gather, wait
from shardwise.torch_internals.tracing import is_recorded

__all__ = ["check_equal", "checked_shape", "digest_bytes"]

_MAX_DIMS = 16
_Row = tuple[int, ...]  # dtype, ndim, shape padded to _MAX_DIMS, digest of the values


def checked_shape(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None = None,
    *,
    values: bool = True,
) -> tuple[int, ...]:
    """The global shape of the blocks of all ranks, after comparing them; all ranks come to the same result.

    Args:
        local: the block of this rank.
        mesh: the mesh; each of its ranks takes part in one all-gather.
        placements: one per axis.
        shape: the global shape, or None to infer it from the blocks, uneven ones too.
        values: whether to compare values along axes that replicate the tensor, not only shapes and dtypes.
    """
    axes = axes_of(mesh)
    rows = _gather_rows(local, mesh, values, grads=values)
    if rows is None:
        return tuple(shape) if shape is not None else tuple(local.shape)
    first = next(iter(rows.values()))
    for coord, row in rows.items():
        if row[:2] != first[:2]:
            raise LayoutError(
                f"The block at {_at(axes, coord)} has another dtype, requires_grad or number of dims than the one at "
                f"{_at(axes, next(iter(rows)))}.",
                why="All blocks are parts of one tensor.",
                fix="Give them the same dtype, requires_grad and number of dims before from_local.",
            )
    shapes = {c: row[2 : 2 + row[1]] for c, row in rows.items()}
    full = tuple(shape) if shape is not None else _full_shape(shapes, axes, placements)
    _check_shapes(shapes, Layout.of(full, axes, placements))
    _check_values({c: row[2 + _MAX_DIMS :] for c, row in rows.items()}, axes, placements)
    return full


def check_equal(plain: Tensor, mesh: DeviceMesh, what: str) -> None:
    """Raise on all ranks if a plain tensor is not the same on every rank of a mesh; one all-gather of a digest."""
    rows = _gather_rows(plain, mesh)
    if rows is None:
        return
    axes = axes_of(mesh)
    (first, row), *others = rows.items()
    differing = [coord for coord, other in others if other != row]
    if differing:
        raise PlainTensorError(
            f"{what} got a plain tensor of shape {tuple(plain.shape)} that differs between ranks: at "
            f"{', '.join(_at(axes, c) for c in differing[:4])} it is not equal to that at {_at(axes, first)}.",
            why="A plain tensor beside a DTensor counts as replicated, so every rank must hold the same values.",
            fix="State its layout: DTensor.from_local(t, mesh, placements), or make it equal on all ranks.",
        )


def digest_bytes(mesh: DeviceMesh) -> int:
    """How many bytes all ranks of a mesh send for `check_equal`."""
    n = axes_of(mesh).count
    return 8 * (2 + _MAX_DIMS + 4) * n * (n - 1)


def _gather_rows(
    local: Tensor, mesh: DeviceMesh, values: bool = True, grads: bool = False
) -> dict[Coord, _Row] | None:
    """What there is to compare of each rank's tensor, by coord; None on a rank that is not on the mesh."""

    def row(block: Tensor) -> _Row:
        return _row(block, values, f"{block.requires_grad}" if grads else "")

    if isinstance(local, PerRank):
        return {c: row(local.of_rank(r)) for r, c in members_of(mesh).items()}
    me = coord_of(mesh)
    if me is None:
        return None
    if members_of(mesh) and torch.distributed.get_backend() == "fake":
        return {c: row(local) for c in members_of(mesh).values()}
    axes = tuple(range(mesh.ndim))
    group = group_of(mesh, axes)
    mine = torch.tensor(row(local), dtype=torch.int64, device=mesh.device_type)
    if is_counting():
        n = len(group.peers)
        record(Sent("compare blocks", "all_gather", axes_of(mesh).names, n, Fraction(mine.nbytes * (n - 1))))
    every = wait(all_gather(mine, len(group.peers), group.name)).view(len(group.peers), -1).tolist()
    return {c: tuple(row) for c, row in zip(group.peers, every, strict=True)}


def _row(block: Tensor, values: bool, also: str) -> _Row:
    kind = int.from_bytes(hashlib.sha256(f"{block.dtype}{block.layout}{also}".encode()).digest()[:4], "big")
    shape = (*block.shape, *(-1,) * (_MAX_DIMS - block.dim()))
    return (kind, block.dim(), *shape, *(_digest(block) if values else ()))


def _digest(block: Tensor) -> tuple[int, ...]:
    if block.is_meta or is_recorded(block):  # it has no values
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


def _full_shape(shapes: dict[Coord, _Row], axes: Axes, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The sum of the blocks' sizes along the axes that split each dim."""
    first = shapes[(0,) * len(axes)]
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
            f"The blocks do not make up {layout}: {some}{'; ...' if len(wrong) > 4 else ''}.",
            why="Dims are split as torch.chunk splits: equal blocks rounded up, the last ones smaller or empty.",
            fix="Split them that way, or use distribute_tensor on the full tensor.",
        )


def _check_values(digests: dict[Coord, _Row], axes: Axes, placements: Sequence[Placement]) -> None:
    for a, p in enumerate(placements):
        if not isinstance(p, Replicate):
            continue
        for coord, digest in digests.items():
            first = (*coord[:a], 0, *coord[a + 1 :])
            if digests[first] != digest:
                raise LayoutError(
                    f"The block at {_at(axes, coord)} differs from the one at {_at(axes, first)}.",
                    why=f"Axis {axes.names[a]} is Replicate(), so all ranks along it hold the same values.",
                    fix=f"Use Partial() or Shard(dim) on {axes.names[a]}, or make the blocks equal.",
                )


def _at(axes: Axes, coord: Coord) -> str:
    return "(" + ", ".join(f"{n}={c}" for n, c in zip(axes.names, coord, strict=True)) + ")"
