"""Gathering the parameters of a group: plans, the gathered blocks, and gathering ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.parallel.data.extension import Sent, is_extended, tensors_to_send
from shardwise.parallel.data.policy import MixedPrecisionPolicy
from shardwise.parallel.data.saved import BlockOwner, forget_blocks, register_blocks
from shardwise.parallel.data.slot import Slot
from shardwise.parallel.data.smaller_group import SmallerGroup
from shardwise.plan import GroupedPlan, Item, plan_redistribute_many
from shardwise.tensor.redistribute_many import PendingBlocks, start_moving_blocks

__all__ = ["GatheredBlocks", "gather_plan"]


def gather_plan(owner: Owner, sent: Mapping[int, Sent] | None = None) -> GroupedPlan:
    """The plan that gathers the parameters of a group, of which some may send other tensors than their blocks."""
    if sent is None:
        sent = _tensors_to_send(owner, [slot.block(slot.param) for slot in owner.slots])
    own = [Item(s.stored, s.computed, s.dtype) for s in owner.slots]
    return plan_redistribute_many(
        [item for i, mine in enumerate(own) for item in (sent[i].items if i in sent else [mine])]
        if sent
        else own
    )


def _to_send(slot: Slot, device: str) -> Tensor:
    """The block of a stored parameter on the device, and in the dtype, that it is computed with."""
    block = slot.block(slot.param)
    dtype = slot.dtype if slot.is_cast and not is_extended(block) else block.dtype
    same = block.dtype is dtype and block.device.type in (device, "meta")
    return block if same else block.to(device=device, dtype=dtype)


def _tensors_to_send(owner: Owner, blocks: Sequence[Tensor]) -> dict[int, Sent]:
    """What is gathered for parameters whose classes choose it."""
    pairs = enumerate(zip(owner.slots, blocks, strict=True))
    return {i: tensors_to_send(slot, b, owner.policy) for i, (slot, b) in pairs if is_extended(b)}


def _start_gathering(owner: Owner, blocks: Sequence[Tensor]) -> PendingBlocks:
    """Begin to gather the blocks of a group."""
    sent = _tensors_to_send(owner, blocks)
    plan = gather_plan(owner, sent)
    if not sent:
        return start_moving_blocks(plan, blocks, owner.mesh, owner.label)
    tensors = [t for i, b in enumerate(blocks) for t in (sent[i].tensors if i in sent else [b])]
    pending = start_moving_blocks(plan, tensors, owner.mesh, owner.label)

    def finish() -> list[Tensor]:
        found = iter(pending.wait())
        return [
            sent[i].received([next(found) for _ in sent[i].items]) if i in sent else next(found)
            for i in range(len(blocks))
        ]

    return PendingBlocks(finish)


class Owner(BlockOwner, Protocol):
    """What has gathered blocks: a group of parameters, whose class describes these attributes."""

    label: str
    slots: list[Slot]
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy


class _Gathered(NamedTuple):
    stamp: tuple[object, ...]
    blocks: list[Tensor]
    keys: list[int]


class GatheredBlocks:
    """The gathered blocks of a group's parameters, while they are needed."""

    def __init__(self) -> None:
        self._coming: tuple[tuple[object, ...], PendingBlocks] | None = None
        self._here: _Gathered | None = None
        self._kept: tuple[tuple[object, ...], SmallerGroup, list[Tensor]] | None = None
        self._last: tuple[
            object, ...
        ] = ()  # the last stamp: one object as long as the parameters stay as they are

    @property
    def blocks(self) -> list[Tensor]:
        """The blocks that are held."""
        return [] if self._here is None else self._here.blocks

    @property
    def are_here(self) -> bool:
        """Whether blocks are held."""
        return self._here is not None

    @property
    def are_wanted(self) -> bool:
        """Whether blocks are held or on their way."""
        return self._here is not None or self._coming is not None

    @property
    def stamp(self) -> tuple[object, ...] | None:
        """The stamp of the parameters when they were gathered."""
        return None if self._here is None else self._here.stamp

    def start(self, owner: Owner) -> None:
        """Begin to gather, unless it has begun."""
        if torch.is_inference_mode_enabled():  # a pass outside of it may use the same blocks
            with torch.inference_mode(False), torch.no_grad():
                self.start(owner)
            return
        slots = owner.slots
        stamp: tuple[object, ...] = tuple([slot.stamp() for slot in slots])
        if stamp == self._last:
            stamp = self._last
        else:
            self._last = stamp
        if self._here is not None and self._here.stamp is not stamp:
            self.free()
        if self._coming is not None and self._coming[0] is not stamp:
            self._drop_coming()
        if self._kept is not None and self._kept[0] is not stamp:
            self._kept = None
        if self._here is None and self._coming is None:
            blocks = [_to_send(slot, owner.mesh.device_type) for slot in slots]
            if self._kept is not None:
                _, smaller, kept = self._kept
                pending = smaller.start_gathering(kept, blocks, owner.label)
            else:
                pending = _start_gathering(owner, blocks)
            self._coming = (stamp, pending)

    def wait(self, owner: Owner) -> list[Tensor]:
        """The gathered blocks of the parameters as they are now."""
        if torch.is_inference_mode_enabled():  # as in `start`
            with torch.inference_mode(False), torch.no_grad():
                return self.wait(owner)
        self.start(owner)
        if self._here is None and self._coming is not None:
            (stamp, coming), self._coming = self._coming, None
            blocks = coming.wait()
            self._here = _Gathered(stamp, blocks, register_blocks(owner, stamp, blocks))
        return self.blocks

    def free(self) -> None:
        """Drop the blocks. Tensors that share their memory keep it."""
        if self._here is not None:
            forget_blocks(self._here.keys)
            self._here = None

    def shrink(self, smaller: SmallerGroup) -> None:
        """Drop the blocks, except for the parts that are kept until they are gathered again."""
        if self._here is not None:
            self._kept = (self._here.stamp, smaller, smaller.keep(self._here.blocks))
            self.free()

    def drop_kept(self) -> None:
        """Drop the parts that were kept."""
        self._kept = None

    def drop_all(self) -> None:
        """Drop the blocks, also those on their way, and what was kept of them."""
        self.free()
        self.drop_kept()
        self._drop_coming()

    def _drop_coming(self) -> None:
        if self._coming is not None:
            (_, coming), self._coming = self._coming, None
            coming.wait()
