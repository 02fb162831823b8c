"""Programs that torch refuses or gets wrong are right with ours; `make refusals` runs both on processes."""

import pytest
from tests.parallel.refusals import PROGRAMS, Program, outcome

import shardwise as sw


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.number}")
def test_is_right(program: Program) -> None:
    with sw.simulate(4):
        assert outcome(program.number, "ours") == "right"
