"""Sparse DTensors: each rank holds the full sparse tensor, in one of torch's own sparse layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm import PerRank, detached, is_sparse, map_ranks
from shardwise.layout import Layout, LayoutError, Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.subclass import make_wrapper

__all__ = ["SparseDTensor", "check_replicated", "holds_sparse", "redistribute_sparse"]


class SparseDTensor(DTensor):
    """A sparse tensor that is replicated on every rank; a subclass, so that dense tensors need no check.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = sw.distribute_tensor(torch.eye(3), mesh, [sw.Shard(0)]).to_sparse()
    ...     print(x._spec, x._nnz(), (x + x).to_dense().placements, x.to_local().ranks[1].values())
    f32[3, 3] 3 (Replicate(),) tensor([1., 1., 1.])
    """

    __slots__ = ()
    _can_change_places = False

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: Spec, *, requires_grad: bool = False) -> SparseDTensor:
        if not isinstance(local_tensor, PerRank) and local_tensor.requires_grad:
            local_tensor = local_tensor.detach()
        # dispatch_layout: the dispatch key tells COO from compressed layouts, but not which compressed one it is
        self = make_wrapper(
            cls,
            spec.shape,
            strides=None,
            dtype=spec.dtype,
            device=local_tensor.device,
            layout=local_tensor.layout,
            dispatch_layout=True,
            requires_grad=requires_grad,
        )
        self._local_tensor, self._spec = local_tensor, spec
        return self

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        """Which of torch's sparse layouts the tensor has."""
        return self._local_tensor.layout


def holds_sparse(t: Tensor) -> bool:
    """Whether a tensor is sparse, distributed or not."""
    return t._spec.stride is None if isinstance(t, DTensor) else is_sparse(t)


def check_replicated(layout: Layout, what: str) -> None:
    """Raise if a sparse tensor cannot have a layout."""
    if layout.sharded or layout.partial:
        raise LayoutError(
            f"{what} got a sparse tensor for the layout {layout}.",
            why="A sparse tensor is replicated: only its values say which blocks its elements would belong to.",
            fix="Use Replicate() on every axis, or x.to_dense() first.",
        )


def redistribute_sparse(x: DTensor, target: Layout, dtype: torch.dtype) -> DTensor:
    """A sparse tensor in another dtype; the only layout it can have is its own."""
    check_replicated(target, f"redistribute({x._spec})")
    local = x._local_tensor if dtype == x.dtype else x._local_tensor.to(dtype)
    return SparseDTensor(map_ranks(detached, local), x._spec.with_dtype(dtype))
