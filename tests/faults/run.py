"""Inject drawn faults and count how the ranks end: python -m tests.faults.run --faults 100 --programs 200 --torch.

Exits with 1 unless every fault ends, on every rank that survives it, in one error with one text that names the rank at fault,
within 2 seconds (after the timeout for faults that only the timeout can find), and no right program raises an alarm.
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from tests.faults.forked_world import WorldOutcome, run_world
from tests.faults.injected import MODELS, RANKS, WATCHDOG, Injected, Run, draw_faults, train
from tests.faults.libraries import ours, theirs
from tests.faults.own_calls import VALUES, problems_of_programs, problems_of_values
from tests.faults.torch_programs import RIGHT, WRONG
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw

TIMEOUT = 2.0
BOUND = 2.0
LIMIT = 7.0  # after which torch's ranks count as hung
ALARMS = ("PeerError", "DivergenceError")


def program_of(fault: Injected | None, lib: str) -> Callable[[Callable[[], None]], Any]:
    """What each rank runs."""

    def on_ours(injected: Callable[[], None]) -> float:
        with sw.guard(timeout=TIMEOUT):
            if fault is not None and not fault.is_silent:
                return train(Run(fault, ours(), injected))
            with sw.sanitize():
                return train(Run(fault, ours(), injected))

    def on_theirs(injected: Callable[[], None]) -> float:
        return train(Run(fault, theirs(), injected))

    return on_ours if lib == "ours" else on_theirs


def warm_up(with_torch: bool) -> None:
    """Import and cache what the forked ranks would otherwise, each of them: that takes seconds."""
    torch.set_num_threads(1)
    models = [Injected("exception", RANKS, "nowhere", 0, model, 0) for model in MODELS]
    with sw.simulate(RANKS), sw.sanitize():
        for model in models:
            train(Run(model, ours(), lambda: None))
    if with_torch:
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
        for model in models:
            train(Run(model, theirs(), lambda: None))
        dist.destroy_process_group()


def verdict(fault: Injected, found: WorldOutcome, bound: float = BOUND) -> str:
    """What is wrong with how a fault ended on shardwise, or nothing."""
    if not found.injected:
        return "was not injected"
    others = {r: o for r, o in found.ranks.items() if r not in fault.at_fault}
    if wrong := {r: (o.end, o.error, o.text[:300]) for r, o in others.items() if o.error not in ALARMS}:
        return f"ranks without an alarm: {wrong}"
    texts = {o.text for o in others.values()}
    if len(texts) > 1:
        return f"different texts: {texts}"
    text = texts.pop()
    if not any(
        f" {rank}" in text.partition("\n")[0] or f"  rank {rank}: " in text for rank in fault.at_fault
    ):
        return f"does not name rank {fault.rank}: {text}"
    if "  why: " not in text or "  fix: " not in text:
        return f"lacks a part: {text}"
    latest = max(o.seconds for o in others.values())
    allowed = bound + (TIMEOUT if fault.kind in WATCHDOG else 0.0)
    return f"took {latest:.1f} s" if latest > allowed else ""


def classify(fault: Injected, found: WorldOutcome) -> str:
    """How a fault ended on torch: the worst of the ranks that survived it."""
    others = [o for r, o in found.ranks.items() if r not in fault.at_fault]
    if any(o.end == "hung" for o in others):
        return "hang"
    if any(o.end == "died" for o in others):
        return "abort"
    if any(o.end == "returned" for o in others):
        return "no error on some rank" if any(o.end != "returned" for o in others) else "silent"
    if all(f"rank {fault.rank}" in o.text for o in others):
        return "named"
    return "misleading error"


def run_right(programs: int) -> list[str]:
    """The alarms that right programs raise on processes, under guard and sanitize."""
    from tests.faults.right_programs import alarms_of

    return alarms_of(range(programs), run_world)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument(
        "--values", type=int, help="how many calls whose kernels check values; all by default"
    )
    parser.add_argument("--calls", nargs="*", help="programs that call torch.distributed; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a kind of fault")
    parser.add_argument("--torch", action="store_true", help="run them on torch's DTensor as well")
    parser.add_argument("--bound", type=float, default=BOUND)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    ends: dict[str, collections.Counter[str]] = {
        "shardwise": collections.Counter(),
        "torch": collections.Counter(),
    }
    wrong, slowest = 0, 0.0
    faults = [f for f in draw_faults(options.faults, options.seed) if options.only in (None, f.kind)]
    import_module("torch._dynamo")  # which DDP imports
    warm_up(options.torch)
    for i, fault in enumerate(faults):
        found = run_world(program_of(fault, "ours"), RANKS, TIMEOUT + 8, fault.at_fault)
        problem = verdict(fault, found, options.bound)
        seconds = max(o.seconds for r, o in found.ranks.items() if r not in fault.at_fault)
        slowest = max(slowest, seconds - (TIMEOUT if fault.kind in WATCHDOG else 0.0))
        ends["shardwise"]["wrong" if problem else "named"] += 1
        wrong += bool(problem)
        line = f"{i} {fault.name}: {problem or f'named after {seconds:.2f} s'}"
        if options.torch:
            how = classify(fault, run_world(program_of(fault, "theirs"), RANKS, LIMIT, fault.at_fault))
            ends["torch"][how] += 1
            line += f"; torch: {how}"
        print(line, flush=True)
    alarms = run_right(options.programs) if options.programs else []
    print("\n".join(alarms))
    names = (*RIGHT, *WRONG) if options.calls is None else options.calls
    others = problems_of_programs(options.bound, names)
    for ranks in (4, 3):
        found = problems_of_values(options.bound, ranks, list(VALUES)[: options.values])
        others |= {f"{name} on {ranks} ranks": problem for name, problem in found.items()}
    print("\n".join(f"{name}: {problem}" for name, problem in others.items() if problem))
    print(f"shardwise: {dict(ends['shardwise'])}, the slowest {slowest:.2f} s after what is allowed began")
    if options.torch:
        print(f"torch: {dict(ends['torch'])}")
    print(f"right programs: {options.programs}, alarms: {len(alarms)}")
    print(
        f"programs that call torch.distributed, and kernels that check values: {len(others)}, wrong: {sum(map(bool, others.values()))}"
    )
    return int(wrong > 0 or bool(alarms) or any(others.values()))


if __name__ == "__main__":
    start = time.monotonic()
    code = main(sys.argv[1:])
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(code)
