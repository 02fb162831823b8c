"""Taking alternatives also for small tensors, for which gathering would be cheaper."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardwise.call.trace import trace_calls
from shardwise.dispatch import routes
from shardwise.plan import Plan
from shardwise.plan.settings import forget_decisions


class _AnythingButTheRule:
    """Costs for one decision, in which the rule or the fallback comes first: it is infinite if it communicates."""

    def __init__(self) -> None:
        self._first = True

    def total(self, plans: Sequence[Plan | None]) -> float:
        first, self._first = self._first, False
        return float("inf") if first and any(plan and plan.collectives for plan in plans) else 0.0


@contextmanager
def force_alternatives() -> Iterator[list[Any]]:
    """Take the alternative of each call whose rule would communicate; yield the ops that took one so far."""
    taken: list[Any] = []
    known = routes.current_costs
    forget_decisions(plans=False)
    routes.current_costs = _AnythingButTheRule  # type: ignore[assignment]
    try:
        with trace_calls(lambda call: taken.append(call.op) if call.route == "alternative" else None):
            yield taken
    finally:
        routes.current_costs = known
        forget_decisions(plans=False)
