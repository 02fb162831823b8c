"""The fallback: all-gather the operands, run the op on the full tensors, and log it once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.arguments import map_leaves, replace_tensors
from shardwise.call.op_call import OpCall
from shardwise.call.schema import op_info
from shardwise.call.strides import copy_into, restride
from shardwise.comm import map_ranks, members_of, spread
from shardwise.layout import Layout, LayoutError, Spec
from shardwise.layout.sizes import as_size
from shardwise.plan import Plan
from shardwise.random.seeded_generator import with_seeded_generator
from shardwise.tensor.construct import from_block, replicated_spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import communication, to_layout
from shardwise.tensor.seeding import next_draw

__all__ = ["drawing_alike", "draws_random", "gather", "run_on_full", "wrap_replicated", "write_back"]

aten = torch.ops.aten
_log = logging.getLogger("shardwise")
# random ops without torch's tag
_UNTAGGED = ("aten::binomial", "aten::_standard_gamma", "aten::_sample_dirichlet")


def run_on_full(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[..., Any] | None = None,
    *,
    repeated: bool = False,
) -> Any:
    """Gather the operands, run the op (or `run` in its place) on the full tensors, and write back what it wrote.

    Args:
        func: the op.
        args: its arguments.
        kwargs: its keyword arguments.
        run: what to run instead of the op.
        repeated: the op writes to an expanded tensor, whose full tensor must be expanded as well.
    """
    call = OpCall(func, args, kwargs)
    plans = call.replication_plans
    with communication(func, plans):
        _log_once(func, [t._spec for t in call.tensors if isinstance(t, DTensor)], plans)
        full: dict[int, Tensor] = {}
        for t in call.tensors:
            if isinstance(t, DTensor) and id(t) not in full:
                full[id(t)] = gather(func, t)
        for t in call.written if repeated else ():
            if isinstance(t, DTensor):
                full[id(t)] = map_ranks(restride, full[id(t)], t._spec.stride)
        for t in call.written if call.simulated else ():
            if not isinstance(t, DTensor):  # each simulated rank writes to its own copy
                full[id(t)] = spread(t, list(members_of(call.mesh)))
        run = run or _from_own_offset(func) or drawing_alike(func, args, kwargs, call.mesh)
        result = map_ranks(run, *replace_tensors(args, full), **replace_tensors(kwargs, full))
        for t in call.written:
            if isinstance(t, DTensor):
                write_back(func, t, full[id(t)])
    if isinstance(result, tuple) and call.info.returned is not None:
        pairs = zip(result, _returned_arguments(call), strict=True)
        return tuple(wrap_replicated(r, call.mesh) if t is None else t for r, t in pairs)
    return wrap_replicated(result, call.mesh) if call.returned is None else call.returned


def _from_own_offset(func: Any) -> Callable[..., Any] | None:
    """An op by strides with an offset that counts from the first element: a block may be part of a larger memory."""
    if func is aten.as_strided.default:

        def strided(x: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
            return x.as_strided(size, stride, x.storage_offset() + (storage_offset or 0))

        return strided
    if func is aten.as_strided_scatter.default:

        def scatter(
            x: Tensor, src: Tensor, size: Any, stride: Any, storage_offset: int | None = None
        ) -> Tensor:
            return x.as_strided_scatter(src, size, stride, x.storage_offset() + (storage_offset or 0))

        return scatter
    return None


def draws_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers; an op with a dropout argument does only if that is not 0."""
    info = op_info(func)
    if torch.Tag.nondeterministic_seeded not in info.tags and info.qualified_name not in _UNTAGGED:
        return False
    return info.dropout_argument is None or bool(info.bind(args, kwargs)[info.dropout_argument])


def drawing_alike(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
) -> Callable[..., Any]:
    """The op; if it draws random numbers, so that it draws the same on each rank, by its position in the stream."""
    if not draws_random(func, args, kwargs):
        return func  # type: ignore[no-any-return]
    generator = next((v for v in [*args, *kwargs.values()] if isinstance(v, torch.Generator)), None)
    if generator is None:
        return with_seeded_generator(func, next_draw(mesh))
    state = generator.get_state()

    def run(*args: Any, **kwargs: Any) -> Any:
        generator.set_state(state)  # each simulated rank draws the same
        return func(*args, **kwargs)

    return run


def gather(func: Any, t: DTensor) -> Tensor:
    """The full tensor as the op is to see it."""
    full = to_layout(func, t, Layout.replicated(t.shape, t._spec.layout.axes))._local_tensor
    if full is t._local_tensor or t._spec.stride is None:
        return full
    # what was gathered is contiguous, but `as_strided` reads strides, and other kernels give theirs to their results
    return map_ranks(restride, full, t._spec.stride)  # type: ignore[no-any-return]


def _returned_arguments(call: OpCall) -> list[Any]:
    """For each of several results the argument that it is, or None, by the schema."""
    written: dict[str, Any] = {}
    for arg in call.info.arguments:
        if arg.writes:
            written |= dict.fromkeys(arg.alias, call.named[arg.name])
    return [next((written[n] for n in r.alias if n in written), None) for r in call.info.returns]


def write_back(func: Any, t: DTensor, full: Tensor) -> None:
    """Copy what an op wrote to the full tensor into the blocks."""
    if t._local_tensor is full:
        return
    if tuple(full.shape) != tuple(t.shape):
        raise LayoutError(
            f"{func} changed {t._spec} in place to shape {tuple(full.shape)}.",
            why="The blocks of a DTensor cannot change their shape in place.",
            fix="Use the op that returns a new tensor.",
        )
    replicated = DTensor(full, t._spec.with_layout(Layout.replicated(t.shape, t._spec.layout.axes)))
    map_ranks(copy_into, t._local_tensor, to_layout(func, replicated, t._spec.layout)._local_tensor)


def wrap_replicated(result: Any, mesh: DeviceMesh) -> Any:
    """Results that are the same on every rank, as replicated DTensors."""

    def wrapped(r: Any) -> Any:
        if not isinstance(r, Tensor):
            return r
        spec = replicated_spec(r, mesh)
        if r.dtype.is_complex and spec.stride is not None:
            r = map_ranks(torch.resolve_conj, r)  # a DTensor has no lazy conjugate bit
        return from_block(r, spec)

    return map_leaves(wrapped, result)


_logged: set[Any] = set()


def _log_once(func: Any, specs: Sequence[Spec], plans: Sequence[Plan]) -> None:
    # symbols are not kept alive
    key = (func, tuple([str(s) if s.is_symbolic else s for s in specs]))
    sent = sum(plan.bytes for plan in plans)
    if not sent or key in _logged:
        return
    if len(_logged) < 10_000:
        _logged.add(key)
    operands = ", ".join(map(str, specs))
    _log.warning(
        "%s has no cheaper way for %s and was run on gathered tensors: %s bytes",
        func,
        operands,
        f"{as_size(sent):,}",
    )
