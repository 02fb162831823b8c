"""Ops that take or create sparse tensors: on the full tensor, which every rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.call.fallback import run_on_full
from shardwise.call.op_call import OpCall
from shardwise.call.route import Run
from shardwise.ops.sparse_dense import ON_BLOCKS
from shardwise.tensor.construct import replicate
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.sparse_tensor import holds_sparse
from shardwise.torch_internals.autograd import in_backward
from shardwise.torch_internals.dispatcher import below_autograd

__all__ = ["involves_sparse", "sparse_run"]

aten = torch.ops.aten


def involves_sparse(call: OpCall) -> bool:
    """Whether a call takes a sparse tensor, or asks for one by its layout."""
    wanted = call.kwargs.get("layout")
    return wanted not in (None, torch.strided) or any(map(holds_sparse, call.tensors))


def sparse_run(func: Any) -> Run:
    """How such a call runs."""
    if func in _OWN:
        return _OWN[func]
    on_blocks = ON_BLOCKS.get(func)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if on_blocks is not None and (result := on_blocks(func, args, kwargs)) is not None:
            return result
        result = run_on_full(func, args, kwargs)
        for t in OpCall(func, args, kwargs).written:
            # in-place ops may change the shape of sparse tensors
            if isinstance(t, DTensor) and holds_sparse(t) and t._local_tensor.shape != t.shape:
                t.data = replicate(t._local_tensor, t.device_mesh)
        return result

    return run


def _layout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]._local_tensor.layout


def _new_empty_strided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Memory for a gradient: torch asks for a sparse layout where the gradient of a sparse tensor is dense."""
    func = aten.new_empty_strided.default
    if in_backward() and not holds_sparse(args[0]):
        return func(*args, **{k: v for k, v in kwargs.items() if k != "layout"})
    return run_on_full(func, args, kwargs)


def _recording_for_backward(func: Any) -> Run:
    """A kernel that records what its backward needs only if its inputs require gradients, which blocks never do."""

    def run(*args: Any) -> Any:
        with below_autograd():
            return func(*(a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in args))

    return lambda args, kwargs: run_on_full(func, args, kwargs, run=run)


_OWN: dict[Any, Run] = {
    torch.ops.prim.layout.default: _layout,
    aten.new_empty_strided.default: _new_empty_strided,
    aten._sparse_mm_reduce_impl.default: _recording_for_backward(aten._sparse_mm_reduce_impl.default),
}
