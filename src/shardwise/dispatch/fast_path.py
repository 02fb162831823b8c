"""Closures for calls whose blocks lie as the op wants them: run the op, wrap what comes out. Nothing else is on the path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor

__all__ = [
    "Run",
    "any_args",
    "binary",
    "binding",
    "in_place",
    "listed",
    "programmed",
    "seen_as",
    "several",
    "unary",
    "wrapped",
]

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_new: Any = torch.Tensor._dtensor__new__

# Ops whose Python binding takes what the op takes, in the same order: it is quicker than the op's boxed call.
_BOUND = frozenset(
    "add sub mul div neg exp log sqrt rsqrt reciprocal tanh sigmoid relu sin cos abs pow where eq ne lt le gt ge "
    "maximum minimum logical_not bitwise_not isnan isfinite sign floor ceil round trunc erf expm1 log1p sub "
    "mm bmm mv addmm baddbmm t transpose permute clone _softmax _log_softmax sum mean amax amin "
    "zeros_like ones_like cat embedding unsqueeze native_layer_norm".split()
)
_BOUND_METHODS = frozenset("detach select".split())
_BOUND_NN = frozenset("gelu silu mish softplus hardtanh hardswish hardsigmoid leaky_relu elu".split())


def binding(func: Any) -> Callable[..., Any]:
    """The quickest way to call an op on blocks."""
    name = func._schema.name.removeprefix("aten::")
    if name == "split":
        return torch._VF.split  # type: ignore[no-any-return, attr-defined]  # torch.split is Python code
    if name in _BOUND_METHODS:
        return getattr(torch._C.TensorBase, name)  # type: ignore[no-any-return]
    if name in _BOUND:
        return getattr(torch, name)  # type: ignore[no-any-return]
    if name in _BOUND_NN:
        return getattr(torch._C._nn, name)  # type: ignore[no-any-return]
    return func._op  # type: ignore[no-any-return]


def unary(op: Callable[..., Tensor], spec: Spec) -> Run:
    """An op of one tensor, which is its first argument."""

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        block = op(args[0]._local_tensor, *args[1:], **kwargs)
        return _new(DTensor, block, spec, False)  # type: ignore[no-any-return]

    return go


_OVER_DIMS = frozenset({"aten::sum", "aten::mean", "aten::amax", "aten::amin"})
_AS_EVER = {"pin_memory": False}  # what torch says of every new tensor


def constant(func: Any, spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    """An op of one tensor whose other arguments are the same in each call that comes here."""
    quick = _quick(func, spec, args, kwargs)
    if quick is not None:
        return quick
    op = binding(func)
    if func._schema.name in _OVER_DIMS and len(args) > 1 and type(args[1]) is list and len(args[1]) == 1:
        args = (args[0], args[1][0], *args[2:])  # one dim is read sooner than a list of one
    if len(args) == 1 and (not kwargs or kwargs == _AS_EVER):
        return lambda args, kwargs: _new(DTensor, op(args[0]._local_tensor), spec, False)
    if len(args) == 2 and not kwargs:
        a = args[1]
        return lambda args, kwargs: _new(DTensor, op(args[0]._local_tensor, a), spec, False)
    if len(args) == 3 and not kwargs:
        b, c = args[1:]
        return lambda args, kwargs: _new(DTensor, op(args[0]._local_tensor, b, c), spec, False)
    return unary(op, spec)


def _quick(func: Any, spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """A quicker way to the same result for ops whose own call is slow."""
    if func is torch.ops.aten.slice.Tensor and not kwargs and 1 < len(args) < 5:
        start, end = (*args[2:], None, None)[:2]  # slice(3) would end at 3, not begin there
        cut = (slice(None),) * (args[1] % args[0].dim()) + (slice(start, end),)
        return lambda args, kwargs: _new(DTensor, args[0]._local_tensor[cut], spec, False)
    if func is torch.ops.aten._to_copy.default and len(args) == 1 and kwargs.keys() == {"dtype"}:
        dtype = kwargs["dtype"]
        if dtype not in (None, args[0].dtype):  # another dtype is always a copy
            return lambda args, kwargs: _new(DTensor, args[0]._local_tensor.type(dtype), spec, False)
    return None


def binary(op: Callable[..., Tensor], spec: Spec, alone: bool) -> Run:
    """An op of two tensors, which are its first arguments, or, `alone`, its only ones."""
    if alone:

        def pair(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
            x, y = args
            block = op(x._local_tensor, y._local_tensor)
            return _new(DTensor, block, spec, False)  # type: ignore[no-any-return]

        return pair

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        block = op(args[0]._local_tensor, args[1]._local_tensor, *args[2:], **kwargs)
        return _new(DTensor, block, spec, False)  # type: ignore[no-any-return]

    return go


def ternary(op: Callable[..., Tensor], spec: Spec) -> Run:
    """An op of three tensors and nothing else."""

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        x, y, z = args
        block = op(x._local_tensor, y._local_tensor, z._local_tensor)
        return _new(DTensor, block, spec, False)  # type: ignore[no-any-return]

    return go


def _blocks(args: tuple[Any, ...], at: tuple[int, ...]) -> list[Any]:
    out = list(args)
    for i in at:
        out[i] = out[i]._local_tensor
    return out


def any_args(op: Callable[..., Tensor], at: tuple[int, ...], spec: Spec) -> Run:
    """An op with tensors at some places among its arguments."""
    return lambda args, kwargs: _new(DTensor, op(*_blocks(args, at), **kwargs), spec, False)


def in_place(op: Callable[..., Any], at: tuple[int, ...]) -> Run:
    """An op that writes to its first argument and returns it."""

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op(*_blocks(args, at), **kwargs)
        return args[0]

    return go


def listed(op: Callable[..., Tensor], spec: Spec) -> Run:
    """An op of a list of tensors, which is its first argument."""

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        if len(args) == 2 and not kwargs:
            return _new(DTensor, op([t._local_tensor for t in args[0]], args[1]), spec, False)  # type: ignore[no-any-return]
        block = op([t._local_tensor for t in args[0]], *args[1:], **kwargs)
        return _new(DTensor, block, spec, False)  # type: ignore[no-any-return]

    return go


def several(op: Callable[..., Any], at: tuple[int, ...], specs: tuple[Spec, ...]) -> Run:
    """An op with several results, or a list of them."""

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        blocks = (
            op(args[0]._local_tensor, *args[1:], **kwargs) if at == (0,) else op(*_blocks(args, at), **kwargs)
        )
        if len(blocks) != len(specs):  # some of them None
            return wrapped(blocks, iter(specs))
        return [_new(DTensor, b, s, False) for b, s in zip(blocks, specs, strict=True)]

    return go


def programmed(program: Callable[[Sequence[Tensor]], Any], at: tuple[int, ...], spec: Spec) -> Run:
    """A program on the blocks in place of the op."""
    if at == (0,):
        return lambda args, kwargs: _new(DTensor, program((args[0]._local_tensor,)), spec, False)
    return lambda args, kwargs: _new(DTensor, program([args[i]._local_tensor for i in at]), spec, False)


def seen_as(shape: Sequence[int], spec: Spec, otherwise: Run) -> Run:
    """A view of a block in another shape; where its strides do not allow one, `otherwise`."""

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            block = args[0]._local_tensor.view(shape)
        except RuntimeError:
            return otherwise(args, kwargs)
        return _new(DTensor, block, spec, False)

    return go


def wrapped(result: Any, specs: Iterator[Spec]) -> Any:
    """What an op returned with its tensors wrapped."""
    if isinstance(result, Tensor):
        return _new(DTensor, result, next(specs), False)
    if isinstance(result, list | tuple):
        return type(result)([wrapped(r, specs) for r in result])
    return result  # None where a mask leaves an output out, or a number
