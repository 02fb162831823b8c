"""Scoped settings: which communication is allowed, what a plain tensor counts as, and what communication costs.

All of them are one immutable value in one context variable, so that a context restores everything it changed. What is
decided under a cost model is cached in the `Decisions` of that model, so that no cached decision outlives its model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.layout.sizes import at_new_symbols
from shardwise.plan.cost import DEFAULT_COSTS, CostModel

__all__ = [
    "DEFAULT_SETTINGS",
    "Decisions",
    "Implicit",
    "Plain",
    "PlainSetting",
    "Settings",
    "active",
    "at_forget",
    "costs",
    "current_costs",
    "current_settings",
    "forget_decisions",
    "fresh_routes",
    "override_settings",
    "pop_settings",
    "push_settings",
    "restore_settings",
    "share_with_other_threads",
]

Implicit = Literal["allow", "warn", "error", "strict"]
Plain = Literal["error", "check", "replicate"]
PlainSetting = Literal["error", "check", "replicate", "losses"]
"""`Plain`, and inside of `loss_parallel`: plain tensors count as replicated as operands of losses only."""


class Decisions:
    """Caches of what was decided under one cost model: plans by their layouts, and routes by op and call.

    Calls that are traced have caches of their own, so that untraced calls need no check. So have those with symbolic sizes,
    which are forgotten sooner.
    """

    __slots__ = ("model", "plans", "routes", "symbolic_plans", "symbolic_routes", "traced")

    def __init__(self, model: CostModel, traced: bool) -> None:
        self.model, self.traced = model, traced
        self.plans: dict[Any, Any] = {}
        self.routes: dict[int, Any] = {}
        self.symbolic_plans: dict[Any, Any] = {}
        self.symbolic_routes: dict[int, Any] = {}

    def forget_symbols(self) -> None:
        """Drop what was decided for symbolic sizes."""
        self.symbolic_plans.clear()
        self.symbolic_routes.clear()


_decisions: dict[tuple[CostModel, bool], Decisions] = {}


def _decisions_for(model: CostModel, traced: bool) -> Decisions:
    return _decisions.setdefault((model, traced), Decisions(model, traced))


at_forget: list[Callable[[], None]] = []
"""Called when cached routes are dropped, by caches that were filled from them."""


def forget_decisions(*, plans: bool = True) -> None:
    """Drop cached routes, and cached plans unless `plans` is False, so that every call is decided anew."""
    for forget in at_forget:
        forget()
    for decisions in _decisions.values():
        decisions.routes.clear()
        decisions.forget_symbols()
        if plans:
            decisions.plans.clear()


def _forget_symbolic_decisions() -> None:
    for decisions in list(_decisions.values()):
        decisions.forget_symbols()


at_new_symbols.append(_forget_symbolic_decisions)


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """One set of settings. `routes` is that of `decisions`, one attribute less for the hot path to read."""

    implicit: Implicit
    plain: PlainSetting
    decisions: Decisions
    routes: dict[int, Any]
    reuse: int  # bytes
    outer: Settings | None = None
    was_set: bool = True  # whether the thread had settings of its own before

    @property
    def key(self) -> tuple[Implicit, PlainSetting, CostModel, bool]:
        """What decisions depend on."""
        return self.implicit, self.plain, self.decisions.model, self.decisions.traced


_default = _decisions_for(DEFAULT_COSTS, False)
DEFAULT_SETTINGS = Settings("allow", "error", _default, _default.routes, 1 << 28)
active: ContextVar[Settings | None] = ContextVar("shardwise_settings", default=None)
active.set(DEFAULT_SETTINGS)  # for this thread; others use `inherited`
_publish: Callable[[Settings], None] = lambda settings: None  # noqa: E731
_inherit: Callable[[], Settings | None] = lambda: None  # noqa: E731


def share_with_other_threads(
    publish: Callable[[Settings], None], inherit: Callable[[], Settings | None]
) -> None:
    """Set how threads that autograd starts get the settings of the thread that called `backward`."""
    global _publish, _inherit
    _publish, _inherit = publish, inherit


def inherited() -> Settings:
    """The settings of a thread that has set none itself."""
    return _inherit() or DEFAULT_SETTINGS


def current_settings() -> Settings:
    """The settings in force."""
    return active.get() or inherited()


def current_costs() -> CostModel:
    """The cost model in force."""
    return current_settings().decisions.model


@contextmanager
def override_settings(
    *,
    implicit: Implicit | None = None,
    plain: PlainSetting | None = None,
    model: CostModel | None = None,
    traced: bool | None = None,
    reuse: int | None = None,
) -> Iterator[None]:
    """Change some settings inside the block; what is not given stays as it is outside."""
    push_settings(implicit, plain, model, traced, reuse)
    try:
        yield
    finally:
        pop_settings()


def push_settings(
    implicit: Implicit | None = None,
    plain: PlainSetting | None = None,
    model: CostModel | None = None,
    traced: bool | None = None,
    reuse: int | None = None,
) -> None:
    """Change some settings, until `pop_settings`. For context managers, which compiled code takes apart."""
    outer = current_settings()
    decisions = outer.decisions
    if model is not None or traced is not None:
        decisions = _decisions_for(model or decisions.model, decisions.traced if traced is None else traced)
    kept = outer.reuse if reuse is None else reuse
    _push(implicit or outer.implicit, plain or outer.plain, decisions, kept)


def _push(implicit: Implicit, plain: PlainSetting, decisions: Decisions, reuse: int) -> None:
    outer, was_set = current_settings(), active.get() is not None
    restore_settings(Settings(implicit, plain, decisions, decisions.routes, reuse, outer, was_set))


def pop_settings() -> None:
    """Return to the settings before the last `push_settings`."""
    inner = current_settings()
    outer = inner.outer or DEFAULT_SETTINGS
    active.set(outer if inner.was_set else None)
    _publish(outer)


def restore_settings(settings: Settings) -> None:
    """Use the settings that were in force at another time."""
    active.set(settings)
    _publish(settings)


@contextmanager
def fresh_routes() -> Iterator[None]:
    """Choose and keep routes apart inside the block, and keep no moved blocks: for tensors without values."""
    outer = current_settings()
    decisions = Decisions(outer.decisions.model, outer.decisions.traced)
    decisions.plans = outer.decisions.plans
    _push(outer.implicit, outer.plain, decisions, 0)
    try:
        yield
    finally:
        pop_settings()


@contextmanager
def costs(model: CostModel) -> Iterator[None]:
    """Use another cost model inside the block, for every decision: redistribution plans, rules and alternatives.

    Args:
        model: a `CostModel`, given or measured with `CostModel.measure(mesh)`. All ranks must use the same one, or they
            would decide differently.

    Raises:
        TypeError: `model` is not a `CostModel`.

    Nothing is communicated.

    >>> import shardwise as sw
    >>> with sw.costs(sw.CostModel(latency=1e-6, bandwidth=1e11)):
    ...     current_costs().latency
    1e-06
    """
    if not isinstance(model, CostModel):
        raise TypeError(
            f"costs() got {model!r}.\n"
            "  why: decisions are compared by a CostModel.\n"
            "  fix: costs(CostModel(latency=1e-5, bandwidth=1e10)), or costs(CostModel.measure(mesh))."
        )
    with override_settings(model=model):
        yield
