"""Drawn programs give the results, gradients, descriptions and errors of one device; differences are shrunk."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.programs import program as running
from tests.programs import templates_autograd, templates_ops  # noqa: F401  (they register templates)
from tests.programs.conditioning import Rounding
from tests.programs.drawing import draw_program
from tests.programs.program import AXES, Program, difference, simulated_difference
from tests.programs.shrink import printed, shrink

import shardwise as sw
from shardwise.comm.launch import Workers

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
PARTS = 10
PROGRAMS = 500 if DEEP else 15  # in each part
ON_PROCESSES = 200 if DEEP else 50
FIRST = random.randrange(10**6) * 10_000 if DEEP else 0
"""The seed of the first program; CI runs the same programs every time."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_equal_one_device(part: int) -> None:
    seeds = list(range(FIRST + part * PROGRAMS, FIRST + (part + 1) * PROGRAMS))
    random.Random(part).shuffle(seeds)  # what a program leaves in caches must not change those after it
    for seed in seeds:
        _check(draw_program(seed), seed)


def _check(program: Program, seed: int) -> None:
    found = simulated_difference(program)
    if found is not None:
        small, found = shrink(program, found, simulated_difference)
        pytest.fail(f"seed {seed}\n{printed(small, found)}", pytrace=False)


@pytest.fixture(scope="module")
def three() -> Iterator[Workers]:
    with Workers(3, timeout=300) as team:
        yield team


def differences(programs: list[tuple[int, Program]]) -> list[tuple[int, str, str]]:
    """The seeds of the programs that differ on these processes, with what differs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    out, meshes = [], {}
    for seed, program in programs:
        if program.mesh not in meshes:
            names = AXES[: len(program.mesh)]
            meshes[program.mesh] = sw.init_device_mesh("cpu", program.mesh, mesh_dim_names=names)
        found = difference(program, meshes[program.mesh])
        if found is not None:
            out.append((seed, found.kind, found.text))
    return out


@pytest.mark.processes
def test_programs_on_processes_equal_one_device(three: Workers) -> None:
    seeds = range(FIRST + 5000, FIRST + 5000 + ON_PROCESSES)
    programs = {seed: draw_program(seed, ((3,), (3, 1), (1, 3))[seed % 3]) for seed in seeds}
    for found in three.run(differences, list(programs.items())):
        for seed, kind, text in found:
            code = "\n".join(s.code for s in programs[seed].statements)
            pytest.fail(f"seed {seed}, mesh {programs[seed].mesh}: {kind}: {text}\n{code}", pytrace=False)


def test_a_wrong_result_is_found_and_shrunk_to_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    right = running.tensor

    def wrong(whole: torch.Tensor, layout: sw.Layout, *args: object) -> sw.DTensor:
        return right(whole if layout.partial else whole + 1, layout, *args)

    monkeypatch.setattr(running, "tensor", wrong)
    program = next(p for p in map(draw_program, range(20)) if len(p.statements) > 15)
    found = simulated_difference(program)
    assert found is not None
    small, found = shrink(program, found, simulated_difference)
    assert len(small.statements) <= 2
    assert "put(" in printed(small, found)


def test_rounding_errors_in_second_derivatives() -> None:
    """The derivatives that are 0 have no memory: to round them would end the process."""
    x = torch.arange(3.0, dtype=torch.float64)
    with Rounding(0):
        rounded = torch.func.hessian(lambda t: t.sin().sum())(x)
    torch.testing.assert_close(rounded, torch.diag(-x.sin()))


def test_a_missing_error_is_found() -> None:
    program = Program(
        (2,), (running.Statement("t1 = put((2,), 'int64', 0, '[2:dp]') @ put((3,), 'int64', 0, '[3]')"),)
    )
    program = running.with_errors(program)
    assert program.statements[0].raises == "RuntimeError"
    assert simulated_difference(program) is None
    wrong = Program((2,), (running.Statement("t1 = put((2,), 'int64', 0, '[2:dp]')", "RuntimeError"),))
    assert running.run_dense(wrong).errors == [""]
