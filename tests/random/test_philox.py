"""Philox words: equal to the published ones, the same in torch and NumPy, with distinct counters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.random.philox import CHUNK, Draw, Workspace, counters, philox

# Test vectors of Random123 for philox4x32-10: counter, key, words
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_words_equal_the_published_ones(counter: str, key: str, expected: str) -> None:
    k0, k1 = _words(key)
    c = _words(counter)
    assert list(philox(c, k0 | k1 << 32)) == _words(expected)
    tensors = philox([torch.tensor([word]) for word in c], k0 | k1 << 32)
    assert [word.item() for word in tensors] == _words(expected)
    draw, lane = Draw(k0 | k1 << 32, c[2] | c[3] << 32), c[1] >> 16
    block = np.array([c[0] | (c[1] & 0xFFFF) << 32], np.uint64)
    even, odd = Workspace().words(draw, block, lane)
    assert [
        int(even[0, 0]),
        int(odd[0, 0]) & 0xFFFFFFFF,
        int(even[1, 0]),
        int(odd[1, 0]) & 0xFFFFFFFF,
    ] == _words(expected)


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**16 - 1),
    st.lists(st.integers(0, 2**48 - 1), min_size=1, max_size=5),
    st.booleans(),
)
def test_torch_and_numpy_agree(seed: int, position: int, lane: int, blocks: list[int], near: bool) -> None:
    draw = Draw(seed, position)
    if near:  # the same upper half, which takes the shortened first rounds
        blocks = [blocks[0] >> 32 << 32 | block & 0xFFFFFFFF for block in blocks]
    expected = philox(counters(draw, torch.tensor(blocks), lane), seed)
    even, odd = Workspace().words(draw, np.array(blocks, np.uint64), lane)
    found = [even[0], odd[0] & np.uint64(0xFFFFFFFF), even[1], odd[1] & np.uint64(0xFFFFFFFF)]
    assert [word.tolist() for word in found] == [word.tolist() for word in expected]


def test_block_range_starts_at_any_block() -> None:
    workspace = Workspace()
    assert workspace.block_range(2**40 + 3, 4).tolist() == [2**40 + 3 + i for i in range(4)]
    assert len(workspace.block_range(0, CHUNK)) == CHUNK


def test_counters_differ_by_block_lane_and_position() -> None:
    seen = set()
    for position in (0, 1, 2**32, 2**63):
        for lane in (0, 1, 2**16 - 1):
            for block in (0, 1, 2**32, 2**48 - 1):
                words = counters(Draw(7, position), torch.tensor(block), lane)
                seen.add(tuple(int(word) for word in words))
    assert len(seen) == 4 * 3 * 4
    assert all(0 <= word < 2**32 for counter in seen for word in counter)
