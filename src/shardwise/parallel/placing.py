"""Replacing the tensors of a module by distributed ones, tied tensors by one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.api.distribute import distribute_tensor
from shardwise.comm import axes_of
from shardwise.layout import Layout, LayoutError
from shardwise.parallel.gradients import watch_gradient
from shardwise.parallel.module_tensors import Slot, group_ties, replace, slots_of
from shardwise.tensor.dtensor import DTensor

__all__ = ["place", "place_tensors", "restore_ties"]


def place_tensors(
    module: nn.Module, mesh: DeviceMesh, layouts: Mapping[str, Layout], src_data_rank: int | None
) -> None:
    """Distribute the plain tensors of a module: those with a layout by their full name, all others replicated."""
    for group in group_ties(slots_of(module)):
        if isinstance(group[0].tensor, DTensor):
            continue
        layout = next((layouts[s.full_name] for s in group if s.full_name in layouts), None)
        place(group, mesh, layout, src_data_rank)


def place(group: list[Slot], mesh: DeviceMesh, layout: Layout | None, src_data_rank: int | None) -> None:
    """Distribute one tensor, which all the places in the group hold."""
    tensor = group[0].tensor
    layout = layout or Layout.replicated(tuple(tensor.shape), axes_of(mesh))
    source = None if tensor.is_meta else src_data_rank
    new = distribute_tensor(tensor.detach(), mesh, layout.placements, src_data_rank=source)
    replace(group, new)
    settled = getattr(group[0].owner, group[0].name)
    if settled.requires_grad:
        watch_gradient(settled)


def restore_ties(ties: list[list[Slot]]) -> None:
    """Make tied parameters one object again, after other code distributed some of them.

    Args:
        ties: the places of the module's tensors before, grouped by tensor.
    """
    for group in ties:
        if len(group) == 1:
            continue
        now = [getattr(s.owner, s.name) for s in group]
        new = [t for t in now if isinstance(t, DTensor)]
        if not new or all(t is new[0] for t in now):
            continue
        if any(t.sharding is not new[0].sharding or t.device_mesh != new[0].device_mesh for t in new):
            each = ", ".join(
                f"{s.full_name}: {getattr(t, 'sharding', 'plain')}" for s, t in zip(group, now, strict=True)
            )
            raise LayoutError(
                f"Tied parameters were given different layouts: {each}.",
                why="They are one tensor, which has one layout.",
                fix="Give them the same layout, or untie them first.",
            )
        for slot in group:
            setattr(slot.owner, slot.name, new[0])
