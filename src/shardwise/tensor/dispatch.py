"""The hot path: from an op on DTensors to ops on blocks, by one look-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from shardwise.comm import Pending, PerRank, coord_of, map_ranks, members_of, run, spread
from shardwise.layout import Spec
from shardwise.rules.table import TABLE
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.foreach import FUSED, each, fused, prepare_foreach
from shardwise.tensor.offers import better
from shardwise.tensor.policy import mind, replicates
from shardwise.tensor.prepare import Prepared, prepare, row_name, tensors_in
from shardwise.tensor.whole import check_operands, is_held, off_mesh, on_whole
from shardwise.tensor.write_through import is_view, remembered, returning

__all__ = ["dispatch"]

_Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_MOST = 4096  # recipes kept per op
_ops: dict[int, tuple[bool, dict[Any, _Run]]] = {}  # by the op's id, for ops hash slowly and live for ever


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on the blocks as they lie where a row says so, else on the whole."""
    op = _ops.get(id(func))
    if op is None:
        op = _ops[id(func)] = (_reads_types_only(func), {})
    by_type, known = op
    parts: list[Any] = []
    for a in args:
        kind = type(a)
        if kind is DTensor:
            parts.append(a._spec)
        elif by_type and (kind is float or kind is int):
            parts.append(kind)
        else:
            parts.append(_part(a, by_type))
    if kwargs:
        for k, v in kwargs.items():
            parts.append(k)
            parts.append(_part(v, by_type))
    key = tuple(parts)
    try:
        go = known.get(key)
    except TypeError:  # an argument that has no hash: such a call is prepared each time
        return _prepared(func, args, kwargs)(args, kwargs)
    if go is None:
        a = None  # `is_held` counts references, and the loop's would be one too many
        go = _prepared(func, args, kwargs)
        if len(known) >= _MOST:
            del known[next(iter(known))]
        known[key] = go
    return go(args, kwargs)


_NUMBERS = (int, float, bool, complex)


def _part(value: Any, by_type: bool) -> Any:
    """An argument as part of a key: equal numbers of different types differ."""
    if value is None:
        return None
    if isinstance(value, DTensor):
        return value._spec
    if isinstance(value, Tensor):
        return is_held(value), replicates(), value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple([_part(v, by_type) for v in value])
    return type(value) if by_type and type(value) in _NUMBERS else (type(value), value)


def _reads_types_only(func: Any) -> bool:
    row = TABLE.get(row_name(func)[0])
    name = func._schema.name
    return name.startswith("aten::_foreach_") or name in FUSED or (row is not None and not row.reads)


def _prepared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
    if func._schema.name.startswith("aten::_foreach_"):
        return prepare_foreach(func, args, kwargs) or (lambda a, k: each(func, a, k))
    if func._schema.name in FUSED:
        return lambda a, k: fused(func, a, k)
    first = check_operands(func, args, kwargs)
    if not isinstance(first._local_tensor, PerRank) and coord_of(first.device_mesh) is None:
        recipe = prepare(func, args, kwargs)
        return lambda a, k: off_mesh(func, a, k, recipe)
    if torch.Tag.inplace_view in func.tags:
        return lambda a, k: _become(func, a, k)
    recipe = prepare(func, args, kwargs)
    if (program := better(func, recipe, args, kwargs)) is not None:
        return lambda a, k: program(*a, **k)
    if is_view(func) and (recipe is None or any(recipe.moves)) and _is_cut(args[0]):
        return lambda a, k: remembered(func, a, k, _moved(func, recipe, a, k))
    if recipe is None:
        return lambda a, k: on_whole(func, a, k)
    at = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor))
    direct = (
        not any(recipe.moves)
        and recipe.programs is None
        and not recipe.simulated
        and not _writes(func)
        and len(at) == len(recipe.moves)
        and all(isinstance(args[i], DTensor) for i in at)
    )
    if not direct:
        return lambda a, k: _general(func, recipe, a, k)
    if (
        len(recipe.outputs) > 1
        or len(func._schema.returns) > 1
        or str(func._schema.returns[0].type) != "Tensor"
    ):
        return _several(func._op, at, recipe.outputs)
    if at == (0,):
        return _unary(func._op, recipe.outputs[0])
    return _binary(func._op, recipe.outputs[0]) if at == (0, 1) else _any(func._op, at, recipe.outputs[0])


def _is_cut(x: Any) -> bool:
    return isinstance(x, DTensor) and bool(x._spec.layout.sharded or x._spec.layout.partial)


