"""The layout of a parameter under a named style."""

from __future__ import annotations

from shardwise.layout import Axes, Factor, Layout, LayoutError
from shardwise.parallel.module_tensors import Slot
from shardwise.parallel.named_styles import NamedStyle
from shardwise.parallel.partition import split_dim

__all__ = ["named_layout"]


def named_layout(slot: Slot, style: NamedStyle, axes: Axes, axis: int) -> Layout:
    """The layout of the tensor in a slot: replicated, or with the features that the style names split by an axis."""
    shape = tuple(slot.tensor.shape)
    layout = Layout.replicated(shape, axes)
    dim = None if style.split is None else split_dim(slot.owner, slot.tensor, style.split)
    if dim is None:
        return layout
    if shape[dim] % style.packed:
        raise LayoutError(
            f"Dim {dim} of {slot.full_name}, of size {shape[dim]}, does not hold {style.packed} projections.",
            why="A packed style splits each of the projections of one size in that dim.",
            fix="Use a layout with factors instead.",
        )
    inner = Factor(shape[dim] // style.packed, (axis,))
    return layout.with_dim(dim, *([Factor(style.packed)] if style.packed > 1 else []), inner)
