"""What kernels check of values and memory, where some ranks would not: a kernel checks nothing for an empty block.

An index that is the same on every rank is checked on every rank, so that none continues, or waits, where others raise. Only
layouts in which kernels see less than the whole index, or nothing, need this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.call.op_call import OpCall
from shardwise.call.route import Run
from shardwise.comm import first_rank
from shardwise.layout import has_empty_blocks
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.tracing import is_recorded

__all__ = ["checking_values", "indexes_nothing"]

_ERRORS: dict[str, type[Exception]] = {
    **dict.fromkeys(["index_select", "index_add", "gather", "scatter", "scatter_add", "scatter_reduce"], RuntimeError),
    **dict.fromkeys(["index_copy", "index_fill", "index_reduce", "embedding", "index", "index_put"], IndexError),
}  # fmt: skip
"""Ops with an index into a dim, and the errors that their kernels raise."""

_WRAP = frozenset({"index", "index_put", "index_fill"})
"""Ops whose negative indices count from the end."""

_PER_ELEMENT = frozenset({"gather", "scatter", "scatter_add", "scatter_reduce"})
"""Ops with an index for each element, which is split like the tensor."""

_LOSSES = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
"""Losses with a class for each row."""


def indexes_nothing(call: OpCall) -> bool:
    """Whether an op has an index into an empty tensor. It runs on full tensors, so that all ranks check what one device checks."""
    name = call.info.qualified_name.removeprefix("aten::").removesuffix("_")
    return (name in _ERRORS or name in ("put", "take")) and call.tensors[0].numel() == 0


def checking_values(call: OpCall, inner: Run) -> Run:
    """The run of a call; with checks before it, if the kernels of some ranks would not do them."""
    name = call.info.qualified_name.removeprefix("aten::").removesuffix("_")
    if not any(layout.sharded for layout in call.layouts) or call.first.device.type != "cpu":
        return inner
    if name in _ERRORS and (name in _PER_ELEMENT or _some_are_empty(call)):
        return _checking_indices(call, name, inner)
    if name == "select_scatter":
        _check_position(call)
    if name in _LOSSES:
        return _checking_classes(call, inner)
    return inner


def _some_are_empty(call: OpCall) -> bool:
    """Whether a rank has an empty block of a tensor that is not empty."""
    return any(0 not in layout.shape and has_empty_blocks(layout) for layout in call.layouts)


def _check_position(call: OpCall) -> None:
    """Raise for a row that does not exist: a rank would take it for one of another rank."""
    shape, dim, index = call.named["self"].shape, call.named["dim"], call.named["index"]
    if not -shape[dim] <= index < shape[dim]:
        raise IndexError(
            f"select_scatter: index {index} is out of range for tensor of size {list(shape)} at dimension {dim}"
        )


def _checking_indices(call: OpCall, name: str, inner: Run) -> Run:
    bind, error, wraps = call.info.bind, _ERRORS[name], name in _WRAP

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for index, dim, size in _indices(bind(args, kwargs), name):
            _check(index, dim, size, wraps, error)
        return inner(args, kwargs)

    return run


def _indices(named: dict[str, Any], name: str) -> Iterator[tuple[Tensor, int, int]]:
    """The indices of a call, and the number and the size of the dim that each of them is about."""
    if name == "embedding":
        yield named["indices"], 0, named["weight"].shape[0]
        return
    x = named["self"]
    if not x.numel():
        return
    if "dim" in named:
        if x.dim():
            yield named["index"], named["dim"] % x.dim(), x.shape[named["dim"]]
        return
    dim = 0
    for index in named["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            yield index, dim, x.shape[dim]
            dim += 1


def _checking_classes(call: OpCall, inner: Run) -> Run:
    bind = call.info.bind

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = bind(args, kwargs)
        scores, target = named["self"], _known(named["target"])
        if target is not None:
            classes = scores.shape[min(scores.dim() - 1, 1)]
            wrong = (target < 0) | (target >= classes)
            wrong &= target != named["ignore_index"]
            if wrong.any():
                raise IndexError(f"Target {int(target[wrong].flatten()[0])} is out of bounds.")
        return inner(args, kwargs)

    return run


def _known(index: Tensor) -> Tensor | None:
    """The values of an index, if every rank has all of them."""
    if isinstance(index, DTensor):
        if index._spec.layout.sharded or index._spec.layout.partial:
            return None
        index = first_rank(index._local_tensor)
    return None if not index.numel() or is_recorded(index) else index


def _check(index: Tensor, dim: int, size: int, wraps: bool, error: Callable[[str], Exception]) -> None:
    known = _known(index)
    if known is None:
        return
    low, high = (int(i) for i in torch.aminmax(known))
    if low < (-size if wraps else 0) or high >= size:
        wrong = high if high >= size else low
        raise error(f"index {wrong} is out of bounds for dimension {dim} with size {size}")
