"""Running the programs of `torch_programs` and the calls of `value_errors`, and judging how their ranks end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from tests.faults.forked_world import RankOutcome, run_world
from tests.faults.torch_programs import BAD, RIGHT, WRONG
from tests.faults.value_errors import BAD_RANK, IN_BACKWARD, VALUE_ERRORS, ValueError_

import shardwise as sw

__all__ = ["problems_of_programs", "problems_of_values"]

TIMEOUT = 2.0
VALUES = VALUE_ERRORS | {f"{name} in the backward pass": call for name, call in IN_BACKWARD.items()}


def guarded(program: Callable[[], Any], timeout: float) -> Callable[[Callable[[], None]], None]:
    def run(injected: Callable[[], None]) -> None:
        with sw.guard(timeout=timeout):
            injected()
            program()

    return run


def problems_of_programs(bound: float, names: Iterable[str] = (*RIGHT, *WRONG)) -> dict[str, str]:
    """What is wrong with how each program ended, or nothing."""
    found = {}
    for name in names:
        if name in RIGHT:
            ranks = run_world(guarded(RIGHT[name], 60.0), 4, 90.0).ranks
            found[name] = "".join(f"rank {r}: {o}" for r, o in ranks.items() if o.end != "returned")
            continue
        program, waits = WRONG[name]
        ranks = run_world(guarded(program, TIMEOUT), 4, 9 + bound, frozenset({BAD})).ranks
        others = {r: o for r, o in ranks.items() if r != BAD}
        found[name] = _problem(others, f"{BAD}", bound + waits)
    return found


def problems_of_values(bound: float, ranks: int, names: Iterable[str] = tuple(VALUES)) -> dict[str, str]:
    """The same for calls whose kernels check values, without a guard; the rank that raises stays for a while."""
    found = {}
    for name in names:
        outcome = run_world(_unguarded(VALUES[name]), ranks, 9 + bound, frozenset({BAD_RANK})).ranks
        own = {r for r, o in outcome.items() if o.error != "PeerError"}
        if own == set(outcome) and len({(o.error, o.text) for o in outcome.values()}) == 1:
            found[name] = "" if VALUES[name].message in outcome[0].text else f"another error: {outcome[0]}"
            continue
        others = {r: o for r, o in outcome.items() if r != BAD_RANK}
        found[name] = _problem(
            others, f"rank {BAD_RANK}", bound, VALUES[name].message, "value_errors.py:", "aten."
        )
    return found


def _unguarded(checked: ValueError_) -> Callable[[Callable[[], None]], float]:
    def run(injected: Callable[[], None]) -> float:
        injected()
        try:
            return float(checked.call().abs().sum().item())
        except Exception as error:
            if not isinstance(error, sw.PeerError):
                time.sleep(2.5)
            raise

    return run


def _problem(others: dict[int, RankOutcome], name: str, bound: float, *parts: str) -> str:
    if any(o.error != "PeerError" for o in others.values()):
        return f"ranks without an alarm: {others}"
    texts = {o.text for o in others.values()}
    text = min(texts)
    if len(texts) > 1:
        return f"different texts: {texts}"
    if name not in text.partition(" of ")[0]:
        return f"names another rank: {text}"
    if lacking := [part for part in (*parts, "  why: ", "  fix: ") if part not in text]:
        return f"lacks {lacking}: {text}"
    latest = max(o.seconds for o in others.values())
    return f"took {latest:.1f} s" if latest > bound else ""
