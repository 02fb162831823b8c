"""Sparse DTensors: every rank holds the whole, in torch's own form."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import PerRank, detached, is_sparse, map_ranks
from shardwise.layout import Layout, LayoutError, Spec
from shardwise.tensor.dtensor import DTensor

__all__ = ["Sparse", "check_whole", "holds_sparse", "made", "moved", "nothing_like", "stride_of"]


class Sparse(DTensor):
    """A sparse tensor that every rank holds; a class of its own so that no other tensor pays for the question.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = sw.distribute_tensor(torch.eye(3), mesh, [sw.Shard(0)]).to_sparse()
    ...     print(x._spec, x._nnz(), (x + x).to_dense().placements, x.to_local().ranks[1].values())
    f32[3, 3] 3 (Replicate(),) tensor([1., 1., 1.])
    """

    __slots__ = ()

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: Spec, *, requires_grad: bool = False) -> Sparse:
        if not isinstance(local_tensor, PerRank) and local_tensor.requires_grad:
            local_tensor = local_tensor.detach()
        # torch knows COO by a tensor's keys, and has to ask which of the compressed kinds it is
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            spec.shape,
            dtype=spec.dtype,
            device=local_tensor.device,
            layout=local_tensor.layout,
            dispatch_layout=True,
            requires_grad=requires_grad,
        )
        self._local_tensor, self._spec = local_tensor, spec
        return self

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """How the tensor lies on the mesh; to torch's own code, which kind of sparse it is."""
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return self._local_tensor.layout  # type: ignore[return-value]
        return self._spec.layout

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], kept: tuple[Spec, bool], outer_size: Any, outer_stride: Any
    ) -> Sparse:
        spec, requires_grad = kept
        return Sparse(inner["_local_tensor"], spec, requires_grad=requires_grad)


def made(local: Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
    """The DTensor of a block: a sparse one, if its spec says so."""
    kind = Sparse if spec.stride is None else DTensor
    return kind(local, spec, requires_grad=requires_grad)


def holds_sparse(t: Tensor) -> bool:
    """Whether a tensor is sparse, distributed or not."""
    return t._spec.stride is None if isinstance(t, DTensor) else is_sparse(t)


def stride_of(local: Tensor) -> tuple[int, ...] | None:
    """The strides of a block, as its spec has them."""
    if is_sparse(local):
        return None
    return tuple(local.ranks[0].stride() if isinstance(local, PerRank) else local.stride())


def check_whole(layout: Layout, what: str) -> None:
    """Raise if a layout is none that a sparse tensor can have."""
    if layout.sharded or layout.partial:
        raise LayoutError(
            f"{what} of a sparse tensor as {layout}.",
            why="a sparse tensor lies whole on every rank: only its values say which blocks its elements would be in",
            fix="Replicate() on every axis, or x.to_dense() first",
        )


def moved(x: DTensor, target: Layout, dtype: torch.dtype) -> DTensor:
    """A sparse tensor in another layout, of which there is none but its own."""
    check_whole(target, f"redistribute({x._spec})")
    local = x._local_tensor if dtype == x.dtype else x._local_tensor.to(dtype)
    return Sparse(map_ranks(detached, local), x._spec.with_dtype(dtype))


def nothing_like(t: Tensor) -> Tensor:
    """What a rank that is not on the mesh holds of a tensor: nothing, or no element of a sparse one."""
    first = t.ranks[0] if isinstance(t, PerRank) else t
    return torch.zeros_like(first).requires_grad_(False) if is_sparse(first) else first.new_empty(0)
