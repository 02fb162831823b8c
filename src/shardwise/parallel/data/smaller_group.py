"""Parameters that stay gathered within groups of fewer ranks between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of
from shardwise.layout import Factor, Layout, LayoutError
from shardwise.parallel.data.slot import Slot
from shardwise.plan import GroupedPlan, Item, plan_redistribute_many
from shardwise.tensor.redistribute_many import PendingBlocks, move_blocks, start_moving_blocks
from shardwise.torch_internals.mesh import split_axis

__all__ = ["SmallerGroup", "smaller_group"]


class SmallerGroup:
    """The layouts of a group's parameters between its forward and its backward pass: split over fewer ranks.

    Attributes:
        size: the number of ranks that share a parameter.
        mesh: the mesh of the collectives, of which one axis may be divided into two.
        layouts: for each slot that moves, the layouts on that mesh in which it is kept and computed with.
    """

    def __init__(self, size: int, mesh: DeviceMesh, layouts: Mapping[int, tuple[Layout, Layout]]) -> None:
        self.size, self.mesh, self.layouts = size, mesh, dict(layouts)

    def gather_plan(self, dtypes: Sequence[torch.dtype]) -> GroupedPlan:
        """The plan that gathers what was kept, given the dtype of each slot."""
        return plan_redistribute_many(
            Item(kept, computed, dtypes[i]) for i, (kept, computed) in self.layouts.items()
        )

    def keep(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The parts of gathered blocks to keep, in memory of their own."""
        plan = plan_redistribute_many(
            Item(computed, kept, blocks[i].dtype) for i, (kept, computed) in self.layouts.items()
        )
        parts = move_blocks(plan, [blocks[i] for i in self.layouts], self.mesh)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]

    def start_gathering(self, kept: Sequence[Tensor], blocks: Sequence[Tensor], label: str) -> PendingBlocks:
        """Begin to gather what was kept; `blocks` are those of all slots, of which the others stay."""
        plan = self.gather_plan([b.dtype for b in blocks])
        pending = start_moving_blocks(plan, kept, self.mesh, label)

        def finish() -> list[Tensor]:
            out = list(blocks)
            for i, block in zip(self.layouts, pending.wait(), strict=True):
                out[i] = block
            return out

        return PendingBlocks(finish)


def smaller_group(slots: Sequence[Slot], mesh: DeviceMesh, size: int, what: str) -> SmallerGroup | None:
    """The layouts of slots that stay gathered within groups of `size` ranks; None if that is not fewer than they are on.

    Raises:
        LayoutError: `size` does not divide the number of ranks that share the parameters.
    """
    on = axes_of(mesh)
    moved = {i: slot for i, slot in enumerate(slots) if slot.is_moved}
    inner = {i: _innermost(on.sizes, _data_axes(slot), size, what) for i, slot in moved.items()}
    cuts = {cut for _, cut in inner.values() if cut is not None}
    if all(cut is None and len(whole) == len(_data_axes(moved[i])) for i, (whole, cut) in inner.items()):
        return None
    if len(cuts) > 1 or any(a in s.computed.sharded for a, _ in cuts for s in moved.values()):
        return None  # other parameters of the group use this axis in another way: it is not divided
    index: dict[int, tuple[int, ...]] = {a: (a,) for a in range(mesh.ndim)}
    for axis, count in cuts:
        name, outer = on.names_of((axis,))[0], on.sizes[axis] // count
        mesh = split_axis(mesh, axis, (outer, count), (f"{name}_outer", f"{name}_inner"))
        index = {a: (a,) if a < axis else (a, a + 1) if a == axis else (a + 1,) for a in index}
    layouts = {}
    for i, (whole, cut) in inner.items():
        axes = [index[a][0] for a in whole]
        axes = axes if cut is None else [index[cut[0]][1], *axes]
        computed = _on(moved[i].computed, index, mesh)
        dim = next(d for d, dims in enumerate(moved[i].stored.dims) if dims != moved[i].computed.dims[d])
        first, *rest = computed.dims[dim] or (Factor(computed.shape[dim]),)
        kept = computed.with_dim(dim, Factor(first.size, (*first.axes, *axes)), *rest)
        layouts[i] = (kept, computed)
    return SmallerGroup(size, mesh, layouts)


def _data_axes(slot: Slot) -> tuple[int, ...]:
    """The axes that split the stored parameter, and not the gathered one; outermost first."""
    new = slot.stored.sharded - slot.computed.sharded
    return tuple(a for dim in slot.stored.dims for factor in dim for a in factor.axes if a in new)


def _innermost(
    sizes: Sequence[int], axes: Sequence[int], size: int, what: str
) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """The innermost axes with `size` ranks, and the axis of which only the innermost ranks belong to them, with their number."""
    whole: list[int] = []
    left = size
    for a in reversed(axes):
        if left == 1:
            break
        if left % sizes[a] == 0:
            whole.insert(0, a)
            left //= sizes[a]
        elif sizes[a] % left == 0:
            return tuple(whole), (a, left)
        else:
            left = 0
            break
    if left != 1:
        total = 1
        for a in axes:
            total *= sizes[a]
        raise LayoutError(
            f"{what} got reshard_after_forward={size} for parameters that are split over {total} ranks.",
            why="If passing reshard_after_forward as an int, it should be a factor of "
            f"{total}, not {size}: the size of the groups in which parameters stay gathered.",
            fix=f"Pass a divisor of {total}, or True to keep them split over all ranks.",
        )
    return tuple(whole), None


def _on(layout: Layout, index: Mapping[int, tuple[int, ...]], mesh: DeviceMesh) -> Layout:
    """A layout on the mesh whose axes are numbered anew."""
    dims = [[Factor(f.size, tuple(i for a in f.axes for i in index[a])) for f in dim] for dim in layout.dims]
    return Layout(axes_of(mesh), dims, {index[a][0]: op for a, op in layout.partial})
