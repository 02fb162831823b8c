"""Gradients in other layouts than their parameters, as ops leave them: moved together, when a step or clipping reads them.

A backward pass leaves a gradient where its ops computed it: ranks with other rows of a batch hold terms of its sum. Micro-batches are
then added without communication, as torch's DTensor adds them. Reading such a gradient is right as well, since its layout says
what is pending, but each reader would reduce it anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.call.moved_view import move_in_place
from shardwise.comm.local_mode import outside_local_mode
from shardwise.comm.recording import recorders
from shardwise.layout import Layout
from shardwise.plan.settings import current_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.gradient_methods import gradient_of, is_known_gradient, set_gradient
from shardwise.tensor.redistribute_many import redistribute_many
from shardwise.torch_internals.patches import PythonPatch

__all__ = [
    "gradient_patches",
    "is_watched",
    "settle_before_steps",
    "settle_gradients",
    "wait_in_layout",
    "watch",
]

_KEPT = "_shardwise_gradient"
_WATCHED = "_shardwise_watched"
_MOST = 1 << 24
"""So many bytes per rank are moved together at most, since a buffer holds all of them."""


@outside_local_mode
def settle_gradients(params: Iterable[Any]) -> None:
    """Move the gradients of parameters into the parameters' layouts, with few collectives.

    If implicit communication is not allowed, only those of parameters that are watched, for which the program has asked for it: ops
    that read the others then raise or warn.
    """
    waiting = {id(p): p for p in params if isinstance(p, DTensor) and _is_unsettled(p)}
    if waiting and current_settings().implicit != "allow":
        waiting = {i: p for i, p in waiting.items() if is_watched(p)}
    for some in _buckets(list(waiting.values())):
        grads: list[Any] = [gradient_of(p) for p in some]
        with torch.no_grad():
            found = redistribute_many(grads, [p.sharding for p in some])
            for p, pending, grad in zip(some, grads, found, strict=True):
                _replace(p, pending, grad)


def _replace(p: Tensor, pending: DTensor, grad: DTensor) -> None:
    """Let a settled gradient take the place of a pending one, also for those who have that or views of it.

    A program that is captured has it as a result: the pending one has values, and becomes none without.
    """
    if recorders:
        set_gradient(p, grad)
        return
    owner, kept = p.__dict__.pop(_KEPT, (None, None))
    if owner == id(p) and isinstance(kept, DTensor) and kept._spec is grad._spec:
        kept.copy_(grad)
        pending._adopt(kept)
    elif is_known_gradient(pending):
        move_in_place(pending, grad)
    else:
        set_gradient(p, grad)


def watch(p: Tensor) -> None:
    """Note that the gradient of a parameter belongs in the parameter's layout, as the styles of `parallel` say."""
    # the id, because a copy has the attributes of the original and none of its hooks
    setattr(p, _WATCHED, id(p))


def is_watched(p: Tensor) -> bool:
    """Whether `watch` was called for this parameter itself."""
    return getattr(p, _WATCHED, None) == id(p)


def _is_unsettled(p: DTensor) -> bool:
    grad: Any = gradient_of(p)
    if grad is None or not isinstance(grad, DTensor) or grad._spec.layout is p._spec.layout:
        return False
    return (
        not grad.requires_grad  # the graph of a second derivative goes through it
        and not grad.is_sparse
        and grad.device_mesh == p.device_mesh
        and grad.shape == p.shape
    )


def _buckets(params: Sequence[Any]) -> list[list[Any]]:
    """Parameters in their order, in parts whose gradients have so many bytes together."""
    out: list[list[Any]] = []
    size = 0
    for p in params:
        # the whole tensor's bytes, so that ranks with blocks of other sizes decide alike
        grad: Any = gradient_of(p)
        nbytes = grad.numel() * grad.dtype.itemsize
        if not out or size + nbytes > _MOST:
            out.append([])
            size = 0
        out[-1].append(p)
        size += nbytes
    return out


@outside_local_mode
def wait_in_layout(p: Tensor, grad: DTensor, layout: Layout) -> None:
    """Let a settled gradient be one in another layout for a while, to which others are added, and then be settled in its memory.

    It stays the same object, except in a program that is captured. Views of it have what is added only when it is settled.
    """
    if recorders:
        set_gradient(p, grad.redistribute(placements=layout.placements))
        return
    memory = DTensor(grad._local_tensor, grad._spec) if grad._source is None else grad._same_view()  # type: ignore[attr-defined]
    # the id, because a copy of the parameter has its attributes
    setattr(p, _KEPT, (id(p), memory))
    grad._adopt(grad.redistribute(placements=layout.placements))


def settle_before_steps() -> None:
    """Settle gradients before each step of an optimizer."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        settle_gradients(p for group in optimizer.param_groups for p in group["params"])


def _clip(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(parameters, Tensor):
        parameters = list(parameters)
    if not torch.compiler.is_compiling():
        settle_gradients([parameters] if isinstance(parameters, Tensor) else parameters)
    return original(parameters, *args, **kwargs)


def _unscale(original: Any, scaler: Any, optimizer: Any) -> Any:
    _before_step(optimizer, (), {})
    return original(scaler, optimizer)


def gradient_patches() -> list[PythonPatch]:
    """The patches of functions that read the gradients of parameters."""
    reason = "a pending gradient is reduced once, with all others, and not by each op that reads it"
    utils = torch.nn.utils
    clips = [(m, n) for m in (utils, utils.clip_grad) for n in ("clip_grad_norm_", "clip_grad_value_")]
    return [
        *(PythonPatch(target, _clip, reason) for target in clips),
        PythonPatch((torch.amp.GradScaler, "unscale_"), _unscale, reason),
    ]
