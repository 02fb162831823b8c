"""Constructing DTensors from blocks, and the specs and layouts of new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, current_mesh, first_rank, is_sparse, members_of, on_mesh, spread
from shardwise.layout import (
    Layout,
    LayoutError,
    Placement,
    Replicate,
    Spec,
    block_shape,
    contiguous_stride,
    factor_ranges,
    owned,
    unit_placements,
)
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.sparse_tensor import SparseDTensor
from shardwise.torch_internals.subclass import mark_parameter
from shardwise.torch_internals.symbolic_sizes import is_symbolic_number

__all__ = [
    "empty_like_block",
    "from_block",
    "from_function",
    "indices_along",
    "layout_for",
    "memory_like",
    "rebuild",
    "replicate",
    "replicated_spec",
    "size_of",
    "stride_of",
]


def from_block(local: Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
    """The DTensor of a block, a sparse one if its spec has no strides."""
    kind = SparseDTensor if spec.stride is None else DTensor
    return kind(local, spec, requires_grad=requires_grad)


def rebuild(local: Tensor, spec: Spec, requires_grad: bool, is_param: bool) -> DTensor:
    """The DTensor that was pickled as these values."""
    out = from_block(local, spec, requires_grad=requires_grad)
    if is_param:
        mark_parameter(out)
    return out


def stride_of(local: Tensor) -> tuple[int, ...] | None:
    """The strides of a block as a spec has them; None for a sparse one."""
    return None if is_sparse(local) else tuple(first_rank(local).stride())


def replicated_spec(full: Tensor, mesh: DeviceMesh) -> Spec:
    """The spec of a tensor that every rank of a mesh holds in full."""
    layout = Layout.replicated(full.shape, axes_of(mesh))
    return Spec(mesh, layout, full.dtype, full.shape, stride_of(full))


def replicate(full: Tensor, mesh: DeviceMesh, *, simulated: bool = False) -> DTensor:
    """The DTensor of a tensor that every rank of a mesh holds in full; `simulated`: give each rank its own copy."""
    block = spread(full, list(members_of(mesh))) if simulated else full
    return from_block(block, replicated_spec(full, mesh))


def empty_like_block(t: Tensor) -> Tensor:
    """The block of a rank that is not on the mesh: it has no elements, or is 0 for a tensor without dims."""
    first = first_rank(t)
    if is_sparse(first):
        return torch.zeros_like(first).requires_grad_(False)
    return first.new_zeros(()) if first.ndim == 0 else first.new_empty(0)


def memory_like(x: Tensor, **options: Any) -> Tensor:
    """Memory like a tensor, for values that each rank writes: it has none of the tensor's pending reductions."""
    pending = isinstance(x, DTensor) and x._spec.layout.partial
    return (torch.zeros_like if pending else torch.empty_like)(x, **options)


def size_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    """A size that was given as numbers, or as one sequence of them.

    >>> size_of((2, 3)), size_of(([2, 3],))
    ((2, 3), (2, 3))
    """
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    return tuple(n if is_symbolic_number(n) else index(n) for n in size)


def layout_for(
    name: str,
    shape: tuple[int, ...],
    memory_layout: torch.layout,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> Layout:
    """The layout of a new tensor, or an error that names the factory `name`."""
    mesh = current_mesh(mesh, name)
    if memory_layout is not torch.strided:
        raise LayoutError(
            f"{name} got layout={memory_layout}.",
            why="The blocks of a new tensor are strided tensors.",
            fix="Use layout=torch.strided.",
        )
    if any(n < 0 for n in shape):
        raise LayoutError(
            f"{name} got shape {shape}.", why="A size cannot be negative.", fix="Use sizes of 0 or more."
        )
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    layout = Layout.of(shape, axes_of(mesh), placements)
    # uninitialized values may be those of any layout, and every reduction of zeros is zero
    if name not in ("empty", "zeros") and any(p.is_partial() for p in placements):
        raise LayoutError(
            f"{name} cannot create a tensor with placements ({', '.join(map(str, placements))}).",
            why="A pending reduction is the result of a computation; a new tensor has nothing to reduce.",
            fix="Use Replicate() or Shard(dim) on each axis.",
        )
    return layout


class _LazyIndices(Sequence[Sequence[int]]):
    """The indices that a coord owns, computed at first use: where they are, symbolic sizes become numbers."""

    def __init__(self, layout: Layout, coord: Sequence[int]) -> None:
        self._layout, self._coord = layout, coord

    @cached_property
    def _owned(self) -> tuple[Sequence[int], ...]:
        return owned(self._layout, self._coord)

    def __getitem__(self, i: Any) -> Any:
        return self._owned[i]

    def __len__(self) -> int:
        return self._layout.ndim

    def along(self, d: int, device: torch.device) -> Tensor:
        """The indices along a dim as a tensor, whose size may be a symbol."""
        out = torch.zeros(1, dtype=torch.int64, device=device)
        for size, low, high in factor_ranges(self._layout, d, self._coord):
            out = (out[:, None] * size + torch.arange(high - low, device=device) + low).flatten()
        return out


def indices_along(owned: Sequence[Sequence[int]], d: int, device: torch.device) -> Tensor:
    """The indices along a dim, of those that `from_function` passes, as a tensor."""
    if isinstance(owned, _LazyIndices):
        return owned.along(d, device)
    own = owned[d]
    if isinstance(own, range):
        return torch.arange(own.start, own.stop, device=device)
    return torch.tensor(own, dtype=torch.int64, device=device)


def _indices(layout: Layout, coord: Sequence[int]) -> Sequence[Sequence[int]]:
    return _LazyIndices(layout, coord) if layout.is_symbolic else owned(layout, coord)


def from_function(
    layout: Layout,
    values: Callable[[tuple[int, ...], Sequence[Sequence[int]]], Tensor],
    dtype: torch.dtype,
    requires_grad: bool,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """The tensor whose block on each rank is `values(shape of the block, global indices it owns per dim)`.

    `placements` are those that the layout was made from, if any.
    """
    mesh = current_mesh(mesh, "a factory")
    with torch.device(mesh.device_type):
        block = on_mesh(mesh, lambda coord: values(block_shape(layout, coord), _indices(layout, coord)))
        if block is None:
            block = torch.empty(0, dtype=dtype)
    size = torch.Size(layout.shape)
    units = () if placements is None else unit_placements(layout, placements)
    spec = Spec(mesh, layout, dtype, size, contiguous_stride(size), units)
    return DTensor(block, spec, requires_grad=requires_grad)
