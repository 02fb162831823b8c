"""Tracing calls: which route each op on DTensors took, and what it sent; running them under a watcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.call.route import Route, RouteKind, Run
from shardwise.plan import Plan
from shardwise.plan.settings import override_settings

__all__ = ["CallSite", "TracedCall", "Watcher", "select_watcher", "trace_calls", "traced", "watch_calls"]


class TracedCall(NamedTuple):
    """A call that is about to run.

    Attributes:
        op: the op.
        route: the kind of route it takes.
        args: its arguments.
        kwargs: its keyword arguments.
        plans: what it will send, as far as that is known before it runs; less if an operand that another op moved is kept.
    """

    op: Any
    route: RouteKind
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    plans: Sequence[Plan]

    @property
    def communicates(self) -> bool:
        """Whether the plans contain a collective."""
        return any(plan.collectives for plan in self.plans)


@dataclass(slots=True, eq=False)
class CallSite:
    """Calls of one op that take one route, because their operands have the same specs.

    Attributes:
        op: the op.
        route: the route.
        kept: what a watcher keeps about these calls.
    """

    op: Any
    route: Route
    kept: Any = None


Watcher = Callable[[CallSite, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a call by `site.route.run(args, kwargs)` and returns its result."""

_listeners: list[Callable[[TracedCall], None]] = []
_watching: list[tuple[Watcher, Callable[[], bool]]] = []
_watchers: list[Watcher] = []  # the one that runs calls, if there is one


@contextmanager
def trace_calls(listener: Callable[[TracedCall], None]) -> Iterator[None]:
    """Notify `listener` of each call inside the block before it runs; calls that the listener makes are not traced.

    Args:
        listener: called with a `TracedCall`, also for the ops that a call consists of.

    Nothing is communicated.

    >>> import torch, shardwise as sw
    >>> with sw.simulate(2), trace_calls(lambda call: print(call.op, call.route, call.communicates)):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)])
    ...     _ = x.exp().cumsum(0)
    aten.exp.default rule False
    aten.cumsum.default rule True
    """
    with override_settings(traced=True):
        _listeners.append(listener)
        try:
            yield
        finally:
            _listeners.remove(listener)


def _always() -> bool:
    return True


@contextmanager
def watch_calls(watcher: Watcher, is_active: Callable[[], bool] = _always) -> Iterator[None]:
    """Let `watcher` run the calls inside the block, also the ops that a call consists of; the innermost one does.

    Args:
        watcher: runs the calls.
        is_active: whether it does so for the time being; `select_watcher` asks.

    Nothing is communicated.

    >>> import torch, shardwise as sw
    >>> def watch(site, args, kwargs):
    ...     print(site.op, site.route.kind)
    ...     return site.route.run(args, kwargs)
    >>> with sw.simulate(2), watch_calls(watch):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     _ = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)]).exp()
    aten.exp.default rule
    """
    with override_settings(traced=True):
        _watching.append((watcher, is_active))
        select_watcher()
        try:
            yield
        finally:
            _watching.remove((watcher, is_active))
            select_watcher()


def select_watcher() -> None:
    """Let the innermost active watcher run the calls; to be called when a watcher has become active or has ceased to be."""
    _watchers[:] = [watcher for watcher, is_active in _watching if is_active()][-1:]


def traced(func: Any, route: Route) -> Run:
    """The run of a route, which notifies the listeners first and is run by the watcher, if there is one."""
    site, inner = CallSite(func, route), route.run

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _watchers and not _listeners:  # as in most steps of a sampled `sanitize`
            return inner(args, kwargs)
        if _listeners:
            call = TracedCall(func, route.kind, args, kwargs, route.plans or ())
            listeners = list(_listeners)
            _listeners.clear()
            try:
                for listener in listeners:
                    listener(call)
            finally:
                _listeners[:] = listeners
        return _watchers[-1](site, args, kwargs) if _watchers else inner(args, kwargs)

    return run
