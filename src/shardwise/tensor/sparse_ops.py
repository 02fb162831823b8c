"""Ops on sparse tensors: on the whole, which every rank has."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.layout import LayoutError
from shardwise.tensor.direct import Run
from shardwise.tensor.whole import on_whole

__all__ = ["on_sparse"]


def on_sparse(func: Any) -> Run:
    """How a call with a sparse tensor among its arguments runs."""
    if func is torch.ops.prim.layout.default:
        return lambda args, kwargs: args[0]._local_tensor.layout
    if torch.Tag.inplace_view in func.tags:
        raise LayoutError(
            f"{func} would change the shape of a sparse DTensor in place.",
            why="others that hold the tensor would see another shape than its spec says",
            fix="use the op that returns a new tensor",
        )
    return lambda args, kwargs: on_whole(func, args, kwargs)
