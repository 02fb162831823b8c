"""Python code of torch that draws plain numbers to help itself: for DTensors it takes them from the stream."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import _lowrank

from shardwise.ops.one_device import one_device
from shardwise.tensor.dtensor import DTensor

__all__ = ["draw_for_torch"]

_HELPED: tuple[tuple[Any, str], ...] = (
    (torch.nn.init, "sparse_"),  # which elements of a column are zero
    (_lowrank, "get_approximate_basis"),  # where svd_lowrank and pca_lowrank begin
)


@functools.cache  # once, however often it is imported
def draw_for_torch() -> None:
    """Run these functions inside `one_device` where their first argument is a DTensor."""
    for module, name in _HELPED:
        setattr(module, name, _helped(getattr(module, name)))


def _helped(function: Any) -> Any:
    @functools.wraps(function)
    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return function(tensor, *args, **kwargs)
        with one_device():
            return function(tensor, *args, **kwargs)

    return run
