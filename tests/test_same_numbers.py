"""The example's claim: one training run with dropout, alone and on meshes, with the same bits and nearly the same losses."""

import pytest
import torch
from examples.same_numbers import WAYS, train, world

import shardwise as sw

STEPS = 50
BOUND = 1e-6
"""How far losses may be apart: sums are added in another order. Seen: 1.8e-7 of losses from 1.1 to 0.5."""


@pytest.fixture(scope="module")
def alone():
    with world(()) as mesh:
        return train(mesh, STEPS)


@pytest.mark.parametrize("name", [name for name in WAYS if WAYS[name]])
def test_training_on_a_mesh_is_training_alone(alone, name):
    with world(WAYS[name]) as mesh:
        weights, mask, losses = train(mesh, STEPS)
    assert (weights, mask) == alone[:2]
    assert losses == pytest.approx(alone[2], abs=BOUND, rel=0)
    assert losses[-1] < losses[0] / 2


def on_processes():
    torch.set_num_threads(1)
    return train(sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), STEPS)


@pytest.mark.processes
def test_training_on_real_processes_is_training_alone(workers, alone):
    for weights, mask, losses in workers.run(on_processes):
        assert (weights, mask) == alone[:2]
        assert losses == pytest.approx(alone[2], abs=BOUND, rel=0)


def test_another_seed_is_another_run(alone, monkeypatch):
    monkeypatch.setattr("examples.same_numbers.SEED", 1)
    with world(()) as mesh:
        weights, mask, _ = train(mesh, 1)
    assert weights != alone[0]
    assert mask != alone[1]
