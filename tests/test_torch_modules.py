"""Functions under the private names of torch's modules: what they return, and the words of their errors."""

from __future__ import annotations

import math

import pytest
import torch

import shardwise as sw
from shardwise import LayoutError, Partial, Replicate, Shard, _utils
from shardwise._collective_utils import fill_empty_tensor_to_shards, redistribute_cost
from shardwise._sharding_prop import ShardingPropagator


@pytest.fixture
def line():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def test_shapes_and_strides_of_full_tensors_and_of_blocks(line):
    block = torch.empty(3, 4)
    assert _utils.compute_global_tensor_info(block, line, [Shard(0)]) == ([12, 4], [4, 1])
    assert _utils.compute_global_tensor_info(block, line, [Shard(1)]) == ([3, 16], [16, 1])
    assert _utils.compute_global_tensor_info(block.t(), line, [Shard(0)]) == ([16, 3], [1, 16])
    assert _utils.compute_global_tensor_info(block, line, [Partial()]) == ([3, 4], [4, 1])


def shapes_on_processes():
    line, square = sw.init_device_mesh("cpu", (4,)), sw.init_device_mesh("cpu", (2, 2))
    rank = line.get_local_rank()
    infer = _utils.compute_global_tensor_shape
    found = [infer(torch.Size([5, rank]), line, [Shard(1)]), infer(torch.Size([5, 5]), line, [Replicate()])]
    found.append(_utils.compute_local_tensor_info(torch.empty(8, 4), line, [Shard(1)]))
    words = []
    for shape, mesh, placements in (
        ((5 + rank % 2, 1), line, [Shard(1)]),
        ((2, 2), square, [Shard(0)] * 2),
        ((2, 2), square, [Shard(0)]),
    ):
        try:
            infer(torch.Size(shape), mesh, placements)
        except (LayoutError, NotImplementedError) as error:
            words.append(str(error))
    return found, words


def test_the_full_shape_of_blocks_of_any_length(workers):
    for found, words in workers.run(shapes_on_processes):
        assert found == [torch.Size([5, 6]), torch.Size([5, 5]), ([8, 1], [1, 1])]
        parts = (
            "Non-sharded dimensions should have identical size",
            "only supports 1 placement",
            "one placement per mesh dim",
        )
        assert all(part in text for part, text in zip(parts, words, strict=True))


def test_arguments_are_read_in_torchs_forms(line):
    x = sw.distribute_tensor(torch.ones(4), line, [Shard(0)])
    assert _utils.try_find_mesh_from_args("cat", ([2, x], 0)) is line
    assert _utils.try_find_mesh_from_args("cat", (x._spec,)) is line
    with pytest.raises(ValueError, match="Cannot find device mesh"):
        _utils.try_find_mesh_from_args("cat", (torch.ones(2),))
    _utils.assert_no_mixed_partial_types([Partial("sum"), Partial("avg"), Shard(3)])
    with pytest.raises(ValueError, match="Mixed Partial reduce types"):
        _utils.assert_no_mixed_partial_types([Partial("sum"), Partial("max")])
    with pytest.raises(RuntimeError, match="Invalid mode"):
        _utils.ExplicitRedistributionContext(mode="none")
    with pytest.raises(RuntimeError, match="no object that propagates"):
        ShardingPropagator()
    assert [t.shape for t in fill_empty_tensor_to_shards([torch.ones(2, 3)], 0, 1)] == [(2, 3), (0, 3)]


def test_costs_order_redistributions(line):
    whole = torch.ones(64, 64)
    split, full, pending = (
        sw.distribute_tensor(whole, line, [p])._spec for p in (Shard(0), Replicate(), Partial())
    )
    assert redistribute_cost(full, split) == redistribute_cost(full, full) == 0
    assert 0 < redistribute_cost(split, full) < redistribute_cost(pending, full)
    other = sw.init_device_mesh("cpu", (2, 2))
    assert redistribute_cost(split, sw.distribute_tensor(whole, other, [Shard(0)] * 2)._spec) == math.inf
