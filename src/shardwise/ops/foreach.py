"""Ops over lists of tensors: one kernel on all the blocks where the op for each single tensor would move nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

from shardwise.call.arguments import map_tensors
from shardwise.call.fallback import run_on_full
from shardwise.call.op_call import OpCall
from shardwise.call.overlap import is_repeated
from shardwise.call.resolve import resolve
from shardwise.call.route import Route, Run
from shardwise.call.schema import op_info
from shardwise.comm import PerRank, map_ranks
from shardwise.layout import Layout
from shardwise.ops.foreach_norm import reduce_together
from shardwise.plan import Plan, plan_redistribute
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import communication, to_layout
from shardwise.tensor.inference import inference_tensors
from shardwise.torch_internals.dispatcher import python_binding
from shardwise.torch_internals.subclass import (
    bump_versions,
    increment_versions,
    new_dtensor,
    refuses_writes,
)

__all__ = ["FUSED", "foreach_route", "run_fused"]

aten = torch.ops.aten
_OVERLOADS = {"List": "Tensor", "ScalarList": "Scalar"}


@cache
def _single_op(func: Any) -> Any | None:
    """The op that a foreach op applies to each element of its lists, or None if torch has none."""
    info = op_info(func)
    name, overload = info.qualified_name.removeprefix("aten::_foreach_"), info.name.rpartition(".")[2]
    if overload in ("Scalar", "ScalarList"):
        name = name.replace("maximum", "clamp_min").replace("minimum", "clamp_max")
    packet = getattr(
        aten, {"norm": "linalg_vector_norm", "powsum": "linalg__powsum", "max": "amax"}.get(name, name), None
    )
    if packet is None:
        return None
    if name == "pow":
        overload = {"ScalarAndTensor": "Scalar", "List": "Tensor_Tensor"}.get(overload, "Tensor_Scalar")
    if overload in ("Scalar", "ScalarList") and name.startswith("clamp"):
        overload = "default"
    for candidate in (_OVERLOADS.get(overload, overload), "default", "Tensor", "Scalar"):
        if candidate in packet.overloads():
            return getattr(packet, candidate)
    return None


def _elements(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments for each element of the lists, as the op for one tensor takes them."""
    name = op_info(func).qualified_name.removeprefix("aten::_foreach_").rstrip("_")
    count = len(next(a for a in args if isinstance(a, list | tuple)))
    for i in range(count):
        here = [a[i] if isinstance(a, list | tuple) else a for a in args]
        named = {k: v[i] if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
        if name in ("addcdiv", "addcmul") and len(here) > 3:
            value = here.pop()
            named["value"] = value[i] if isinstance(value, torch.Tensor) and value.dim() else value
        if name in ("norm", "powsum") and len(here) > 2:
            named["dtype"] = here.pop()
        if name == "copy" and len(here) > 2:
            here.pop()
        yield tuple(here), named


def foreach_route(call: OpCall) -> Route:
    """One kernel on all blocks if no element would move anything, else the op for one tensor on each element."""
    func = call.func
    repeated = call.info.writes and any(map(is_repeated, call.args[0]))
    on_blocks = None if repeated else _on_blocks(call)
    run: Run = on_blocks or (lambda a, k: _on_each(func, a, k))
    if repeated:
        run = _one_at_a_time(func, run)
    return Route("foreach", run, None if on_blocks is None else ())


def _one_at_a_time(func: Any, inner: Run | None) -> Run:
    """The run of an op that refuses one of the tensors: those before it are written, as torch does.

    Args:
        func: the op.
        inner: its run for a list of one tensor.
    """
    one_at_a_time = op_info(func).one_at_a_time

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for some in (lists := one_at_a_time(args)):
            func(*some, **kwargs)
        return None if lists or inner is None else inner(args, kwargs)

    return run


def _on_blocks(call: OpCall) -> Run | None:
    func, args, kwargs = call.func, call.args, call.kwargs
    single = _single_op(func)
    if single is None or (call.info.writes and not all(isinstance(t, DTensor) for t in args[0])):
        return None  # the op for one tensor writes to a plain one once, and not for each simulated rank
    specs = []
    for here, named in _elements(func, args, kwargs):
        meshes = {id(a.device_mesh) for a in here if isinstance(a, DTensor)}
        # tensors on parts of a mesh are brought to one mesh by the op for one tensor
        resolution = resolve(OpCall(single, here, named)) if len(meshes) == 1 else None
        if resolution is None or resolution.plans or resolution.programs is not None:
            return None
        specs.append(resolution.outputs[0])
    writes, each = call.info.writes, _one_at_a_time(func, None)
    is_list = [_is_list_of_blocks(a) for a in args]
    with_tensors = any(isinstance(v, torch.Tensor | list | tuple) for v in kwargs.values())
    if with_tensors or not any(is_list) or any(isinstance(a, DTensor) for a in args):

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if writes and refuses_writes(args[0]) and len(args[0]) > 1:
                return each(args, kwargs)
            results = map_ranks(func, *_blocks(args), **_blocks(kwargs))
            if writes:
                bump_versions(args[0])
                return None
            return [DTensor(r, spec) for r, spec in zip(results, specs, strict=True)]

        return run
    op = python_binding(func)

    gather = _collector(is_list)

    def direct(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refused = inference_tensors and writes and refuses_writes(args[0])
        if refused and len(args[0]) > 1:
            return each(args, kwargs)
        results = op(*gather(args), **kwargs)
        if writes:  # the blocks have new versions, and the DTensors must, too
            (bump_versions if refused else increment_versions)(args[0])
            return None
        return [new_dtensor(DTensor, r, spec, False) for r, spec in zip(results, specs, strict=True)]

    return direct


def _collector(is_list: list[bool]) -> Callable[[tuple[Any, ...]], Iterable[Any]]:
    """What replaces the lists of DTensors among the arguments by those of their blocks."""
    match is_list:
        case [True]:
            return lambda args: ([t._local_tensor for t in args[0]],)
        case [True, False]:
            return lambda args: ([t._local_tensor for t in args[0]], args[1])
        case [True, True]:
            return lambda args: ([t._local_tensor for t in args[0]], [t._local_tensor for t in args[1]])
    return lambda args: [
        [t._local_tensor for t in a] if li else a for a, li in zip(args, is_list, strict=True)
    ]


def _is_list_of_blocks(value: Any) -> bool:
    """Whether an argument is a list of DTensors only, of which this process has one block each."""
    return isinstance(value, list | tuple) and all(
        isinstance(t, DTensor) and not isinstance(t._local_tensor, PerRank) for t in value
    )


def _blocks(tree: Any) -> Any:
    return map_tensors(lambda t: t._local_tensor if isinstance(t, DTensor) else t, tree)


def _on_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    single, writes = _single_op(func), op_info(func).writes
    if single is None:
        result = run_on_full(func, args, kwargs)
        if writes:
            bump_versions(args[0])
        return result
    elements = list(_elements(func, args, kwargs))
    if writes:
        for here, named in elements:  # one that is refused leaves those after it as they were
            single(*here, **named)
            bump_versions(here[:1])
        return None
    done = (
        _norms_together(func, elements)
        if single is aten.linalg_vector_norm.default
        else [None] * len(elements)
    )
    return [
        single(*here, **named) if norm is None else norm
        for (here, named), norm in zip(elements, done, strict=True)
    ]


def _norms_together(func: Any, elements: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    (_, *rest), named = elements[0]
    ord = rest[0] if rest else named.get("ord", 2)
    return reduce_together(func, [here[0] for here, _ in elements], ord, named.get("dtype"))


FUSED = frozenset(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
"""Optimizer steps: pointwise in the tensors at the same position of the lists, where each parameter has its own mesh."""


def run_fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An optimizer step, mesh by mesh, on the blocks in the parameters' layouts."""
    by_mesh: dict[Any, list[int]] = {}
    for i, p in enumerate(args[0]):
        by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(i)
    groups = [[[a[i] for i in some] if a else a for a in args] for some in by_mesh.values()]
    with communication(func, [plan for lists in groups for plan in _fused_plans(lists, kwargs)]):
        for lists in groups:
            _run_fused_on_mesh(func, lists, kwargs)
    bump_versions([t for n, a in enumerate(args) if _is_written(n, kwargs) for t in a])


def _fused_targets(lists: list[list[Any]]) -> list[Layout | None]:
    return [p._spec.layout.with_partial({}) if isinstance(p, DTensor) else None for p in lists[0]]


def _fused_plans(lists: list[list[Any]], kwargs: dict[str, Any]) -> list[Plan]:
    """What brings every list into the parameters' layouts, and back what was written."""
    plans = []
    targets = _fused_targets(lists)
    tensors = [(n, t, goal) for n, a in enumerate(lists) for t, goal in zip(a, targets, strict=False)]
    for number, t, goal in [*tensors, *((None, v, None) for v in kwargs.values())]:
        if isinstance(t, DTensor) and (target := _target(t, goal)) is not t._spec.layout:
            plans.append(plan_redistribute(t._spec.layout, target, t.dtype.itemsize))
            if number is not None and _is_written(number, kwargs):
                plans.append(plan_redistribute(target, t._spec.layout, t.dtype.itemsize))
    return plans


def _run_fused_on_mesh(func: Any, lists: list[list[Any]], kwargs: dict[str, Any]) -> None:
    targets = _fused_targets(lists)
    is_moved = any(p._spec.layout is not goal for p, goal in zip(lists[0], targets, strict=True) if goal)
    if is_moved and len(lists[0]) > 1:  # two of them may have the same memory
        for i in range(len(lists[0])):
            _run_fused_on_mesh(func, [[a[i]] if a else a for a in lists], kwargs)
        return
    moved = [[_moved(func, t, goal) for t, goal in zip(a, targets, strict=False)] for a in lists]
    named = {k: _blocks(_moved(func, v, None)) for k, v in kwargs.items()}
    map_ranks(func, *[_blocks(a) for a in moved], **named)
    for number, (a, m) in enumerate(zip(lists, moved, strict=True)):
        for t, new in zip(a, m, strict=True):
            if new is not t and _is_written(number, kwargs):
                block = to_layout(func, new, t._spec.layout)._local_tensor
                map_ranks(aten.copy_.default, t._local_tensor, block)


def _is_written(number: int, kwargs: dict[str, Any]) -> bool:
    """Whether a step writes to one of its lists: to the gradients, the second list, only if it unscales them."""
    return number != 1 or kwargs.get("grad_scale") is not None


def _target(t: DTensor, goal: Layout | None) -> Layout:
    if goal is not None and goal.shape == t._spec.layout.shape:
        return goal
    return Layout.replicated(t.shape, t._spec.layout.axes)


def _moved(func: Any, t: Any, goal: Layout | None) -> Any:
    return to_layout(func, t, _target(t, goal)) if isinstance(t, DTensor) else t
