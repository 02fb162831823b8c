"""Parameters that choose what is gathered: `fsdp_pre_all_gather` and `fsdp_post_all_gather`, as torch calls them.

Classes of float8 and quantized tensors have these methods, or single tensors: each rank sends smaller tensors than its block, of
which all ranks make the parameter that they compute with.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.comm import PerRank, axes_of, on_mesh
from shardwise.layout import Factor, Layout, LayoutError, block_shape
from shardwise.parallel.data.layouts import mesh_slice
from shardwise.parallel.data.policy import MixedPrecisionPolicy
from shardwise.parallel.data.slot import Slot
from shardwise.plan import Item

__all__ = ["Sent", "is_extended", "tensors_to_send"]

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(block: Tensor) -> bool:
    """Whether a block, or its class, chooses what is gathered."""
    if isinstance(block, PerRank):
        block = block.ranks[0]
    if hasattr(block, _PRE) is not hasattr(block, _POST):
        raise LayoutError(
            f"A parameter is a {type(block).__name__}, which has only one of {_PRE} and {_POST}.",
            why="One returns what is gathered, the other makes the parameter of it.",
            fix="Define both, or neither.",
        )
    return hasattr(block, _PRE)


class Sent(NamedTuple):
    """What is gathered for one parameter: tensors, how they move, and what makes the parameter of the results."""

    slot: Slot
    block: Tensor
    tensors: list[Tensor]
    items: list[Item]
    metadata: Any  # that of this rank, or of each rank of a simulation
    dtype: torch.dtype

    def received(self, found: Sequence[Tensor]) -> Tensor:
        """The block of the gathered parameter."""
        slot = self.slot

        def one(coord: tuple[int, ...], block: Any, metadata: Any, *outputs: Tensor) -> Tensor:
            # in memory of their own: a class may keep them, and has no reason to expect an offset
            parts = tuple(t.clone(memory_format=torch.contiguous_format) for t in outputs)
            whole: Tensor
            whole, _ = block.fsdp_post_all_gather(parts, metadata[0], self.dtype)
            rows = block_shape(slot.computed, coord)[0]
            return whole if len(whole) == rows else whole[:rows]  # the last ranks' parts were padded

        with torch.no_grad():
            return on_mesh(slot.mesh, one, self.block, self.metadata, *found)  # type: ignore[no-any-return]


def tensors_to_send(slot: Slot, block: Tensor, policy: MixedPrecisionPolicy) -> Sent:
    """What the class of a block wants to have gathered.

    Raises:
        LayoutError: another dim than the first is split.
    """
    shard = slot.stored.sharded - slot.computed.sharded
    order = tuple(a for factor in slot.stored.dims[0] for a in factor.axes if a in shard) if shard else ()
    if set(order) != shard:
        raise LayoutError(
            f"The parameter {slot.name} is a {type(block).__name__}, and is stored as {slot.stored}.",
            why=f"What {_PRE} returns is joined along the first dim.",
            fix="Let shard_placement_fn return Shard(0) for it.",
        )
    mesh = mesh_slice(slot.mesh, axes_of(slot.mesh).names_of(order)) if order else slot.mesh
    module, shape = slot.places[0][0], torch.Size(slot.stored.shape)

    def one(coord: tuple[int, ...], block: Any) -> tuple[Any, list[Any]]:
        few = len(inspect.signature(block.fsdp_pre_all_gather).parameters) == 1
        rest = () if few else (shape, slot.stride, module, policy)
        sent, metadata = block.fsdp_pre_all_gather(mesh, *rest)
        return tuple(t.contiguous() for t in sent), [metadata]

    with torch.no_grad():
        tensors, metadata = on_mesh(slot.mesh, one, block)
    items = [_item(slot, t, order) for t in tensors]
    return Sent(slot, block, list(tensors), items, metadata, policy.param_dtype or block.dtype)


def _item(slot: Slot, tensor: Tensor, axes: tuple[int, ...]) -> Item:
    """The move that joins the tensors of all ranks, which have one shape, along their first dim."""
    on = axes_of(slot.mesh)
    ranks = 1
    for a in axes:
        ranks *= on.sizes[a]
    first, *rest = tensor.shape
    whole = Layout.replicated((first * ranks, *rest), on)
    split = whole.with_dim(0, Factor(first * ranks, axes)) if axes else whole
    return Item(split, whole, tensor.dtype)
