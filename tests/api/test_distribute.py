"""Creating DTensors from full tensors and from blocks; the shape and offset of a block."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, layouts, placements, shapes
from tests.values import blocks_of, dense_tensor, take, tensor, value
from torch import nn

import shardwise as sw
from shardwise import (
    DTensor,
    LayoutError,
    Partial,
    PerRank,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    per_rank,
    simulate,
)
from shardwise.comm import counting, members_of
from shardwise.layout import block_shape, owned

R = Replicate()


def mesh_of(on):
    return sw.DeviceMesh("cpu", torch.arange(on.count).view(on.sizes), mesh_dim_names=on.names)


@pytest.fixture
def line():
    with simulate(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


@pytest.fixture
def square():
    with simulate(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def grid(*shape):
    return torch.arange(float(math.prod(shape))).view(shape)


# ---- distribute_tensor


@given(axes(), shapes(), st.data())
def test_each_rank_gets_its_block(on, shape, data):
    given_placements = data.draw(placements(on, len(shape), partial=False))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16])
    )
    source = data.draw(st.sampled_from([None, 0, min(on.sizes) - 1]))
    whole = dense_tensor(shape, dtype, 0)
    with simulate(on.count):
        mesh = mesh_of(on)
        x = distribute_tensor(whole, mesh, given_placements, src_data_rank=source)
        assert (x.shape, x.dtype, x.stride()) == (whole.shape, dtype, whole.stride())
        for coord, block in blocks_of(x, mesh).items():
            assert block.is_contiguous()
            assert torch.equal(block, take(whole, owned(x.sharding, coord)))


@given(axes(), shapes(), st.data())
def test_a_pending_tensor_reduces_to_the_given_one(on, shape, data):
    given_placements = data.draw(placements(on, len(shape)))
    whole = dense_tensor(shape, torch.float64, 0)
    with simulate(on.count):
        mesh = mesh_of(on)
        x = distribute_tensor(whole, mesh, given_placements)
        torch.testing.assert_close(value(blocks_of(x, mesh), x.sharding), whole)


@pytest.mark.parametrize("source", [0, 1, 2, 3])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), R, Partial()])
def test_the_values_are_those_of_the_source_rank(line, source, placement):
    mine = per_rank(lambda rank: grid(5, 3) + 100 * rank)
    x = distribute_tensor(mine, line, [placement], src_data_rank=source)
    for whole in x.full_tensor().ranks:
        assert torch.equal(whole, grid(5, 3) + 100 * source)


def test_on_two_axes_the_source_is_the_rank_at_that_coord_of_each_axis(square):
    mine = per_rank(lambda rank: grid(5, 3) + 100 * rank)
    for given_placements in itertools.product((Shard(0), Shard(1), R), repeat=2):
        for source, rank in ((0, 0), (1, 3)):
            x = distribute_tensor(mine, square, given_placements, src_data_rank=source)
            assert all(torch.equal(w, grid(5, 3) + 100 * rank) for w in x.full_tensor().ranks)


def test_without_a_source_each_rank_slices_its_own_tensor_and_nothing_is_sent(line):
    mine = per_rank(lambda rank: grid(5, 3) + 100 * rank)
    with counting() as ledger:
        x = distribute_tensor(mine, line, [Shard(0)], src_data_rank=None)
        y = distribute_tensor(mine, line, [R], src_data_rank=None)
    assert ledger.collectives == 0
    for rank, (block, full) in enumerate(zip(x.to_local().ranks, y.to_local().ranks, strict=True)):
        lo, hi = min(2 * rank, 5), min(2 * rank + 2, 5)
        assert torch.equal(block, grid(5, 3)[lo:hi] + 100 * rank)
        assert torch.equal(full, grid(5, 3) + 100 * rank)


def test_the_source_sends_to_the_others(line):
    with counting() as ledger:
        distribute_tensor(grid(8, 3), line, [Shard(0)])
    assert ledger.collectives == 1
    assert ledger.bytes == 3 * 6 * 4  # from the source to each of the three others


def test_the_result_is_a_leaf_that_requires_grad_if_the_tensor_does(line):
    for requires_grad in (False, True):
        whole = grid(5, 3).requires_grad_(requires_grad)
        x = distribute_tensor(whole, line, [Shard(0)])
        assert (x.is_leaf, x.requires_grad, x.grad) == (True, requires_grad, None)
        assert whole.requires_grad is requires_grad
    x.full_tensor().sum().backward()
    assert whole.grad is None
    assert torch.equal(x.grad.full_tensor().ranks[0], torch.ones(5, 3))


def test_a_parameter_becomes_a_dtensor_that_requires_grad(line):
    x = distribute_tensor(nn.Parameter(grid(5, 3)), line, [Shard(0)])
    assert type(x) is DTensor
    assert not isinstance(x, nn.Parameter)
    assert x.requires_grad
    assert isinstance(nn.Parameter(x), nn.Parameter)


def test_blocks_do_not_share_memory_with_the_full_tensor(line):
    for source in (0, None):
        for placement in (R, Shard(0)):
            whole = grid(4, 3)
            x = distribute_tensor(whole, line, [placement], src_data_rank=source)
            block = x.to_local().ranks[1]
            with torch.no_grad():
                block.zero_()
            assert torch.equal(whole, grid(4, 3))


def test_a_dtensor_in_the_wanted_layout_is_returned(square):
    x = distribute_tensor(grid(5, 3), square, [Shard(0), R])
    with counting() as ledger:
        assert distribute_tensor(x, square, [Shard(0), R]) is x
        assert distribute_tensor(x, square, [Shard(-2), R]) is x
        assert distribute_tensor(x, square, (Shard(0), R), src_data_rank=None) is x
    assert ledger.collectives == 0


@pytest.mark.parametrize("whole", [grid(3, 5).t(), grid(5, 6)[:, ::2], grid(3).expand(5, 3), grid(10, 3)[5:]])
def test_the_strides_of_the_full_tensor_do_not_matter(square, whole):
    for given_placements in itertools.product((Shard(0), Shard(1), R), repeat=2):
        for source in (0, 1, None):
            x = distribute_tensor(whole, square, given_placements, src_data_rank=source)
            assert x.is_contiguous()
            assert all(b.is_contiguous() for b in x.to_local().ranks)
            assert torch.equal(x.full_tensor().ranks[3], whole)


def test_blocks_of_a_meta_tensor_are_meta(square):
    x = distribute_tensor(torch.empty(5, 3, device="meta", requires_grad=True), square, [Shard(0), Shard(1)])
    assert x.is_meta
    assert x.requires_grad
    assert [tuple(b.shape) for b in x.to_local().ranks] == [(3, 2), (3, 1), (2, 2), (2, 1)]
    assert all(b.is_meta for b in x.to_local().ranks)


def test_default_mesh_and_placements(square):
    with square:
        x, y = distribute_tensor(grid(5, 3)), distribute_tensor(grid(5, 3), placements=[Shard(0), R])
    assert x.device_mesh is y.device_mesh is square
    assert (x.placements, y.placements) == ((R, R), (Shard(0), R))
    inner = init_device_mesh("cpu", (4,))
    with square, inner:
        assert distribute_tensor(grid(5)).device_mesh is inner
    with square:
        assert distribute_tensor(grid(5), inner).device_mesh is inner


@pytest.mark.parametrize("dims", [(0, 1), (-2, -1), (-1, 0), (1, 1)])
def test_negative_dims_count_from_the_back(square, dims):
    x = distribute_tensor(grid(5, 3), square, [Shard(d) for d in dims])
    assert x.placements == tuple(Shard(d % 2) for d in dims)


def test_scalars_and_empty_tensors(square):
    x = distribute_tensor(torch.tensor(3.5), square)
    assert (x.item(), x.shape, x.placements) == (3.5, torch.Size(()), (R, R))
    y = distribute_tensor(torch.empty(0, 3), square, [Shard(0), Shard(1)])
    assert tuple(y.full_tensor().ranks[0].shape) == (0, 3)


def test_conjugated_values(square):
    whole = torch.tensor([1 + 2j, 3 - 1j, 2j]).conj()
    x = distribute_tensor(whole, square, [Shard(0), R])
    assert torch.equal(x.full_tensor().ranks[2], torch.tensor([1 - 2j, 3 + 1j, -2j]))


def test_a_mesh_over_some_ranks():
    with simulate(5):
        mesh = sw.DeviceMesh("cpu", [3, 1])
        x = distribute_tensor(per_rank(lambda rank: grid(3) + 10 * rank), mesh, [Shard(0)])
        assert x.to_local()._blocks.keys() == {1, 3}
        # rank 3 is the first of the mesh, and so the source
        assert x.to_local().of_rank(3).tolist() == [30, 31]
        assert x.to_local().of_rank(1).tolist() == [32]


# ---- from_local


@given(layouts(), st.data())
def test_blocks_with_a_given_shape(layout, data):
    whole = dense_tensor(layout.shape, torch.float64, 1)
    with simulate(layout.axes.count):
        mesh = mesh_of(layout.axes)
        with counting() as ledger:
            x = tensor(whole, layout, mesh)
        assert ledger.collectives == 0
        assert (x.sharding, x.shape) == (layout, whole.shape)
        torch.testing.assert_close(value(blocks_of(x, mesh), layout), whole)


@given(layouts(plain=True))
def test_run_check_finds_the_shape_of_uneven_blocks(layout):
    whole = dense_tensor(layout.shape, torch.float64, 1)
    with simulate(layout.axes.count):
        mesh = mesh_of(layout.axes)
        blocks = tensor(whole, layout, mesh).to_local()
        x = DTensor.from_local(blocks, mesh, layout.placements, run_check=True)
        # the layout may omit axes on which all other blocks are empty, but no elements
        assert x.shape == whole.shape
        torch.testing.assert_close(value(blocks_of(x, mesh), x.sharding), whole)


@given(axes(), shapes(max_dims=3, max_size=3), st.data())
def test_without_a_shape_blocks_are_assumed_even(on, block, data):
    given_placements = data.draw(placements(on, len(block)))
    with simulate(on.count):
        x = DTensor.from_local(torch.ones(block), mesh_of(on), given_placements)
        expected = list(block)
        for axis, p in enumerate(x.placements):
            if isinstance(p, Shard):
                expected[p.dim] *= on.sizes[axis]
        assert tuple(x.shape) == tuple(expected)
        for c in members_of(x.device_mesh).values():
            assert block_shape(x.sharding, c) == block


def test_from_local_shares_memory_with_the_blocks(line):
    blocks = per_rank(lambda rank: grid(2, 3))
    x = DTensor.from_local(blocks, line, [Shard(0)])
    blocks.ranks[2].fill_(7)
    assert torch.equal(x.full_tensor().ranks[0][4:6], torch.full((2, 3), 7.0))


def test_run_check_finds_replicated_blocks_that_differ(square):
    blocks = per_rank(lambda rank: grid(2, 3) + (rank == 3))
    assert DTensor.from_local(blocks, square, [R, Shard(0)]).shape == (4, 3)
    with pytest.raises(
        LayoutError, match=r"(?s)\(dp=1, tp=1\) differs from .*\(dp=0, tp=1\).*why: Axis dp.*fix: "
    ):
        DTensor.from_local(blocks, square, [R, Shard(0)], run_check=True)
    for given_placements, shape in (
        ([Shard(0), Shard(1)], (4, 6)),
        ([Partial()] * 2, (2, 3)),
        ([Shard(0), Partial()], (4, 3)),
    ):
        assert DTensor.from_local(blocks, square, given_placements, run_check=True).shape == shape


def test_run_check_takes_equal_nan_for_equal(line):
    x = DTensor.from_local(per_rank(lambda rank: torch.full((2,), math.nan)), line, [R], run_check=True)
    assert x.placements == (R,)


def test_run_check_distinguishes_signs_of_zero(line):
    with pytest.raises(LayoutError, match="differs"):
        DTensor.from_local(
            per_rank(lambda rank: torch.tensor([0.0 * (-1) ** rank])), line, [R], run_check=True
        )


@pytest.mark.parametrize("sizes", [(1, 2, 1, 1), (2, 1, 2, 0), (0, 2, 2, 2), (2, 2, 0, 1), (3, 3, 3, 4)])
def test_blocks_that_are_not_chunks_are_an_error(line, sizes):
    blocks = per_rank(lambda rank: torch.ones(sizes[rank], 3))
    for more in ({}, {"run_check": True}, {"shape": (sum(sizes), 3)}):
        with pytest.raises(LayoutError, match=r"(?s)why: Dims are split as torch\.chunk splits.*fix: "):
            DTensor.from_local(blocks, line, [Shard(0)], **more)


def test_uneven_blocks_with_a_given_shape_or_a_check(line):
    blocks = per_rank(lambda rank: torch.full(((2, 2, 1, 0)[rank], 10), float(rank)))
    for more in ({"shape": (5, 10)}, {"shape": torch.Size([5, 10]), "stride": (10, 1)}, {"run_check": True}):
        x = DTensor.from_local(blocks, line, [Shard(0)], **more)
        assert (tuple(x.shape), x.stride()) == ((5, 10), (10, 1))
        replicated = x.redistribute(placements=[R])
        assert tuple(replicated.to_local().shape) == (5, 10)
        assert [row[0].item() for row in replicated.to_local().ranks[3]] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("shape", [(9, 3), (8, 4), (8,), (8, 3, 1), (0, 3), (5, 3)])
def test_a_block_that_does_not_fit_the_shape_is_an_error(line, shape):
    with (
        counting() as ledger,
        pytest.raises(LayoutError, match=r"(?s)Rank \d has a block of shape \(2, 3\).*fix: "),
    ):
        DTensor.from_local(torch.ones(2, 3), line, [Shard(0)], shape=shape)
    assert ledger.collectives == 0


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), R])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_global_stride_has_the_order_of_the_blocks(line, placement, order):
    back = [order.index(d) for d in range(3)]
    block = torch.empty([(2, 3, 4)[d] for d in order]).permute(back)
    x = DTensor.from_local(block, line, [placement])
    dense = torch.empty([x.shape[d] for d in order]).permute(back)
    assert (tuple(block.shape), x.stride()) == ((2, 3, 4), dense.stride())
    assert x.to_local().ranks[1].stride() == block.stride()
    assert x.redistribute(placements=[R]).full_tensor().ranks[0].shape == x.shape


def test_a_given_stride_is_kept(line):
    x = DTensor.from_local(torch.ones(2, 3).t(), line, [Shard(1)], shape=(3, 8), stride=(1, 3))
    assert x.stride() == (1, 3)


@pytest.mark.parametrize("what", ["dtype", "ndim"])
def test_blocks_of_different_dtypes_or_dims_are_an_error(line, what):
    kinds = {"dtype": lambda rank: torch.ones(2, dtype=[torch.float32, torch.int64][rank // 2])}
    kinds["ndim"] = lambda rank: torch.ones([2] * (1 + rank // 2))
    with pytest.raises(LayoutError, match=r"(?s)why: All blocks are parts of one tensor.*fix: "):
        DTensor.from_local(per_rank(kinds[what]), line, [Shard(0)], run_check=True)
    with pytest.raises(RuntimeError, match=r"(?s)why: .*fix: "):
        DTensor.from_local(per_rank(kinds[what]), line, [Shard(0)])


def test_blocks_of_ranks_off_the_mesh_are_ignored():
    with simulate(4):
        mesh = sw.DeviceMesh("cpu", [1, 3])
        blocks = per_rank(lambda rank: torch.full((2,) if rank % 2 else (5, 5), float(rank)))
        for check in (False, True):
            x = DTensor.from_local(blocks, mesh, [Shard(0)], run_check=check)
            assert x.full_tensor().of_rank(3).tolist() == [1, 1, 3, 3]
            assert x.to_local()._blocks.keys() == {1, 3}


def test_a_rank_of_the_mesh_without_a_block_is_an_error(line):
    with pytest.raises(LayoutError, match=r"(?s)not of 2, 3.*why: .*fix: "):
        DTensor.from_local(PerRank({0: torch.ones(2), 1: torch.ones(2)}), line, [Shard(0)])


def test_a_plain_tensor_is_copied_for_each_rank(line):
    x = DTensor.from_local(grid(2), line, [Shard(0)])
    with torch.no_grad():
        x.to_local().ranks[1].zero_()
    assert x.full_tensor().ranks[0].tolist() == [0, 1, 0, 0, 0, 1, 0, 1]


def test_from_local_is_differentiable(line):
    for p, expected in (
        (Shard(0), [0.0, 1, 2, 3]),
        (R, [6.0] * 4),
        (Partial(), [6.0] * 4),
        (Partial("avg"), [1.5] * 4),
    ):
        block = per_rank(lambda rank: torch.zeros(1, requires_grad=True))
        x = DTensor.from_local(block, line, [p])
        assert (x.requires_grad, x.is_leaf) == (True, False)
        weight = torch.arange(4.0) if p.is_shard() else torch.tensor([6.0])
        (x.full_tensor() * weight).sum().backward()
        assert [g.item() for g in block.grad.ranks] == expected


def test_from_local_with_grad_placements(line):
    block = per_rank(lambda rank: torch.zeros(4, requires_grad=True))
    x = DTensor.from_local(block, line, [R], grad_placements=[Partial()])
    x.full_tensor().sum().backward()
    # the gradients of the blocks are terms of a sum
    assert sum(block.grad.ranks).tolist() == [1, 1, 1, 1]


# ---- shape and offset of a block


def to_torch(p):
    from torch.distributed import tensor as theirs

    match p:
        case Shard(dim=dim):
            return theirs.Shard(dim)
        case Partial():
            return theirs.Partial(p.reduce_op)
    return theirs.Replicate()


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 3), (2, 2, 2)])
def test_shape_and_offset_of_a_block_are_torchs(sizes):
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as theirs

    shapes = [(2,), (5,), (8, 4), (5, 3), (0, 3), (13, 2, 3)]
    for rank in range(0, math.prod(sizes), 1 if len(sizes) < 3 else 3):
        dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes))
        try:
            mesh = init_device_mesh("cpu", sizes)
            for shape in shapes:
                some = [*map(Shard, range(len(shape))), R, Partial()]
                for given_placements in itertools.product(some, repeat=len(sizes)):
                    want = theirs(torch.Size(shape), mesh, [to_torch(p) for p in given_placements])
                    got = sw.compute_local_shape_and_global_offset(shape, mesh, given_placements)
                    assert got == (tuple(want[0]), tuple(want[1])), (rank, shape, given_placements)
        finally:
            dist.destroy_process_group()


def test_the_offset_of_an_empty_block_is_the_size():
    found = []
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            found.append(sw.compute_local_shape_and_global_offset((2,), mesh, [Shard(0), Shard(0)]))
        finally:
            dist.destroy_process_group()
    assert found == [((1,), (0,)), ((0,), (2,)), ((1,), (1,)), ((0,), (2,))]


def test_ranks_off_the_mesh_and_skip_offset():
    dist.init_process_group("fake", rank=1, world_size=4)
    try:
        here, there = sw.DeviceMesh("cpu", [0, 1]), sw.DeviceMesh("cpu", [0, 2])
        assert sw.compute_local_shape_and_global_offset((5, 3), there, [Shard(0)]) == ((0,), ())
        assert sw.compute_local_shape_and_global_offset((5, 3), here, [Shard(0)]) == ((2, 3), (3, 0))
        assert sw.compute_local_shape_and_global_offset((5, 3), here, [Shard(0)], skip_offset=True) == (
            (2, 3),
            (),
        )
    finally:
        dist.destroy_process_group()
