"""Values that are constants of compiled code."""

from __future__ import annotations

import weakref

import pytest

import shardwise as sw
from shardwise.layout import Axes, Layout


@pytest.mark.parametrize(
    "value",
    [
        sw.Shard(0),
        sw.Replicate(),
        sw.Partial(),
        sw.placement_types._StridedShard(0, split_factor=2),
        Axes((2, 4)),
        Layout.of((4, 6), Axes((2,)), [sw.Shard(0)]),
    ],
    ids=str,
)
def test_a_graph_may_return_it(value: object):
    # torch.compile keeps what a graph returns by weak reference
    assert weakref.ref(value)() is value
