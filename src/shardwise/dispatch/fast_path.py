"""The fast path: closures for calls whose blocks need not move. They run the op and wrap its result, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.call.execute import execute, wrap
from shardwise.call.meta import MASKED
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.call.route import Run
from shardwise.call.schema import op_info
from shardwise.comm import coord_of
from shardwise.dispatch.key import ONE_TENSOR, new_entry
from shardwise.layout import Spec, block_shape
from shardwise.layout.sizes import same_sizes
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.dispatcher import python_binding
from shardwise.torch_internals.subclass import new_dtensor

__all__ = ["Recipe", "direct_run", "recipe_of"]

aten = torch.ops.aten


class Recipe(NamedTuple):
    """What a direct run does, for code that does the same without Python.

    Attributes:
        kind: the op runs on the blocks; or it does, and returns its first argument; or the block is viewed in `shape`.
        specs: the specs of the results.
        shape: the shape of the block of a view.
    """

    kind: Literal["direct", "in-place", "view"]
    specs: tuple[Spec, ...] = ()
    shape: tuple[int, ...] = ()


_RECIPE = "recipe"


def recipe_of(run: Run | None) -> Recipe | None:
    """The recipe of a run; None where it is more than an op on the blocks."""
    return getattr(run, _RECIPE, None)


def direct_run(call: OpCall, resolution: Resolution) -> Run | None:
    """The shortest run there is, where nothing moves and this process has one rank; None otherwise."""
    run = _direct_run(call, resolution)
    if run is not None and not hasattr(run, _RECIPE) and resolution.programs is None:
        kind: Literal["direct", "in-place"] = "in-place" if call.info.writes else "direct"
        setattr(run, _RECIPE, Recipe(kind, resolution.outputs))
    return run


def _direct_run(call: OpCall, resolution: Resolution) -> Run | None:
    if any(resolution.moves) or resolution.simulated or resolution.replicated or call.func in MASKED:
        return None
    func, args, kwargs, info = call.func, call.args, call.kwargs, call.info
    positions = tuple(i for i, a in enumerate(args) if isinstance(a, DTensor))
    all_positional = len(positions) == len(resolution.moves)
    if resolution.is_view:
        return _direct_view(call, resolution)
    if resolution.programs is not None:
        program = resolution.programs[None]
        if program is None or not info.returns_tensor or not all_positional or info.writes:
            return None
        return by_program(program, positions, resolution.outputs[0])
    if not all_positional:
        tensors = args[0] if args and isinstance(args[0], list | tuple) else ()
        is_list = len(tensors) == len(resolution.moves) and all(isinstance(t, DTensor) for t in tensors)
        if is_list and info.returns_tensor and not info.writes:
            return listed(python_binding(func), resolution.outputs[0])
        return None
    if info.writes:
        first = info.returned is not None and info.returned[0] == positions[0] == 0
        return in_place(python_binding(func), positions, len(args), bool(kwargs)) if first else None
    if not info.returns_tensor:
        return several(python_binding(func), positions, resolution.outputs)
    op, spec = python_binding(func), resolution.outputs[0]
    if positions == (0,):
        # of such ops all other arguments are in the key
        if new_entry(func).form is ONE_TENSOR:
            return constant(func, spec, args, kwargs)
        return with_number(op, spec) if len(args) == 2 and not kwargs else unary(op, spec)
    if positions == (0, 1):
        return binary(op, spec, alone=len(args) == 2 and not kwargs)
    if positions == (0, 1, 2) and len(args) == 3 and not kwargs:
        return ternary(op, spec)
    return any_args(op, positions, spec)


def _direct_view(call: OpCall, resolution: Resolution) -> Run | None:
    func, shape, spec = call.func, resolution.view_shape, resolution.outputs[0]
    if shape is None or resolution.programs is None or call.info.name.split(".")[1].endswith("_copy"):
        return None
    if func is aten.unsqueeze.default:
        block = torch.empty(block_shape(call.layouts[0], coord_of(call.mesh) or ()), device="meta")
        # a block without elements may be empty along another dim
        if same_sizes(func(block, *call.args[1:]).shape, shape):
            run = constant(func, spec, call.args, call.kwargs)
            setattr(run, _RECIPE, Recipe("direct", (spec,)))
            return run
    return view_as(shape, spec, lambda a, k: execute(func, resolution, a, k))


def unary(op: Callable[..., Tensor], spec: Spec) -> Run:
    """An op whose only tensor is its first argument."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        block = op(args[0]._local_tensor, *args[1:], **kwargs)
        return new_dtensor(DTensor, block, spec, False)  # type: ignore[no-any-return]

    return run


