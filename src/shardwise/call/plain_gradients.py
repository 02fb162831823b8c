"""Gradients of plain tensors that count as replicated operands: plain, as the tensors are, wherever they go from there.

Autograd computes them from those of DTensors, and would hand DTensors to plain parameters, and to functions that know plain tensors only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.call.op_call import OpCall
from shardwise.call.route import Run
from shardwise.comm import first_rank, is_simulated
from shardwise.layout import Replicate
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import in_backward

__all__ = ["takes_plain_operands", "with_plain_gradients"]


def takes_plain_operands(call: OpCall) -> bool:
    """Whether a call of the program has plain operands."""
    return not in_backward() and any(type(t) in (Tensor, nn.Parameter) for t in call.tensors)


def with_plain_gradients(inner: Run) -> Run:
    """The run of a call with plain operands, whose gradients will be plain."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                for t in value if isinstance(value, list | tuple) else (value,):
                    if type(t) in (Tensor, nn.Parameter) and t.requires_grad:
                        _watch(t)
        return inner(args, kwargs)

    return run


def _watch(t: Tensor) -> None:
    hooks: Any = t._backward_hooks
    if not (
        t.is_leaf and hooks and _plain_gradient in hooks.values()
    ):  # parameters keep theirs from step to step
        t.register_hook(_plain_gradient)


def _plain_gradient(grad: Tensor) -> Tensor | None:
    if not isinstance(grad, DTensor):
        return None
    if not is_simulated():
        return grad.full_tensor()
    if torch.is_grad_enabled() and grad.requires_grad:
        return None  # it is differentiated again, and one tensor cannot be a part of the graphs of all ranks
    full = grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
    return first_rank(full._local_tensor).clone()
