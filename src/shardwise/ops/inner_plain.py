"""Functions of torch that create plain tensors on the way: these are the same on every rank, if the operands are DTensors.

The operands are checked when such a function is called. Inside it, plain tensors count as replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_leaves, tensors_in
from shardwise.call.op_call import OpCall
from shardwise.call.operands import compare_plain, has_dtensor, has_one_value, plain_counts
from shardwise.ops.dropout import attention_with_dropout, uses_dropout
from shardwise.ops.one_device import one_device
from shardwise.plan.settings import current_settings, override_settings
from shardwise.tensor.construct import replicate
from shardwise.tensor.dtensor import DTensor, is_simulated_tensor
from shardwise.tensor.errors import mixed_tensors_error
from shardwise.torch_internals.autograd import in_backward
from shardwise.torch_internals.patches import KernelPatch, PythonPatch, beneath_patches, python_functions
from shardwise.torch_internals.python_functions import CREATE_PLAIN_TENSORS, DISTRIBUTIONS, PASS_PLAIN_TENSORS

__all__ = ["inner_plain_patches", "replicated_states"]

aten = torch.ops.aten


def _check_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse or compare plain operands, according to the policy."""
    tensors = tensors_in([*args, *kwargs.values()])
    first = next(t for t in tensors if isinstance(t, DTensor))
    plain = [t for t in tensors if not isinstance(t, DTensor) and not has_one_value(t)]
    if not plain or in_backward():
        return
    if not plain_counts(func):
        raise mixed_tensors_error(func, plain[0], first._spec)
    if current_settings().plain == "check" and not is_simulated_tensor(first):
        compare_plain(func, plain, list(range(len(plain))), first.device_mesh)


def _composite(func: Any) -> Callable[..., Any]:
    """A composite op: torch's own kernel, with the plain tensors that it creates counting as replicated."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _check_operands(func, args, kwargs)
        with override_settings(plain="replicate"), beneath_patches():
            result = func(*args, **kwargs)
        return _replicated(result, args) if type(result) is Tensor else result

    return run


def _replicated(result: Tensor, args: tuple[Any, ...]) -> DTensor:
    """A result that a composite op created and not computed, as for empty operands."""
    first = next(t for t in tensors_in(args) if isinstance(t, DTensor))
    return replicate(result, first.device_mesh, simulated=is_simulated_tensor(first))


def _loss(func: Any) -> Callable[..., Any]:
    """A composite loss: inside of `loss_parallel` its plain targets and weights count as replicated in the ops that it is made of."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if current_settings().plain != "losses":
            with beneath_patches():
                return func(*args, **kwargs)
        compare = any(
            is_simulated_tensor(t) for t in tensors_in([*args, *kwargs.values()]) if isinstance(t, DTensor)
        )
        with override_settings(plain="check" if compare else "replicate"), beneath_patches():
            return func(*args, **kwargs)

    return run


def _attention(*args: Any, **kwargs: Any) -> Any:
    func = aten.scaled_dot_product_attention.default
    if uses_dropout(args, kwargs):
        _check_operands(func, args, kwargs)
        with override_settings(plain="replicate"):
            return attention_with_dropout(*args, **kwargs)
    return _composite(func)(*args, **kwargs)


def replicated_states(func: Any, x: DTensor, states: Any) -> Any:
    """The initial states of a recurrent layer: those that are plain are compared between ranks, and replicated."""
    mesh, simulated = x.device_mesh, is_simulated_tensor(x)

    def state(t: Any) -> Any:
        if isinstance(t, DTensor) or not isinstance(t, Tensor):
            return t
        if not simulated and not in_backward():
            compare_plain(func, [t], [0], mesh)
        return replicate(t, mesh, simulated=simulated)

    return map_leaves(state, states)


def _recurrent(func: Any) -> Callable[..., Any]:
    """A recurrent op: its initial states, which torch's modules create, are compared between ranks and replicated."""

    def run(x: Any, hx: Any, *args: Any, **kwargs: Any) -> Any:
        states = replicated_states(func, OpCall(func, (x, hx, *args), kwargs).first, hx)
        with beneath_patches():
            return func(x, states, *args, **kwargs)

    return run


