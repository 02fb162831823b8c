"""Shrinking: the smallest program with a difference of the same kind, printed as code that runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from tests.programs.program import Difference, Program, Statement, run_dense

__all__ = ["printed", "shrink"]

Check = Callable[[Program], Difference | None]


def shrink(
    program: Program, found: Difference, check: Check, budget: int = 300
) -> tuple[Program, Difference]:
    """Remove statements and splits as long as a difference of the same kind remains."""
    tries = 0

    def still(candidate: Program) -> Difference | None:
        nonlocal tries
        tries += 1
        errors = run_dense(candidate).errors
        if errors != [s.raises for s in candidate.statements]:
            return None
        other = check(candidate)
        return other if other is not None and other.kind == found.kind else None

    changed = True
    while changed and tries < budget:
        changed = False
        for candidate in _smaller(program):
            if tries >= budget:
                break
            if (other := still(candidate)) is not None:
                program, found, changed = candidate, other, True
                break
    return program, found


def _smaller(program: Program):
    """Programs with fewer statements, then with simpler statements."""
    statements = program.statements
    n = len(statements)
    for size in (n // 2, n // 4, 2, 1):
        for end in range(n, size - 1, -max(size, 1)):
            if size:
                yield replace(program, statements=statements[: end - size] + statements[end:])
    for i, statement in enumerate(statements):
        for code in _simpler(statement.code):
            yield replace(
                program, statements=(*statements[:i], Statement(code, statement.raises), *statements[i + 1 :])
            )


def _simpler(code: str):
    for pattern, by in (
        (r"\.requires_grad_\(\)$", ""),
        (r"^with [^\n]*:\n    ", ""),
        (r" P\(\w+,\w+\)", ""),
        (r":[a-z]+(,[a-z]+)*", ""),
    ):
        for match in re.finditer(pattern, code):
            if pattern.startswith(":") and "put(" not in code:
                continue
            yield code[: match.start()] + by + code[match.end() :]


def printed(program: Program, found: Difference) -> str:
    """A program and its difference, as code that runs."""
    lines = ["from tests.programs.program import Program, Statement, check_simulated", ""]
    lines += [
        f"check_simulated(Program({program.mesh}, (",
        *(
            f"    Statement({s.code!r}{', ' + repr(s.raises) if s.raises else ''}),"
            for s in program.statements
        ),
        ")))",
    ]
    readable = [
        line
        for s in program.statements
        for line in (s.code + (f"  # {s.raises}" if s.raises else "")).split("\n")
    ]
    return "\n".join([f"# {found.kind}: {found.text}", *(f"#   {line}" for line in readable), *lines])
