"""Watchers of torch's generator: which of torch's functions call them, and with what."""

import io
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardwise.torch_internals.rng import watch_torch_seeding

PATCHED = ("get_rng_state", "set_rng_state", "_seed_custom_device")


@pytest.fixture
def watched(monkeypatch):
    """A random state of ours, `position`, that follows torch's generator; and the seeds and states it was given."""
    record = SimpleNamespace(position=0, seeds=[], restored=[])

    def restore(position):
        record.restored.append(position)
        record.position = record.position if position is None else position

    def on_seed(seed):
        record.seeds.append(seed)

    def save():
        return record.position

    with torch.random.fork_rng(), monkeypatch.context() as patch:
        for name in PATCHED:  # so that the fixture ends with the functions it began with
            patch.setattr(torch.random, name, getattr(torch.random, name))
        for name in PATCHED[:2]:
            patch.setattr(torch, name, getattr(torch, name))
        watch_torch_seeding(on_seed, save, restore)
        watch_torch_seeding(on_seed, save, restore)  # has no effect
        yield record


@pytest.mark.parametrize("seed", [5, -1, 2**64 - 1, True])
def test_manual_seed_is_reported(watched, seed):
    torch.manual_seed(seed)
    assert watched.seeds == [int(seed)]


def test_a_nondeterministic_seed_is_reported(watched):
    assert watched.seeds == [torch.seed()]
    assert watched.seeds == [torch.initial_seed()]


def test_an_earlier_import_of_manual_seed_is_reported(watched):
    from torch.random import manual_seed  # not patched

    assert manual_seed.__module__ == "torch.random"
    manual_seed(7)
    assert watched.seeds == [7]


def test_methods_of_the_generator_are_not_reported(watched):
    torch.default_generator.manual_seed(3)
    torch.default_generator.set_state(torch.default_generator.get_state())
    torch.Generator().manual_seed(4)
    assert (watched.seeds, watched.restored) == ([], [])


@pytest.mark.parametrize("module", [torch, torch.random])
def test_a_state_restores_what_was_saved_when_it_was_read(watched, module):
    watched.position = 1
    first, numbers = module.get_rng_state(), torch.rand(3)
    watched.position = 2
    second = module.get_rng_state()
    for state, position in ((first, 1), (second, 2), (first, 1)):
        module.set_rng_state(state)
        assert watched.position == position
    assert torch.equal(torch.rand(3), numbers)  # torch's own state as well


def test_a_state_of_another_origin_restores_none(watched):
    watched.position = 3
    file = io.BytesIO()
    torch.save(torch.get_rng_state(), file)
    file.seek(0)
    for state in (torch.get_rng_state().clone(), torch.load(file, weights_only=True)):
        torch.set_rng_state(state)
    assert watched.restored == [None, None]
    assert watched.position == 3


def test_fork_rng_restores(watched):
    watched.position = 4
    with torch.random.fork_rng():
        watched.position = 9
    assert watched.position == 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_from_the_saved_state(watched, use_reentrant):
    seen = []

    def block(x):
        seen.append(watched.position)
        watched.position += 1
        return x.sin()

    watched.position = 5
    loss = checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant).sum()
    watched.position = 8
    loss.backward()
    assert seen == [5, 5]
    assert watched.position == 8
