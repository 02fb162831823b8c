"""The norms of many tensors: one all-reduce for all tensors that are split over the same axes."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import map_ranks
from shardwise.layout import Layout, Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import to_layout

__all__ = ["reduce_together"]

aten = torch.ops.aten
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class _Kind(NamedTuple):
    """What the tensors of one reduction have in common."""

    mesh: DeviceMesh
    axes: tuple[int, ...]
    dtype: torch.dtype
    result: torch.dtype


def reduce_together(func: Any, tensors: list[Any], ord: float, dtype: torch.dtype | None) -> list[Any]:
    """The norm of each tensor, or None for those that this does not apply to."""
    out: list[Any] = [None] * len(tensors)
    if not (isinstance(ord, int | float) and ord > 0):  # others count elements, or take a minimum
        return out
    kinds: dict[Hashable, tuple[_Kind, list[int]]] = {}
    for i, x in enumerate(tensors):
        if kind := _kind(x, dtype):
            kinds.setdefault((id(kind.mesh), *kind[1:]), (kind, []))[1].append(i)
    for kind, some in kinds.values():
        if len(some) > 1:
            found = _norms(func, [tensors[i] for i in some], ord, kind)
            for i, norm in zip(some, found, strict=True):
                out[i] = norm
    return out


def _kind(x: Any, dtype: torch.dtype | None) -> _Kind | None:
    if not isinstance(x, DTensor) or x._spec.stride is None or not x.dtype.is_floating_point:
        return None
    layout = x._spec.layout
    axes = tuple(sorted(a for dim in layout.dims for f in dim for a in f.axes))
    if layout.partial or not axes:
        return None
    given = dtype or x.dtype
    return _Kind(x.device_mesh, axes, _WIDE.get(given, given), given)


def _norms(func: Any, tensors: list[DTensor], ord: float, kind: _Kind) -> list[DTensor]:
    def statistics(*blocks: Tensor) -> Tensor:
        # the largest of no elements is an error in torch
        filled = [b if b.numel() else b.new_zeros(1) for b in blocks]
        norms = torch.stack(aten._foreach_norm.Scalar(filled, ord, kind.dtype))
        return norms if ord in (1, math.inf) else norms * norms if ord == 2 else norms**ord

    def finish(reduced: Tensor) -> Tensor:
        root = reduced if ord in (1, math.inf) else reduced.sqrt() if ord == 2 else reduced ** (1 / ord)
        return root.to(kind.result)

    axes = tensors[0]._spec.layout.axes
    n = torch.Size([len(tensors)])
    whole = Layout.replicated(n, axes)
    pending = whole.with_partial(dict.fromkeys(kind.axes, "max" if ord == math.inf else "sum"))
    local = map_ranks(statistics, *(x._local_tensor for x in tensors))
    reduced = to_layout(func, DTensor(local, Spec(kind.mesh, pending, kind.dtype, n, (1,))), whole)
    spec = Spec(kind.mesh, Layout.replicated((), axes), kind.result, torch.Size(()), ())
    parts = map_ranks(lambda block: finish(block).unbind(), reduced._local_tensor)
    return [DTensor(part, spec) for part in parts]
