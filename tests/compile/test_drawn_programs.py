"""Eager and captured training have the same bits and send the same, for drawn models, plans, meshes and optimizers."""

import os

import pytest
from tests.compile.programs import OTHER_MODELS, compare, compare_compiled, draw_case

pytestmark = pytest.mark.processes
DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
COUNT = 60 if DEEP else 6  # one of each kind


def chunks(cases, size):
    return [cases[i : i + size] for i in range(0, len(cases), size)]


def test_captured_steps_have_the_bits_and_the_collectives_of_eager_ones(workers):
    # 13: pending gradients are accumulated
    seeds = range(COUNT) if DEEP else (*range(COUNT), 13)
    for cases in chunks([draw_case(seed) for seed in seeds] + OTHER_MODELS, 5):
        for differences in workers.run(compare, cases):
            assert [d for d in differences if d] == []


@pytest.mark.skipif(not DEEP, reason="compiles for minutes")
def test_compiled_steps_are_those_of_eager_ones_up_to_rounding(workers):
    for seed in range(6):
        for differences in workers.run(compare_compiled, [draw_case(seed)]):
            assert [d for d in differences if d] == []
