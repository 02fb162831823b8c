"""The layout of a parameter under a named style."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.layout import Axes, Factor, Layout, LayoutError
from shardwise.parallel.module_tensors import Slot
from shardwise.parallel.named_styles import NamedStyle
from shardwise.parallel.partition import split_dim

__all__ = ["features_kept_together", "named_layout"]


def named_layout(
    slot: Slot, style: NamedStyle, axes: Axes, axis: int, parent: nn.Module | None = None
) -> Layout:
    """The layout of the tensor in a slot: replicated, or with the features that the style names split by an axis.

    `parent`: the module around the slot's owner. If that is attention with heads, features are split between heads.
    """
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
    size = shape[dim] // style.packed
    unit = 1 if style.split == "experts" else features_kept_together(parent, size, axes.sizes[axis])
    factors = [Factor(style.packed), Factor(size // unit, (axis,)), Factor(unit)]
    return layout.with_dim(dim, *(f for f in factors if f.size > 1 or f.axes))


def features_kept_together(parent: nn.Module | None, size: int, ranks: int) -> int:
    """The number of adjacent features in a projection of an attention module that belong on one rank.

    A head, so that views by heads send nothing however many heads there are; if several queries share a key and ranks have
    different numbers of keys, all heads that share one. If a rank would be left without heads, or without keys of its own,
    features are split evenly, and attention gathers what it needs.
    """
    head = getattr(parent, "head_dim", None)
    if not isinstance(head, int) or head < 1 or size % head:
        return 1
    config = _config_of(parent)
    heads, keys = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(keys, int) and keys != heads and keys % ranks:
        if heads % keys or size not in (heads * head, keys * head):
            return 1
        head = size // keys
    count = size // head
    return head if -(-count // ranks) * (ranks - 1) < count else 1


def _config_of(module: nn.Module | None) -> Any:
    """The configuration that Hugging Face's attention modules have; that of their own layer, where layers differ."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    if getattr(config, "is_heterogeneous", False):
        return config.per_layer_config[layer] if isinstance(layer, int) else None
    return config
