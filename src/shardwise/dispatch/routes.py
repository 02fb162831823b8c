"""Choosing the route of a call: its rule, an alternative, a decomposition, the fallback, or an op's own program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardwise.alternatives.alternative import Alternative
from shardwise.alternatives.registry import propose_alternative
from shardwise.call.arguments import tensors_in
from shardwise.call.execute import execute
from shardwise.call.fallback import run_on_full
from shardwise.call.kept_moves import keep_lineage
from shardwise.call.meta import infer_outputs, on_meta
from shardwise.call.moved_view import remember_base
from shardwise.call.off_mesh import run_off_mesh
from shardwise.call.op_call import OpCall
from shardwise.call.operands import check_operands, compare_plain, plain_tensors_to_compare
from shardwise.call.overlap import (
    FORBIDS_ALIAS,
    check_overlap,
    copy_to_repeated,
    is_repeated,
    writes_overlapping,
    writes_repeated,
)
from shardwise.call.plain_gradients import takes_plain_operands, with_plain_gradients
from shardwise.call.plain_targets import plain_targets, run_with_plain_targets
from shardwise.call.resolve import Resolution, resolve
from shardwise.call.route import Route, RouteKind, Run
from shardwise.call.strides import match_strides, with_own_strides
from shardwise.call.submesh import (
    common_submesh,
    largest_mesh,
    mesh_beside_numbers,
    run_beside_numbers,
    run_on_largest_mesh,
    run_on_submesh,
)
from shardwise.call.trace import traced
from shardwise.call.value_checks import checking_values, indexes_nothing
from shardwise.call.variants import program_for, writing_variant
from shardwise.call.view_scatter import COMPUTED
from shardwise.comm import coord_of
from shardwise.dispatch.dry_run import FindRoute, dry_run
from shardwise.dispatch.fast_path import direct_run
from shardwise.layout import Spec
from shardwise.layout.sizes import same_sizes
from shardwise.ops.foreach import FUSED, foreach_route, run_fused
from shardwise.ops.inplace_view import run_inplace_view
from shardwise.ops.random_ops import random_program
from shardwise.ops.requests import REQUESTS
from shardwise.ops.sparse import involves_sparse, sparse_run
from shardwise.ops.unscale import UNSCALE, run_unscale
from shardwise.plan.settings import current_costs, current_settings, override_settings
from shardwise.rules.table import REGISTERED
from shardwise.tensor.construct import replicated_spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import communication
from shardwise.torch_internals.autograd import in_backward
from shardwise.torch_internals.dispatcher import is_composite, records_views, run_composite, tracking_views
from shardwise.torch_internals.lazy_bits import resolving_lazy_bits
from shardwise.torch_internals.subclass import bump_versions, new_dtensor

__all__ = ["choose_route", "decide"]

aten = torch.ops.aten


def choose_route(call: OpCall, find_route: FindRoute) -> Route:
    """The route of a call. The first mechanism that handles the op and its operands has it; `docs/routes.txt` lists them.

    Args:
        call: the call.
        find_route: finds the routes of the ops that a program consists of, for its dry run.
    """
    func, info = call.func, call.info
    if info.qualified_name.startswith("aten::_foreach_"):
        return foreach_route(call)
    if info.qualified_name in FUSED:
        return Route("optimizer", lambda a, k: run_fused(func, a, k))
    if func is UNSCALE and not any(isinstance(t, DTensor) for t in call.args[1:]):
        return Route("optimizer", lambda a, k: run_unscale(func, *a))
    if (mesh := common_submesh(call)) is not None:
        return Route("sub-mesh", lambda a, k: run_on_submesh(func, mesh, a, k))
    if (values_on := mesh_beside_numbers(call)) is not None:
        return Route("sub-mesh", lambda a, k: run_beside_numbers(func, values_on, a, k))
    if (whole := largest_mesh(call)) is not None:
        return Route("sub-mesh", lambda a, k: run_on_largest_mesh(func, whole, a, k))
    if func is aten.is_same_size.default:
        return Route("request", lambda a, k: same_sizes(a[0].shape, a[1].shape), ())
    if (
        func is aten._has_same_storage_numel.default
    ):  # forward-mode derivatives ask it of a tensor and its tangent
        return Route("request", lambda a, k: _extent(a[0]) == _extent(a[1]), ())
    if info.name.startswith("prims.") and all(t.device.type == "meta" for t in call.tensors):
        # the meta kernels of ops, which torch calls for zero tangents: only the global shapes matter
        return Route("composite", lambda a, k: func(*on_meta(a), **on_meta(k)), ())
    check_operands(call)
    repeated = info.writes and writes_repeated(call)  # raises where one device raises
    if func is aten.copy_.default and is_repeated(call.args[0]):
        return Route("rule", lambda a, k: copy_to_repeated(func, a), ())
    if func is aten.as_strided.default and _is_identity(call):
        return Route("rule", lambda a, k: aten.alias.default(a[0]), ())
    if func is aten.detach.default and call.first._spec.stride is not None:
        return Route("rule", _detach, (), (call.first._spec,))
    if plain_targets(call):
        return Route("plain target", lambda a, k: run_with_plain_targets(func, a, k))
    if (program := random_program(func)) is not None:
        return Route("random", lambda a, k: program(*a, **k))
    if (resized := _resizing_variant(call)) is not None:
        return Route("resized out", lambda a, k: resized(*a, **k))
    off_mesh = not call.simulated and coord_of(call.mesh) is None
    if off_mesh and func is not torch.ops.prim.layout.default:
        return _off_mesh_route(call, _compute_route(call, find_route))
    if func in REQUESTS:
        request = REQUESTS[func]
        return Route("request", lambda a, k: request(*a, **k))
    if involves_sparse(call):
        return Route("sparse", sparse_run(func))
    if torch.Tag.inplace_view in info.tags:
        return Route("in-place view", lambda a, k: run_inplace_view(func, a, k))
    if repeated:
        return Route("fallback", lambda a, k: run_on_full(func, a, k, repeated=True))
    return _compute_route(call, find_route)


def _detach(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """The same block, which has no graph, and not another tensor of its memory: the two would have versions of their own."""
    x = args[0]
    out: DTensor = new_dtensor(DTensor, x._local_tensor, x._spec, False)
    if in_backward():  # checkpointed activations are computed again, and saved in this way
        keep_lineage(out, x)
    return out


def _extent(x: torch.Tensor) -> int:
    """The number of elements of memory from the first element of a tensor to its last."""
    return (
        1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    )


def _is_identity(call: OpCall) -> bool:
    """Whether an `as_strided` returns the tensor as it is, so that its memory need not be known."""
    x, size, stride = call.args[:3]
    offset = call.named["storage_offset"]
    if tuple(size) != tuple(x.shape) or tuple(stride) != x.stride():
        return False
    return offset is None or offset == x.storage_offset()


def _resizing_variant(call: OpCall) -> Any | None:
    """What runs an out variant whose targets have another shape than the results: they take that shape, as in torch."""
    outs, info = call.info.out_names, call.info
    if not outs or info.functional is None or not all(isinstance(call.kwargs.get(n), DTensor) for n in outs):
        return None
    kwargs = {k: v for k, v in call.kwargs.items() if k not in outs}
    outputs = infer_outputs(info.functional, call.args, kwargs)
    shapes = None if outputs is None else [getattr(t, "shape", None) for t in outputs]
    if shapes == [call.kwargs[n].shape for n in outs]:
        return None
    return writing_variant(call.func, info.functional)


def _off_mesh_route(call: OpCall, route: Route) -> Route:
    """What a rank that is not on the mesh does while the others take a route."""
    func = call.func
    if route.kind == "composite" and torch.Tag.nondeterministic_seeded in call.info.tags:
        return route  # its ops advance the random stream as on the mesh
    specs = None if route.kind in ("composite", "fallback") else route.specs
    return Route("off mesh", lambda a, k: run_off_mesh(func, a, k, specs), (), route.outputs)


def _results(call: OpCall, specs: Iterable[Spec]) -> tuple[Any, ...]:
    """The results of a call with the specs of its tensors in their places; numbers and None as they are."""
    rest = iter(specs)
    if call.outputs is None:
        return tuple(rest)
    return tuple(next(rest) if isinstance(t, torch.Tensor) else t for t in call.outputs)


def _compute_route(call: OpCall, find_route: FindRoute) -> Route:
    """The cheapest of rule, alternative and decomposition; the fallback if there is none."""
    func, model = call.func, current_costs()
    if indexes_nothing(call):
        return _fallback_route(call)
    resolution = None if call.info.is_composite_view else resolve(call)
    if resolution is None and is_composite(func):
        return Route("composite", lambda a, k: _decompose(func, a, k), ())
    best = _fallback_route(call) if resolution is None else _rule_route(call, resolution)
    seconds = model.total(best.plans or ())
    # of a tensor that has elements of memory more than once, a program would write back those that the op did not write
    proposals = (
        () if seconds == 0.0 or writes_overlapping(call) else (_alternative_route, _decomposition_route)
    )
    for propose in proposals:
        other = propose(call, resolution, find_route)
        if other is not None and model.total(other.plans or ()) < seconds:
            best = other
            break
    moves = (resolution is None or bool(resolution.plans)) and _is_distributed(call.args[0])
    if call.info.is_view and (moves or func in COMPUTED):
        return _remembering_base(call, best)
    return best


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # its operands were checked; what it creates is the same on every rank
    with override_settings(plain="replicate"):
        is_inference = torch.is_inference_mode_enabled() or any(
            t.is_inference() for t in tensors_in(args[:1])
        )
        if not is_inference or records_views(func):
            return run_composite(func, args, kwargs)
        with tracking_views():
            return run_composite(func, args, kwargs)


def _is_distributed(x: Any) -> bool:
    return isinstance(x, DTensor) and bool(x._spec.layout.sharded or x._spec.layout.partial)


def _remembering_base(call: OpCall, route: Route) -> Route:
    """The route of a view that does not share memory with its base: writes to either must reach the other."""
    func, run = call.func, route.run
    return Route(route.kind, lambda a, k: remember_base(func, a, k, run(a, k)), route.plans, route.outputs)


def _rule_route(call: OpCall, resolution: Resolution) -> Route:
    func = call.func
    run = direct_run(call, resolution) or (lambda a, k: execute(func, resolution, a, k))
    return Route("rule", run, resolution.plans, _results(call, resolution.outputs))


def _fallback_route(call: OpCall) -> Route:
    func, results = call.func, None
    if call.outputs is not None:
        results = tuple(
            replicated_spec(t, call.mesh) if isinstance(t, torch.Tensor) else t for t in call.outputs
        )
    run = with_own_strides(call, lambda a, k: run_on_full(func, a, k))
    if any(a.is_out and a.type.startswith("List") for a in call.info.arguments):
        run = _counting_list_writes(call, run)
    return Route("fallback", run, tuple(call.replication_plans), results)


def _alternative_route(call: OpCall, resolution: Resolution | None, find_route: FindRoute) -> Route | None:
    # a rule that a user registered comes before our alternatives
    alternative = None if call.info.name in REGISTERED else propose_alternative(call, resolution)
    return None if alternative is None else _program_route("alternative", call, alternative, find_route)


def _decomposition_route(call: OpCall, resolution: Resolution | None, find_route: FindRoute) -> Route | None:
    """An op without a rule as a program of other ops, if torch has one that needs no values."""
    # a call that the op refuses must reach the op itself, which says why
    if resolution is not None or call.info.is_view or call.outputs is None:
        return None
    program = program_for(call.func)
    if program is None:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        # plain tensors that the program creates are the same on every rank
        with override_settings(plain="replicate"):
            return program(*args, **kwargs)

    return _program_route("decomposition", call, Alternative(run), find_route)


def _program_route(
    kind: RouteKind, call: OpCall, alternative: Alternative, find_route: FindRoute
) -> Route | None:
    """The route of a program, whose plans a dry run finds if they are not known; None if they depend on values."""
    func, program = call.func, alternative.run
    if alternative.plans is not None:
        plans, specs = alternative.plans, alternative.outputs or ()
    elif (estimate := dry_run(program, call, find_route)) is not None:
        plans, specs = estimate
    else:
        return None

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with communication(func, plans):
            return program(*args, **kwargs)

    return Route(kind, with_own_strides(call, run), plans, _results(call, specs))


def decide(call: OpCall, find_route: FindRoute) -> tuple[Route, Run]:
    """The route of a call, and its run with everything around it that must happen on every call."""
    route = choose_route(call, find_route)
    func, run = call.func, route.run
    if positions := plain_tensors_to_compare(call):
        run = _comparing_plain(func, positions, call, run)
    if takes_plain_operands(call):
        run = with_plain_gradients(run)
    if any(t.dtype.is_complex for t in call.tensors):
        run = resolving_lazy_bits(run)
    run = checking_values(call, run)
    if call.info.writes:
        if route.kind == "rule" and is_composite(func) and not records_views(func):
            run = _counting_writes(call, run)
        if route.plans != () or call.info.out_names or call.info.qualified_name in FORBIDS_ALIAS:
            run = _checking_overlap(func, run)
    elif route.plans != () and not call.info.is_view:
        run = _matching_strides(run)
    if current_settings().decisions.traced:
        run = traced(func, Route(route.kind, run, route.plans, route.outputs))
    return route, _checking_default_dtype(call, route, run, find_route)


def _comparing_plain(func: Any, positions: list[int], call: OpCall, inner: Run) -> Run:
    mesh = call.mesh

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compare_plain(func, OpCall(func, args, kwargs).tensors, positions, mesh)
        return inner(args, kwargs)

    return run


def _counting_list_writes(call: OpCall, inner: Run) -> Run:
    """The run of an op that writes to a list of tensors; autograd counts writes to single ones."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = inner(args, kwargs)
        bump_versions(tensors_in([kwargs[name] for name in call.info.out_names]))
        return result

    return run


def _counting_writes(call: OpCall, inner: Run) -> Run:
    """The run of an in-place op such as `__iand__`, which inference mode passes on whole, and so does not count."""
    i = call.info.written[0]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bump_versions(args[i : i + 1])
        return inner(args, kwargs)

    return run


def _checking_overlap(func: Any, inner: Run) -> Run:
    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_overlap(OpCall(func, args, kwargs))
        return inner(args, kwargs)

    return run


def _matching_strides(inner: Run) -> Run:
    return lambda args, kwargs: match_strides(inner(args, kwargs))


def _checking_default_dtype(call: OpCall, route: Route, inner: Run, find_route: FindRoute) -> Run:
    """The run of a call whose results have the default dtype: it is decided anew when that has changed."""
    exact = all(not t.dtype.is_floating_point and not t.dtype.is_complex for t in call.tensors)
    if not exact or not any(s.dtype.is_floating_point or s.dtype.is_complex for s in route.specs or ()):
        return inner
    func, expected = call.func, torch.get_default_dtype()

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.get_default_dtype() is expected:
            return inner(args, kwargs)
        return decide(OpCall(func, args, kwargs), find_route)[1](args, kwargs)

    return run
