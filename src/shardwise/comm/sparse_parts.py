"""Sparse tensors as the dense tensors that they consist of, and distributing one that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.mesh import Coord, axes_of
from shardwise.comm.per_rank import PerRank, map_ranks
from shardwise.comm.scatter import scatter
from shardwise.comm.simulate import on_mesh
from shardwise.layout import Layout, block_shape, owned
from shardwise.torch_internals.sparse import coo_parts

__all__ = ["cut_sparse", "detached", "is_sparse", "parts_of", "places_in", "scatter_sparse", "sparse_of"]

_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_ROW_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr)
_MAX_DIMS = 16


def is_sparse(t: Tensor) -> bool:
    """Whether a plain tensor has one of torch's sparse layouts."""
    layout = t.layout
    return layout is not torch.strided and layout in _SPARSE_LAYOUTS


def detached(t: Tensor) -> Tensor:
    """A new tensor on the same memory without a graph, for autograd to annotate; sparse tensors have no views."""
    return t.detach() if is_sparse(t) else t.view_as(t)


def parts_of(t: Tensor) -> list[Tensor]:
    """The dense tensors that a sparse tensor consists of: its index tensors, then its values.

    >>> [p.tolist() for p in parts_of(torch.eye(2).to_sparse())]
    [[[0, 1], [0, 1]], [1.0, 1.0]]
    """
    t = t.detach()
    if t.layout is torch.sparse_coo:
        return coo_parts(t)
    if t.layout in _ROW_COMPRESSED:
        return [t.crow_indices(), t.col_indices(), t.values()]
    return [t.ccol_indices(), t.row_indices(), t.values()]


def sparse_of(parts: Sequence[Tensor], like: Tensor, is_coalesced: bool = False) -> Tensor:
    """The sparse tensor that consists of these dense ones, with the shape and sparse layout of another."""
    shape = tuple(like.shape)
    if like.layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=is_coalesced, check_invariants=False
        )
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=like.layout, check_invariants=False
    )


class Places(NamedTuple):
    """Which elements of a sparse tensor are in a block, and their indices there, one row per sparse dim.

    The indices of elements that are not in the block are meaningless.
    """

    inside: Tensor
    here: Tensor


def places_in(indices: Tensor, layout: Layout, coord: Coord) -> Places:
    """The positions in the block at a coord of elements with these indices in the full tensor, one column each.

    >>> from shardwise.layout import Axes, Shard
    >>> split = Layout.of((4,), Axes((2,)), [Shard(0)])
    >>> [p.tolist() for p in places_in(torch.tensor([[0, 3]]), split, (1,))]
    [[False, True], [[-2, 1]]]
    """
    inside = torch.ones(indices.shape[1], dtype=torch.bool, device=indices.device)
    rows = []
    for row, mine in zip(indices, owned(layout, coord), strict=False):
        if isinstance(mine, range):
            inside &= (row >= mine.start) & (row < mine.stop)
            rows.append(row - mine.start)
        else:
            # with a last entry that no index equals, for searchsorted to point at
            known = torch.tensor([*mine, -1], dtype=row.dtype, device=row.device)
            at = torch.searchsorted(known[:-1], row)
            inside &= known[at] == row
            rows.append(at)
    return Places(inside, torch.stack(rows) if rows else indices)


def cut_sparse(t: Tensor, layout: Layout, coord: Coord) -> Tensor:
    """The block of a COO tensor at a coord, as a COO tensor.

    >>> from shardwise.layout import Axes, Shard
    >>> cut_sparse(torch.eye(3).to_sparse(), Layout.of((3, 3), Axes((2,)), [Shard(0)]), (1,)).to_dense()
    tensor([[0., 0., 1.]])
    """
    indices, values = parts_of(t)
    inside, here = places_in(indices, layout, coord)
    values = values[inside]
    for d, mine in enumerate(owned(layout, coord)[t.sparse_dim() :], 1):
        if isinstance(mine, range):
            values = values.narrow(d, mine.start, len(mine)) if len(mine) else values.narrow(d, 0, 0)
        else:
            values = values.index_select(d, torch.tensor(mine, dtype=torch.int64, device=values.device))
    return torch.sparse_coo_tensor(
        here[:, inside],
        # torch's kernels read row lengths from the strides, which `contiguous` leaves alone where there is one row
        values.clone(memory_format=torch.contiguous_format),
        block_shape(layout, coord),
        is_coalesced=t.is_coalesced(),
        check_invariants=False,
    )


def scatter_sparse(whole: Tensor, mesh: DeviceMesh, source: int | None) -> Tensor | None:
    """The sparse tensor of the rank whose coord is `source` on each axis, or each rank's own; None off the mesh.

    Only the source knows the number of elements: it first broadcasts a header with the shapes, then the parts.
    """
    if source is None:
        return on_mesh(mesh, lambda coord, t: t.clone(), whole)  # type: ignore[no-any-return]
    axes = axes_of(mesh)
    header = map_ranks(_header, whole)
    header = scatter(header, Layout.replicated(header.shape, axes), mesh, source)
    if header is None:
        return None
    if isinstance(whole, PerRank) and isinstance(header, PerRank):
        whole = PerRank({r: whole.of_rank(r) for r in header._blocks})
    buffers = map_ranks(_buffers, whole, header)
    parts = [scatter(buffer, Layout.replicated(buffer.shape, axes), mesh, source) for buffer in buffers]
    return map_ranks(_from_parts, whole, header, parts)  # type: ignore[no-any-return]


def _header(t: Tensor) -> Tensor:
    """The metadata as numbers: whether it is coalesced, the item size of its indices, and the shape of each part."""
    parts = parts_of(t)
    shapes = [(p.dim(), *p.shape, *(0,) * (_MAX_DIMS - p.dim())) for p in parts]
    flags = (int(t.layout is torch.sparse_coo and t.is_coalesced()), parts[0].dtype.itemsize)
    return torch.tensor([*flags, *(n for shape in shapes for n in shape)], device=t.device)


def _buffers(t: Tensor, header: Tensor) -> list[Tensor]:
    """The rank's own parts, or empty tensors where the source's parts have another shape or dtype."""
    _, width, *shapes = header.tolist()
    index = torch.int32 if width == 4 else torch.int64
    out = []
    *indices, values = parts_of(t)
    for i, part in enumerate([*indices, values]):
        ndim, *sizes = shapes[i * (_MAX_DIMS + 1) : (i + 1) * (_MAX_DIMS + 1)]
        dtype = t.dtype if part is values else index
        same = tuple(part.shape) == tuple(sizes[:ndim]) and part.dtype == dtype
        out.append(part if same else part.new_empty(sizes[:ndim], dtype=dtype))
    return out


def _from_parts(t: Tensor, header: Tensor, parts: list[Tensor]) -> Tensor:
    return sparse_of(parts, t, is_coalesced=bool(header[0]))
