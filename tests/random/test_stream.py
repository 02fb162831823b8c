"""Streams without meshes: snapshots, states as bytes, and how they follow torch's generator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.random.stream import (
    WORLD,
    Stream,
    follow_torch_seed,
    follow_torch_state,
    own_stream,
    restore,
    snapshot,
    start_stream,
    stream_of,
)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def test_a_snapshot_can_be_restored_more_than_once() -> None:
    start_stream(WORLD, 7)
    start_stream("mesh", 8)
    saved = snapshot()
    expected = [stream_of().next(), stream_of("mesh").next()]
    for _ in range(2):
        restore(saved)
        assert [stream_of().next(), stream_of("mesh").next()] == expected
    start_stream("other", 9)
    restore(saved)
    assert stream_of("other") is stream_of()


@given(st.builds(Stream, st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1), st.booleans()))
def test_a_state_of_16_bytes_round_trips(stream: Stream) -> None:
    state = stream.to_bytes()
    assert (state.dtype, state.numel()) == (torch.uint8, 16)
    other = Stream(0)
    other.set_bytes(state)
    assert other == stream


def test_a_stream_on_which_all_ranks_agreed_is_saved_as_agreed() -> None:
    other = Stream(0)
    other.set_bytes(Stream(5, 3, from_torch=True, agreed_meshes=frozenset({WORLD})).to_bytes())
    assert other == Stream(5, 3, from_torch=False)


@pytest.mark.parametrize("seed", [-1, 2**64 - 1])
def test_seeds_are_taken_modulo_64_bits(seed: int) -> None:
    start_stream(WORLD, seed)
    assert stream_of() == Stream(2**64 - 1)
    torch.manual_seed(seed)
    assert stream_of() == Stream(2**64 - 1, from_torch=True)


def test_the_common_stream_follows_a_seed_of_torch_and_that_of_a_mesh_does_not() -> None:
    start_stream("mesh", 8)
    follow_torch_seed(3)
    assert own_stream("mesh") is stream_of("mesh") == Stream(8)
    torch.default_generator.manual_seed(4)  # noticed at the next use
    assert stream_of() is own_stream(WORLD) == Stream(4, from_torch=True)


def test_without_a_snapshot_the_stream_continues() -> None:
    start_stream(WORLD, 7)
    stream_of().next()
    torch.default_generator.manual_seed(4)
    follow_torch_state(None)
    assert stream_of() == Stream(7, position=1)
