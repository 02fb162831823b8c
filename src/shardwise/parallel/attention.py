"""Tensor parallelism of `nn.MultiheadAttention`: its heads are split."""

from __future__ import annotations

from torch import nn

from shardwise.layout import Axes, Factor, Layout
from shardwise.parallel.named_layout import features_kept_together

__all__ = ["attention_layouts"]

_PACKED = ("in_proj_weight", "in_proj_bias")
_BY_ROWS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_LAST_DIM = ("bias_k", "bias_v", "out_proj.weight")


def attention_layouts(module: nn.MultiheadAttention, axes: Axes, axis: int) -> dict[str, Layout]:
    """The layouts, by name, of the parameters of an attention module whose heads an axis splits; others are replicated.

    The projections of queries, keys and values are split by the heads that they produce, packed into one parameter or not, and the
    projection of the output by the heads that it takes, so that what leaves the module is a pending sum.

    >>> attention = nn.MultiheadAttention(8, 4)
    >>> layouts = attention_layouts(attention, Axes((2,), ("tp",)), 0)
    >>> {name: str(layout) for name, layout in layouts.items()}
    {'in_proj_weight': '[3 8:tp, 8]', 'in_proj_bias': '[3 8:tp]', 'out_proj.weight': '[8, 8:tp]'}
    """
    features = module.embed_dim
    unit = features_kept_together(module, features, axes.sizes[axis])
    split = [Factor(features // unit, (axis,)), *([Factor(unit)] if unit > 1 else [])]
    found = {}
    for name, parameter in module.named_parameters():
        layout = Layout.replicated(tuple(parameter.shape), axes)
        if name in _PACKED:
            found[name] = layout.with_dim(0, Factor(3), *split)
        elif name in _BY_ROWS:
            found[name] = layout.with_dim(0, *split)
        elif name in _LAST_DIM:
            found[name] = layout.with_dim(parameter.dim() - 1, *split)
    return found
