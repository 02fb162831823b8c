"""Write docs/faults.md: python -m tests.faults.document. The errors are those that the examples give when they run."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tests.faults.examples import GUARD, SANITIZE, Example
from tests.faults.forked_world import run_world
from tests.faults.harness import ROOT

import shardwise as sw

PAGE = ROOT / "docs" / "faults.md"
RANKS, BAD = 4, 2


def program_of(example: Example) -> Callable[[Callable[[], None]], Any]:
    def run(injected: Callable[[], None]) -> None:
        injected()
        with sw.guard(timeout=2 if example.kind == "timeout" else 60):
            mesh = sw.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
            rank = torch.distributed.get_rank()
            if example in SANITIZE:
                with sw.sanitize():
                    example.program(mesh, rank)
            else:
                example.program(mesh, rank)

    return run


def error_of(example: Example) -> str:
    """What rank 0 raises, with what depends on the run replaced."""
    outcome = run_world(program_of(example), RANKS, 12, frozenset({BAD})).ranks[0]
    text = re.sub(r"[^ ]*examples\.py", "train.py", outcome.text)
    text = re.sub(r"\d+\.\d s\b", "0.0 s", text)
    text = re.sub(r"process \d+", "process 4711", text)
    text = re.sub(
        r"(waited for|waited) 0\.0 s", r"\1 2.0 s" if example.kind == "timeout" else r"\1 0.5 s", text
    )
    text = re.sub(r"\]:\d+", "]:29500", text)
    return f"{outcome.error}: {text}"


def code_of(example: Example) -> str:
    """The lines of its program."""
    lines = inspect.getsource(example.program).splitlines()[1:]
    return textwrap.dedent("\n".join(lines))


def section(example: Example, text: str) -> str:
    # not marked as Python: the code needs four processes, and ends in an error
    return (
        f"### {example.title}\n\n```\n{code_of(example)}\n```\n\n```text\n{text}\n```\n\n{example.advice}\n"
    )


def render(error: Callable[[Example], str] = error_of) -> str:
    """The page."""
    before, _, _ = PAGE.read_text().partition("## Errors of `guard`")
    parts = ["## Errors of `guard`\n"]
    parts += [section(example, error(example)) for example in GUARD]
    parts.append("## Errors of `sanitize`\n")
    parts += [section(example, error(example)) for example in SANITIZE]
    return before + "\n".join(parts)


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    with sw.simulate(RANKS), sw.sanitize():  # so that no rank is late because it imports something
        mesh = sw.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        sw.ones(8, 4, device_mesh=mesh, placements=[sw.Shard(0)])[:6].sum().item()
    PAGE.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