def _moved(func: Any, recipe: Prepared | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return on_whole(func, args, kwargs) if recipe is None else _general(func, recipe, args, kwargs)


def _become(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """An op that changes its tensor's own shape: the tensor becomes what the op's other form returns."""
    x: DTensor = args[0]
    seen = dispatch(returning(func), args, kwargs)
    x._local, x._spec = seen._local, seen._spec
    with no_dispatch():
        func(*args, **kwargs)  # the wrapper's own sizes
    return x


_make = torch.Tensor._make_wrapper_subclass


def _wrap(block: Tensor, spec: Spec) -> DTensor:
    """A DTensor without the detour through its constructor."""
    out = _make(DTensor, spec.shape, strides=spec.stride, dtype=spec.dtype, device=block.device)
    out._local = block
    out._spec = spec
    return out


def _unary(op: Callable[..., Tensor], spec: Spec) -> _Run:
    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        block = args[0]._local
        if type(block) is Pending:
            block = args[0]._local_tensor
        return _wrap(op(block, *args[1:], **kwargs), spec)

    return go


def _binary(op: Callable[..., Tensor], spec: Spec) -> _Run:
    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        x, y = args[0]._local, args[1]._local
        if type(x) is Pending:
            x = args[0]._local_tensor
        if type(y) is Pending:
            y = args[1]._local_tensor
        return _wrap(op(x, y, *args[2:], **kwargs), spec)

    return go


def _local_args(args: tuple[Any, ...], at: tuple[int, ...]) -> list[Any]:
    out = list(args)
    for i in at:
        block = out[i]._local
        out[i] = block if type(block) is not Pending else out[i]._local_tensor
    return out


def _any(op: Callable[..., Tensor], at: tuple[int, ...], spec: Spec) -> _Run:
    return lambda args, kwargs: _wrap(op(*_local_args(args, at), **kwargs), spec)


def _several(op: Callable[..., Any], at: tuple[int, ...], specs: tuple[Spec, ...]) -> _Run:
    return lambda args, kwargs: _wrapped(op(*_local_args(args, at), **kwargs), iter(specs))


def _general(func: Any, recipe: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = tensors_in([*args, *kwargs.values()])
    mind(func, recipe.moves)
    blocks: list[Tensor] = []
    for t, move in zip(found, recipe.moves, strict=True):
        block = t._local_tensor if isinstance(t, DTensor) else t
        if move is not None:
            if recipe.simulated and not isinstance(block, PerRank):
                block = spread(block, list(members_of(recipe.mesh)))
            block = run(move, block, recipe.mesh)
        blocks.append(block)
    programs = recipe.programs
    if programs is None:
        rest = iter(blocks)
        result = map_ranks(func, *_filled(args, rest), **_filled(kwargs, rest))
    elif recipe.simulated:
        out = {}
        for rank, program in programs.items():
            mine = [b.of_rank(rank or 0) if isinstance(b, PerRank) else b for b in blocks]
            rest = iter(mine)
            out[rank] = (
                program(mine) if program is not None else func(*_filled(args, rest), **_filled(kwargs, rest))
            )
        result = _joined(out)
    else:
        rest = iter(blocks)
        program = programs[None]
        result = (
            program(blocks) if program is not None else func(*_filled(args, rest), **_filled(kwargs, rest))
        )
    if _writes(func):
        return args[0]
    if recipe.regroups and recipe.moves[0] is None and is_view(func):
        _rejoin(args[0], result)
    return _wrapped(result, iter(recipe.outputs))


def _rejoin(x: DTensor, seen: Tensor) -> None:
    """Where a block was not dense enough to be seen in another shape, and so was copied: let it be the copy.

    Then the tensor and its view share memory, as they do elsewhere. No other rank need do the same.
    """
    block = x._local_tensor
    if isinstance(block, PerRank) and isinstance(seen, PerRank):
        parts = {r: _rejoined(b, seen.of_rank(r)) for r, b in block._blocks.items()}
        if any(parts[r] is not b for r, b in block._blocks.items()):
            x._local = PerRank(parts)
    else:
        x._local = _rejoined(block, seen)


def _rejoined(block: Tensor, seen: Tensor) -> Tensor:
    copied = seen.is_contiguous() and not block.is_contiguous()
    return seen.view(block.shape) if copied else block


def _joined(results: dict[Any, Any]) -> Any:
    first = next(iter(results.values()))
    if isinstance(first, Tensor):
        return PerRank(results)
    return type(first)(PerRank({r: v[i] for r, v in results.items()}) for i in range(len(first)))


def _filled(value: Any, blocks: Any) -> Any:
    """Arguments with each tensor replaced by its block."""
    if isinstance(value, Tensor):
        return next(blocks)
    if isinstance(value, list | tuple):
        return type(value)(_filled(v, blocks) for v in value)
    if isinstance(value, dict):
        return {k: _filled(v, blocks) for k, v in value.items()}
    return value


def _wrapped(result: Any, specs: Any) -> Any:
    if result is None:
        return None
    if isinstance(result, Tensor):
        return _wrap(result, next(specs))
    return type(result)([_wrapped(r, specs) for r in result])


_writing: dict[Any, bool] = {}


def _writes(func: Any) -> bool:
    known = _writing.get(func)
    if known is None:
        args = func._schema.arguments
        known = _writing[func] = any(a.alias_info is not None and a.alias_info.is_write for a in args)
    return known
