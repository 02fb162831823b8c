"""Eager and captured training have the same bits and send the same, for drawn models, plans, meshes and optimizers."""

import os

import pytest
from tests.compile.programs import compare, draw_case

pytestmark = pytest.mark.processes
COUNT = 60 if os.environ.get("SHARDWISE_DEEP") == "1" else 6  # one of each kind


def test_captured_steps_have_the_bits_and_the_collectives_of_eager_ones(workers):
    cases = [draw_case(seed) for seed in range(COUNT)]
    for differences in workers.run(compare, cases):
        assert [d for d in differences if d] == []
