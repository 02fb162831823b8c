"""Drawn programs with collectives, hooks and autograd functions give the same numbers in a simulation as on processes."""

from __future__ import annotations

import os

import pytest
import torch
from tests.comm.user_programs import run_programs

from shardwise import PerRank, simulate

pytestmark = pytest.mark.processes
COUNT = 2000 if os.environ.get("SHARDWISE_DEEP") == "1" else 120


def test_drawn_programs_give_the_same_numbers_in_a_simulation_as_on_processes(workers):
    seeds = list(range(COUNT))
    on_processes = workers.run(run_programs, seeds)
    with simulate(4):
        simulated = run_programs(seeds)
    compared = 0
    for seed, one, *real in zip(seeds, simulated, *on_processes, strict=True):
        if isinstance(one, str) or isinstance(
            real[0], str
        ):  # as an optimizer step between two backward passes
            assert [str(r).split(":")[:2] for r in real] == [str(one).split(":")[:2]] * 4, f"program {seed}"
            continue
        compared += 1
        for i, value in enumerate(one):
            for rank in range(4):
                assert (value is None) == (real[rank][i] is None), f"program {seed}, result {i}"
                if value is not None:
                    mine = value.of_rank(rank) if isinstance(value, PerRank) else value
                    assert torch.allclose(mine, real[rank][i], 1e-9, 1e-11), f"program {seed}, result {i}"
    assert compared > 0.9 * COUNT
