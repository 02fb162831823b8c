"""Writing the value of a view into its base without gathering it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.call.schema import op_info
from shardwise.call.strides import may_overlap
from shardwise.tensor.dtensor import DTensor

__all__ = ["COMPUTED", "on_memory", "scatter_of"]

aten = torch.ops.aten

COMPUTED = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
"""View ops whose blocks are computed, since a DTensor has no conjugate or negative bit, and what computes the base again."""


def on_memory(func: Any) -> Any:
    """A view op on a plain tensor, such that the result shares its memory.

    `imag` of a conjugate views real and imaginary parts, and then negates.
    """
    if func is aten._neg_view.default:
        return aten.alias.default
    if func is aten.view_as_real.default:
        return lambda x: torch.view_as_real(x.conj() if x.is_conj() else x)
    return func


def scatter_of(
    func: Any, number: int | None, base: DTensor, *args: Any, **kwargs: Any
) -> Callable[[DTensor, DTensor], DTensor] | None:
    """What writes the value of a view into its base, if the view is a slice or an index of one dim."""
    if func in COMPUTED:
        inverse = COMPUTED[func]
        return lambda x, value: inverse(value)
    if may_overlap(base.shape, base.stride()):
        return None  # elements outside of the view may be in it, too
    named = op_info(func).bind((base, *args), kwargs)
    dim = named.get("dim", 0)
    if func is aten.slice.Tensor:
        start, end, step = named["start"], named["end"], named["step"]
        return lambda x, value: aten.slice_scatter.default(x, value, dim, start, end, step)
    if func is aten.select.int or func is aten.unbind.int:
        index = named["index"] if number is None else number
        return lambda x, value: aten.select_scatter.default(x, value, dim, index)
    if number is None or func not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    sizes = named.get("split_sizes") or [named["split_size"]] * number
    start = sum(sizes[:number])
    return lambda x, value: aten.slice_scatter.default(x, value, dim, start, start + value.shape[dim])