def with_number(op: Callable[..., Tensor], spec: Spec) -> Run:
    """An op of one tensor and one other argument."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        x, y = args
        return new_dtensor(DTensor, op(x._local_tensor, y), spec, False)  # type: ignore[no-any-return]

    return run


_OVER_DIMS = frozenset({"aten::sum", "aten::mean", "aten::amax", "aten::amin"})
_USUAL_KWARGS = {"pin_memory": False}  # torch passes this for every new tensor


def constant(func: Any, spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    """An op of one tensor whose other arguments are part of the key, and so the same in each call."""
    quick = _quicker(func, spec, args, kwargs)
    if quick is not None:
        return quick
    op = python_binding(func)
    if (
        op_info(func).qualified_name in _OVER_DIMS
        and len(args) > 1
        and type(args[1]) is list
        and len(args[1]) == 1
    ):
        args = (args[0], args[1][0], *args[2:])  # torch parses a number faster than a list
    if len(args) == 1 and (not kwargs or kwargs == _USUAL_KWARGS):
        return lambda args, kwargs: new_dtensor(DTensor, op(args[0]._local_tensor), spec, False)
    if len(args) == 2 and not kwargs:
        a = args[1]
        return lambda args, kwargs: new_dtensor(DTensor, op(args[0]._local_tensor, a), spec, False)
    if len(args) == 3 and not kwargs:
        b, c = args[1:]
        return lambda args, kwargs: new_dtensor(DTensor, op(args[0]._local_tensor, b, c), spec, False)
    return unary(op, spec)


def _quicker(func: Any, spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """Another call with the same result, for ops whose own call is slow."""
    if func is aten.slice.Tensor and not kwargs and 1 < len(args) < 5:
        start, end = (*args[2:], None, None)[:2]  # slice(3) would be the end, not the start
        index = (slice(None),) * (args[1] % args[0].dim()) + (slice(start, end),)
        return lambda args, kwargs: new_dtensor(DTensor, args[0]._local_tensor[index], spec, False)
    if func is aten._to_copy.default and len(args) == 1 and kwargs.keys() == {"dtype"}:
        dtype = kwargs["dtype"]
        if dtype not in (None, args[0].dtype):  # a cast always copies
            return lambda args, kwargs: new_dtensor(DTensor, args[0]._local_tensor.type(dtype), spec, False)
    return None


def binary(op: Callable[..., Tensor], spec: Spec, alone: bool) -> Run:
    """An op whose only tensors are its first two arguments; `alone` if it has no others."""
    if alone:

        def pair(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
            x, y = args
            block = op(x._local_tensor, y._local_tensor)
            return new_dtensor(DTensor, block, spec, False)  # type: ignore[no-any-return]

        return pair

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        block = op(args[0]._local_tensor, args[1]._local_tensor, *args[2:], **kwargs)
        return new_dtensor(DTensor, block, spec, False)  # type: ignore[no-any-return]

    return run


def ternary(op: Callable[..., Tensor], spec: Spec) -> Run:
    """An op of three tensors and no other arguments."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        x, y, z = args
        block = op(x._local_tensor, y._local_tensor, z._local_tensor)
        return new_dtensor(DTensor, block, spec, False)  # type: ignore[no-any-return]

    return run


def _blocks(args: tuple[Any, ...], positions: tuple[int, ...]) -> list[Any]:
    out = list(args)
    for i in positions:
        out[i] = out[i]._local_tensor
    return out


def any_args(op: Callable[..., Tensor], positions: tuple[int, ...], spec: Spec) -> Run:
    """An op with tensors at some positions among its arguments."""
    return lambda args, kwargs: new_dtensor(DTensor, op(*_blocks(args, positions), **kwargs), spec, False)


def in_place(op: Callable[..., Any], positions: tuple[int, ...], count: int, named: bool) -> Run:
    """An op with so many arguments, and `named` ones or not, that writes to its first argument and returns it."""
    if count == 2 and positions == (0,) and not named:

        def with_value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, y = args
            op(x._local_tensor, y)
            return x

        return with_value
    if count == 2 and positions == (0, 1):

        def pair(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, y = args
            op(x._local_tensor, y._local_tensor)
            return x

        def pair_with(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, y = args
            op(x._local_tensor, y._local_tensor, **kwargs)
            return x

        return pair_with if named else pair

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op(*_blocks(args, positions), **kwargs)
        return args[0]

    return run


def listed(op: Callable[..., Tensor], spec: Spec) -> Run:
    """An op whose only tensors are a list, its first argument."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        if len(args) == 2 and not kwargs:
            return new_dtensor(DTensor, op([t._local_tensor for t in args[0]], args[1]), spec, False)  # type: ignore[no-any-return]
        block = op([t._local_tensor for t in args[0]], *args[1:], **kwargs)
        return new_dtensor(DTensor, block, spec, False)  # type: ignore[no-any-return]

    return run


def several(op: Callable[..., Any], positions: tuple[int, ...], specs: tuple[Spec, ...]) -> Run:
    """An op with several results, or a list of them."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        blocks = (
            op(args[0]._local_tensor, *args[1:], **kwargs)
            if positions == (0,)
            else op(*_blocks(args, positions), **kwargs)
        )
        if len(blocks) != len(specs):  # some are None
            return wrap(blocks, iter(specs))
        return [new_dtensor(DTensor, b, s, False) for b, s in zip(blocks, specs, strict=True)]

    return run


def by_program(program: Callable[[Sequence[Tensor]], Any], positions: tuple[int, ...], spec: Spec) -> Run:
    """A program on the blocks instead of the op."""
    if positions == (0,):
        return lambda args, kwargs: new_dtensor(DTensor, program((args[0]._local_tensor,)), spec, False)
    return lambda args, kwargs: new_dtensor(
        DTensor, program([args[i]._local_tensor for i in positions]), spec, False
    )


def view_as(shape: Sequence[int], spec: Spec, otherwise: Run) -> Run:
    """A view of a block in another shape; `otherwise` where its strides allow none."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            block = args[0]._local_tensor.view(shape)
        except RuntimeError:
            return otherwise(args, kwargs)
        return new_dtensor(DTensor, block, spec, False)

    setattr(run, _RECIPE, Recipe("view", (spec,), tuple(shape)))
    return run
