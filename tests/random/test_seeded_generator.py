"""Ops that draw from torch's generator depend on the stream alone."""

from __future__ import annotations

import pytest
import torch

from shardwise.random import Draw
from shardwise.random.seeded_generator import with_seeded_generator


def test_numbers_depend_on_the_draw_alone_and_torchs_generator_does_not_advance() -> None:
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        first = with_seeded_generator(torch.randn, Draw(1, 2))(5)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(3)
        assert torch.equal(with_seeded_generator(torch.randn, Draw(1, 2))(5), first)
        others = [
            with_seeded_generator(torch.randn, draw)(5)
            for draw in (Draw(1, 3), Draw(2, 2), Draw(1, 2 + 2**32))
        ]
    assert len({*first.tolist(), *(x for other in others for x in other.tolist())}) == 20


def test_torchs_generator_is_restored_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        with_seeded_generator(torch.randn, Draw(1, 2))(-1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_caller_is_used() -> None:
    own = torch.Generator()
    numbers = [
        with_seeded_generator(torch.randn, Draw(1, n))(5, generator=own.manual_seed(3)) for n in (2, 9)
    ]
    assert torch.equal(*numbers)
    assert torch.equal(numbers[0], torch.randn(5, generator=own.manual_seed(3)))
