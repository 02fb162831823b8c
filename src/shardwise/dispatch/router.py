"""The hot path: from an op on DTensors to ops on blocks, by one look-up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from shardwise.alternatives.alternative import Offer
from shardwise.alternatives.registry import better
from shardwise.call.execute import general, writes
from shardwise.call.fallback import check_operands, is_held, off_mesh, on_whole, place_returned
from shardwise.call.meta import made_by
from shardwise.call.plain_targets import as_replicated, plain_targets
from shardwise.call.resolve import Prepared, full_name, prepare, row_name, tensors_in
from shardwise.call.submesh import common_part, on_part
from shardwise.call.trace import tell
from shardwise.call.variants import is_composite, returning_form, writing_form
from shardwise.call.view_writeback import (
    as_its_base,
    is_view,
    outlives_inference,
    remembered,
    returning,
)
from shardwise.comm import PerRank, coord_of
from shardwise.dispatch import fast_path as direct
from shardwise.dispatch.dry_run import cheaper_program
from shardwise.dispatch.fast_path import Run, binding
from shardwise.ops.foreach import FUSED, each, fused, prepare_foreach
from shardwise.ops.random_ops import draws
from shardwise.ops.sparse import is_about_sparse, on_sparse
from shardwise.rules.table import REGISTERED, row_of
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import replicates
from shardwise.torch_internals.lazy_bits import heeding

__all__ = ["dispatch", "forget"]

_MOST = 4096  # recipes kept per op
_NO_KWARGS: dict[str, Any] = {}


# What is known of an op: the op, held so that no other gets its id; whether its row reads no numbers, so that only their
# types count; what its arguments are; whether its result shares the memory of its first argument; and recipes by key.
# A plain tuple, which is unpacked at once where a named one is iterated.
_Op = tuple[Any, bool, object, bool, dict[Any, Any]]

_RAW = object()  # one tensor and then what tells itself apart: sizes, flags, dims
_PAIR = object()  # two tensors come first
_LISTED = object()  # a list of tensors and then what tells itself apart
_OTHER = object()
_in_inference = torch.is_inference_mode_enabled
_ops: dict[int, _Op] = {}  # by the op's id, for ops hash slowly


def dispatch(
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run an op on the blocks as they lie where a row says so, else on the whole."""
    try:
        _, by_type, kind, views, known = _ops[id(func)]
    except KeyError:
        _, by_type, kind, views, known = _ops[id(func)] = _new_op(func)
    if views and _in_inference() and outlives_inference(args[0]):
        with as_its_base():
            return dispatch(func, types, args, kwargs)
    key: Any
    if kind is _RAW and type(args[0]) is DTensor:
        if len(args) == 1:
            key = args[0]._spec
        elif type(args[1]) is list:
            key = (args[0]._spec, *args[1], args[2:])
        else:
            key = (args[0]._spec, args[1:])
        if kwargs:
            key = (key, *kwargs, *kwargs.values())
        else:
            kwargs = _NO_KWARGS
    elif kwargs:
        parts = _parts(args, by_type)
        for k, v in kwargs.items():
            parts.append(k)
            parts.append(_part(v, by_type))
        key = tuple(parts)
    else:
        kwargs = _NO_KWARGS
        if kind is _PAIR and len(args) > 1 and type(args[0]) is DTensor and type(args[1]) is DTensor:
            if len(args) == 2:
                key = (args[0]._spec, args[1]._spec)
            elif len(args) == 3 and type(args[2]) is DTensor:
                key = (args[0]._spec, args[1]._spec, args[2]._spec)
            else:
                key = tuple(_parts(args, by_type))
        elif kind is _LISTED and (specs := _specs(args[0])) is not None:
            key = (args[1:], specs)
        else:
            key = tuple(_parts(args, by_type))
    try:
        go = known[key]
    except KeyError:
        go = _prepared(func, args, kwargs)
        if len(known) >= _MOST:
            del known[next(iter(known))]
        known[key] = go
    except TypeError:  # an argument that has no hash: such a call is prepared each time
        go = _prepared(func, args, kwargs)
    return go(args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return dispatch(func, (), args, kwargs)


def forget() -> None:
    """Prepare all calls anew: a rule has changed, and some ops have the rules of others."""
    _ops.clear()


_NUMBERS = (int, float, bool, complex)
_AS_THEY_ARE = frozenset({int, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout})


def _parts(args: tuple[Any, ...], by_type: bool) -> list[Any]:
    """Arguments as parts of a key."""
    parts: list[Any] = []
    for a in args:
        kind = type(a)
        if kind is DTensor:
            parts.append(a._spec)
        elif kind in _AS_THEY_ARE:
            parts.append(int if by_type and kind is int else a)
        elif by_type and kind is float:
            parts.append(float)
        elif kind is list and a:
            first = type(a[0])
            if first is DTensor and (specs := _specs(a)) is not None:
                parts.append(specs)
            elif first is int and not by_type:
                parts.append(tuple(a))  # sizes, dims: what is an int at one place is one at all
            else:
                parts.append(_part(a, by_type))
        else:
            parts.append(_part(a, by_type))
    return parts


def _specs(tensors: Any) -> tuple[Any, ...] | None:
    """The specs of a list of DTensors; None if there is anything else in it."""
    try:
        return tuple([t._spec for t in tensors])
    except AttributeError:
        return None


def _part(value: Any, by_type: bool) -> Any:
    """An argument as part of a key: equal numbers of different types differ."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return int if by_type and kind is int else value
    if kind is list or kind is tuple:
        first = type(value[0]) if value else None
        if first is DTensor and (specs := _specs(value)) is not None:
            return specs
        if first is int and not by_type:
            return tuple(value)
        if first is float and by_type and {type(v) for v in value} == {float}:
            return float, len(value)
        return tuple([_part(v, by_type) for v in value])
    if isinstance(value, DTensor):
        return value._spec
    if isinstance(value, Tensor):
        try:
            return is_held(value), replicates(), value.shape, value.stride(), value.dtype, value.device
        except RuntimeError:  # a sparse one has no strides
            return is_held(value), replicates(), value.shape, value.layout, value.dtype, value.device
    return kind if by_type and kind in _NUMBERS else (kind, value)


_PLAIN = frozenset(
    {"int", "SymInt", "bool", "float", "str", "ScalarType", "MemoryFormat", "Device", "Layout"}
)


def _new_op(func: Any) -> _Op:
    """An op seen for the first time.

    Arguments tell themselves apart where the schema says int or bool: they are always that. A Scalar may be 1 or 1.0
    or True, which are equal and yet differ.
    """
    by_type = _reads_types_only(func)
    first, *rest = [str(a.type).replace("Optional[", "").rstrip("]") for a in func._schema.arguments] or [""]
    second = rest[0] if rest else ""
    plain = all(
        t in _PLAIN or (i == 0 and first == "Tensor" and t in ("List[int", "List[SymInt"))
        for i, t in enumerate(rest)
    )
    kind = _OTHER
    if first == "Tensor" and second == "Tensor":
        kind = _PAIR
    elif plain and first == "List[Tensor":
        kind = _LISTED
    elif plain and first == "Tensor" and (not by_type or not rest):
        kind = _RAW
    return func, by_type, kind, is_view(func), {}


def _reads_types_only(func: Any) -> bool:
    row = row_of(full_name(func)) or row_of(row_name(func)[0])
    name = func._schema.name
    by_type = name.startswith("aten::_foreach_") or name in FUSED or draws(func) is not None
    return by_type or (row is not None and not row.reads)


def _prepared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    go = _chosen(func, args, kwargs)
    is_complex = any(t.dtype.is_complex for t in tensors_in([*args, *kwargs.values()]))
    return heeding(go) if is_complex else go


def _chosen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    if func._schema.name.startswith("aten::_foreach_"):
        return prepare_foreach(func, args, kwargs) or (lambda a, k: each(func, a, k))
    if func._schema.name in FUSED:
        return lambda a, k: fused(func, a, k)
    if (part := common_part(func, args, kwargs)) is not None:
        return lambda a, k: func(*on_part(a, part), **on_part(k, part))
    first = check_operands(func, args, kwargs)
    if writes(func) and plain_targets(func, args, kwargs):
        return lambda a, k: as_replicated(_run, func, a, k)
    if (run := draws(func)) is not None:
        return lambda a, k: run(*a, **k)
    if (form := _resizing(func, args, kwargs)) is not None:
        return lambda a, k: form(*a, **k)
    if not isinstance(first._local_tensor, PerRank) and coord_of(first.device_mesh) is None:
        if func is torch.ops.prim.layout.default:
            return on_sparse(func)
        recipe = prepare(func, args, kwargs)
        if recipe is None and is_composite(func) and torch.Tag.nondeterministic_seeded in func.tags:
            return lambda a, k: func.decompose(*a, **k)  # it draws as often as on the mesh
        specs = None if recipe is None else recipe.outputs
        if (offer := better(func, recipe, args, kwargs)) is not None:
            specs = offer.outputs or specs
        return lambda a, k: off_mesh(func, a, k, specs)
    if is_about_sparse(args, kwargs):
        return on_sparse(func)
    if torch.Tag.inplace_view in func.tags:
        return lambda a, k: _become(func, a, k)
    recipe = prepare(func, args, kwargs)
    if recipe is None and is_composite(func):
        return lambda a, k: func.decompose(*a, **k)
    # what a user says of an op comes before what others offer for it
    offer = None if full_name(func) in REGISTERED else better(func, recipe, args, kwargs)
    if is_view(func) and (recipe is None or any(recipe.moves)) and _is_cut(args[0]):
        return lambda a, k: remembered(func, a, k, _moved(func, recipe, offer, a, k))
    if offer is not None:
        return lambda a, k: _offered(func, offer, a, k)
    if recipe is None:
        return cheaper_program(func, args, kwargs) or (lambda a, k: on_whole(func, a, k))
    return _direct(func, recipe, args, kwargs) or (lambda a, k: general(func, recipe, a, k))


def _resizing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """How to write to targets of another shape than the results have: they take that shape, as torch has it."""
    outs = [a.name for a in func._schema.arguments if a.is_out]
    form = returning_form(func) if outs and all(isinstance(kwargs.get(n), DTensor) for n in outs) else None
    if form is None:
        return None
    made = made_by(form, args, {k: v for k, v in kwargs.items() if k not in outs})
    shapes = None if made is None else [getattr(t, "shape", None) for t in made]
    if shapes == [kwargs[n].shape for n in outs]:
        return None
    return writing_form(func, form)


def _direct(func: Any, recipe: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """The shortest way there is, where nothing moves and the op runs on the blocks of this rank as it is."""
    if any(recipe.moves) or recipe.simulated or recipe.alike:
        return None
    at = tuple(i for i, a in enumerate(args) if isinstance(a, DTensor))
    returns = [str(r.type) for r in func._schema.returns]
    if recipe.programs is not None and not recipe.regroups:
        program = recipe.programs[None]
        if program is None or returns != ["Tensor"] or len(at) != len(recipe.moves) or writes(func):
            return None
        return direct.programmed(program, at, recipe.outputs[0])
    if recipe.programs is not None:
        if recipe.shape is None:
            return None
        block = args[0]._local_tensor
        if func is torch.ops.aten.unsqueeze.default and func(block, *args[1:]).shape == recipe.shape:
            # a block without elements may be empty along another dim in the result
            return direct.constant(func, recipe.outputs[0], args, kwargs)
        return direct.seen_as(recipe.shape, recipe.outputs[0], lambda a, k: general(func, recipe, a, k))
    if len(at) != len(recipe.moves):
        in_list = args and isinstance(args[0], list | tuple) and all(isinstance(a, DTensor) for a in args[0])
        if in_list and len(args[0]) == len(recipe.moves) and returns == ["Tensor"] and not writes(func):
            return direct.listed(binding(func), recipe.outputs[0])
        return None
    if writes(func):
        first = place_returned(func)
        return direct.in_place(func._op, at) if first is not None and first[0] == at[0] == 0 else None
    if returns != ["Tensor"]:
        return direct.several(binding(func), at, recipe.outputs)
    spec = recipe.outputs[0]
    if at == (0,):
        is_constant = _ops[id(func)][2] is _RAW
        return direct.constant(func, spec, args, kwargs) if is_constant else direct.unary(binding(func), spec)
    if at == (0, 1):
        return direct.binary(binding(func), spec, alone=len(args) == 2 and not kwargs)
    if at == (0, 1, 2) and len(args) == 3 and not kwargs:
        return direct.ternary(binding(func), spec)
    return direct.any_args(binding(func), at, spec)


def _offered(func: Any, offer: Offer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tell(func, "offer", args, kwargs)
    return offer.run(*args, **kwargs)


def _is_cut(x: Any) -> bool:
    return isinstance(x, DTensor) and bool(x._spec.layout.sharded or x._spec.layout.partial)


def _moved(
    func: Any, recipe: Prepared | None, offer: Offer | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if offer is not None:
        return _offered(func, offer, args, kwargs)
    return on_whole(func, args, kwargs) if recipe is None else general(func, recipe, args, kwargs)


def _become(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """An op that changes its tensor's own shape: the tensor becomes what the op's other form returns."""
    x: DTensor = args[0]
    seen = dispatch(returning(func), (), args, kwargs)
    x._local_tensor, x._spec = seen._local_tensor, seen._spec
    with no_dispatch():
        func(*args, **kwargs)  # the wrapper's own sizes
    return x