def _trusting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A Python function of torch that torch calls, with plain tensors that torch created."""
    if not has_dtensor(args, kwargs):
        return original(*args, **kwargs)
    with one_device(), override_settings(plain="replicate"):
        return original(*args, **kwargs)


def _python(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A Python function of torch; random numbers that it draws come from the stream."""
    if has_dtensor(args, kwargs):
        _check_operands(original.__name__, args, kwargs)
    return _trusting(original, *args, **kwargs)


def _of_distribution(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of a probability distribution, whose parameters may be DTensors; what it draws comes from the stream."""
    given = (*vars(self).values(), *args, *kwargs.values())
    inner = [
        v for part in given if isinstance(part, torch.distributions.Distribution) for v in vars(part).values()
    ]
    first = next((t for t in tensors_in([*given, *inner]) if isinstance(t, DTensor)), None)
    if first is None:
        return original(self, *args, **kwargs)
    _check_operands(f"{type(self).__name__}.{original.__name__}", (first, *given), {})
    with one_device(), override_settings(plain="replicate"):
        result = original(self, *args, **kwargs)
    return _replicated(result, (first,)) if type(result) is Tensor else result


def _broadcast(original: Callable[..., Any], *tensors: Any) -> Any:
    """`broadcast_tensors`, with numbers as replicated tensors: broadcast, they would be plain tensors of many elements."""
    given = tensors_in(tensors)
    first = next((t for t in given if isinstance(t, DTensor)), None)
    if first is None:
        return original(*tensors)

    def number(t: Any) -> Any:
        is_number = type(t) is Tensor and t.numel() == 1 and not t.requires_grad
        return _replicated(t, (first,)) if is_number else t

    return original(*[map_leaves(number, t) for t in tensors])


_COMPOSITES = {
    "the positions of quantiles": (
        aten.quantile.default, aten.quantile.scalar, aten.nanquantile.default, aten.nanquantile.scalar,
    ),
    "the lengths of targets": (aten.ctc_loss.IntList, aten.ctc_loss.Tensor),
    "the window": (aten.istft.default, aten.stft.default, aten.stft.center),
    "the mask of combined elements": (aten.combinations.default,),
    "the sum that the product is added to": (aten._sparse_mm.default,),
    "the integral of an empty tensor": (aten.trapezoid.x, aten.trapezoid.dx, aten.trapz.x, aten.trapz.dx),
    "the identity matrix": (aten.linalg_matrix_power.default, aten.matrix_power.default),
}  # fmt: skip
_LOSSES = (aten.cross_entropy_loss.default, aten.kl_div.default, aten.l1_loss.default)
_RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def inner_plain_patches() -> list[KernelPatch | PythonPatch]:
    """The patches of these functions."""
    attention = aten.scaled_dot_product_attention.default
    masks = "torch creates causal masks as plain tensors, and kernels draw dropout by position in the block"
    states = "torch's modules create initial states as plain tensors"
    return [
        *(
            KernelPatch(func, _composite(func), f"torch creates {what} as a plain tensor", has_dtensor)
            for what, funcs in _COMPOSITES.items()
            for func in funcs
        ),
        KernelPatch(attention, _attention, masks, has_dtensor),
        *(
            KernelPatch(
                func, _loss(func), "targets and weights reach the ops that it is made of", has_dtensor
            )
            for func in _LOSSES
        ),
        PythonPatch(
            (torch, "broadcast_tensors"),
            _broadcast,
            "torch.distributions passes numbers as plain tensors, and computes with the results",
        ),
        *(KernelPatch(func, _recurrent(func), states, has_dtensor) for func in _RECURRENT),
        *(
            PythonPatch(target, run, f"torch creates {what} as a plain tensor")
            for run, table in ((_python, CREATE_PLAIN_TENSORS), (_trusting, PASS_PLAIN_TENSORS))
            for name, what in table.items()
            for target in python_functions([name])
        ),
        *(
            PythonPatch(target, _of_distribution, "torch creates random numbers or values as a plain tensor")
            for name, methods in DISTRIBUTIONS.items()
            for target in python_functions(f"torch.distributions.{name}.{method}" for method in methods)
        ),
    ]
