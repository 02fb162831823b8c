"""Writes to memory that the same op reads: refused where one device refuses them.

Blocks that share memory are checked by their kernel. This module finds the overlaps that it does not see, because a view had
to move or an operand was gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.call.op_call import OpCall
from shardwise.call.writes import shares_memory
from shardwise.comm import PerRank
from shardwise.layout import LayoutError
from shardwise.tensor.dtensor import DTensor

__all__ = ["FORBIDS_ALIAS", "check_overlap"]

FORBIDS_ALIAS = frozenset(
    "aten::" + name
    for name in (
        "scatter_ scatter_add_ scatter_reduce_ index_copy_ index_add_ index_fill_ index_reduce_ index_put_ put_"
    ).split()
)
"""In-place ops that refuse an operand that is the tensor itself; elementwise ops refuse only one that is shifted."""


def check_overlap(call: OpCall) -> None:
    """Raise if an op writes to memory that another operand has, too, where one device raises."""
    if call.info.qualified_name == "aten::masked_scatter_":
        return  # torch does not check it
    forbids_alias = call.info.qualified_name in FORBIDS_ALIAS
    for target in call.written:
        for other in call.tensors:
            if isinstance(target, DTensor) and isinstance(other, DTensor) and other is not target:
                _check_pair(call, target, other, forbids_alias)
    if forbids_alias and sum(t is call.returned for t in call.tensors) > 1:
        raise _error(call, call.returned)


def _check_pair(call: OpCall, target: DTensor, other: DTensor, forbids_alias: bool) -> None:
    roots = _root(target), _root(other)
    if not shares_memory(*roots) or not _same_blocks(*roots):
        return
    base = target if target._source is None else _root_tensor(target)
    if base._spec.stride is None:
        return
    whole = torch.empty_strided(base.shape, base._spec.stride, dtype=base.dtype, device="meta")
    a, b = _on(whole, target), _on(whole, other)
    if not (_is_dense(a) and _is_dense(b)):
        return
    same = (a.storage_offset(), a.shape, a.stride()) == (b.storage_offset(), b.shape, b.stride())
    apart = (
        a.storage_offset() + a.numel() <= b.storage_offset()
        or b.storage_offset() + b.numel() <= a.storage_offset()
    )
    if not apart and a.numel() and b.numel() and (forbids_alias or not same):
        raise _error(call, target)


def _error(call: OpCall, target: DTensor) -> Exception:
    return LayoutError(
        f"{call.func}: unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
        f"memory location. Please clone() the tensor before performing the operation.",
        why=f"An operand shares memory with {target._spec}, which the op writes to.",
        fix="Pass x.clone() for the operand.",
    )


def _root_tensor(x: DTensor) -> DTensor:
    while x._source is not None:
        x = x._source.base
    return x


def _root(x: DTensor) -> Tensor:
    return _root_tensor(x)._local_tensor


def _same_blocks(a: Tensor, b: Tensor) -> bool:
    """Whether two blocks that share memory are the same elements of it."""
    if isinstance(a, PerRank) and isinstance(b, PerRank):
        return all(_same_blocks(x, b.of_rank(r)) for r, x in a._blocks.items())
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def _on(whole: Tensor, x: DTensor) -> Tensor:
    """The view of a full tensor that a DTensor is."""
    source = x._source
    if source is None:
        return whole
    out = source.func(_on(whole, source.base), *source.args, **source.kwargs)
    return out if source.number is None else out[source.number]  # type: ignore[no-any-return]


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of a tensor fill its memory without gaps, each once."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
