"""Ops on a rank that is not on the mesh: it holds no elements, but its results have the right shape and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_leaves, replace_tensors
from shardwise.call.fallback import drawing_alike
from shardwise.call.meta import on_meta
from shardwise.call.op_call import OpCall
from shardwise.layout import LayoutError, Spec
from shardwise.tensor.construct import replicate, replicated_spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.sparse_tensor import holds_sparse
from shardwise.torch_internals.autograd import in_backward

__all__ = ["run_off_mesh"]

aten = torch.ops.aten

# Their results depend on how many elements a sparse tensor has.
_COUNT_ELEMENTS = {
    getattr(aten, name).default
    for name in "_nnz is_coalesced indices _indices values _values col_indices row_indices".split()
}


def run_off_mesh(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[Spec] | None
) -> Any:
    """The results of a call without elements; `specs` are theirs on the mesh, or None if they are replicated there."""
    call = OpCall(func, args, kwargs)
    if specs is None:  # on the mesh it runs as the fallback, where a random op advances the stream
        drawing_alike(func, args, kwargs, call.mesh)
    if call.written and (call.returned is not None or not call.info.returns):
        return call.returned
    sparse = any(map(holds_sparse, call.tensors))
    if sparse and func in _COUNT_ELEMENTS and not in_backward():
        raise _needs_values(call)
    try:
        result = _run_on(_without_values if sparse else on_meta, call)
    except RuntimeError as error:
        result = None if sparse else _empty_sparse_result(call)
        if result is None:
            raise _needs_values(call) from error
        specs = None
    return _without_elements(result, call, None if specs is None else iter(specs))


def _needs_values(call: OpCall) -> LayoutError:
    return LayoutError(
        f"{call.func} was called on a rank that is not on the mesh {call.mesh}.",
        why="This rank holds no elements of the tensor, and the result of the op depends on its values.",
        fix="Call it only where mesh.get_coordinate() is not None.",
    )


def _run_on(placeholder: Callable[[Tensor], Tensor], call: OpCall) -> Any:
    """The result of a call with each tensor replaced by a placeholder."""
    by_id = {id(t): placeholder(t) for t in call.tensors}
    return call.func(*replace_tensors(call.args, by_id), **replace_tensors(call.kwargs, by_id))


def _without_values(t: Tensor) -> Tensor:
    """A tensor of the same shape that needs no memory: zeros expanded, or a sparse one without elements."""
    if isinstance(t, DTensor) and holds_sparse(t):
        return t._local_tensor
    return t if holds_sparse(t) else torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape)


def _empty_sparse_result(call: OpCall) -> Tensor | None:
    """The result, without elements, of an op that creates a sparse tensor; None for any other op."""
    try:
        result = _run_on(_without_values, call)
    except RuntimeError:
        return None
    return result if isinstance(result, Tensor) and holds_sparse(result) else None


def _without_elements(result: Any, call: OpCall, specs: Iterator[Spec] | None) -> Any:
    def wrapped(r: Any) -> Any:
        if not isinstance(r, Tensor):
            return r
        if holds_sparse(r):
            return replicate(r, call.mesh)
        spec = replicated_spec(r, call.mesh) if specs is None else next(specs)
        block = call.first._local_tensor
        # as in torch, a tensor without dims has a value on every rank
        return DTensor(
            block.new_zeros((), dtype=r.dtype) if r.ndim == 0 else block.new_empty(0, dtype=r.dtype), spec
        )

    return map_leaves(wrapped, result)
