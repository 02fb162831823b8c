"""`_StridedShard`: read as an order or a factor, with the blocks that torch's definition gives, and given back."""

from __future__ import annotations

import copy
import dataclasses
from itertools import product

import pytest
import torch

import shardwise as sw
from shardwise._dtensor_spec import DTensorSpec, TensorMeta
from shardwise.layout import Axes, Layout, LayoutError, MaskPartial, Shard, StridedShard, owned
from shardwise.placement_types import _MaskPartial, _StridedShard


def _by_definition(size: int, sizes: tuple[int, ...], placements, coord) -> list[int]:
    """The indices of a coord: an axis with split factor k cuts into k parts, and takes its chunk of each."""
    have = list(range(size))
    for n, p, c in zip(sizes, placements, coord, strict=True):
        k = p.split_factor if isinstance(p, StridedShard) else 1
        part, chunk = len(have) // k, len(have) // k // n
        have = [have[i * part + c * chunk + j] for i in range(k) for j in range(chunk)]
    return have


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((2, 2), (StridedShard(0, split_factor=2), Shard(0))),
        ((2, 3), (StridedShard(0, split_factor=3), Shard(0))),
        ((2, 2, 3), (Shard(0), StridedShard(0, split_factor=3), Shard(0))),
        ((2, 2, 3), (StridedShard(0, split_factor=6), Shard(0), Shard(0))),
        ((2, 2, 3), (StridedShard(0, split_factor=2), Shard(0), Shard(0))),
        ((2, 2, 3), (StridedShard(0, split_factor=6), StridedShard(0, split_factor=3), Shard(0))),
        ((2,), (StridedShard(-1, split_factor=3),)),
        ((3,), (StridedShard(0, split_factor=2),)),
        ((1, 2), (Shard(0), StridedShard(0, split_factor=2))),
        ((2, 1), (StridedShard(0, split_factor=2), Shard(0))),
        # as after views: later axes split what the ones before have left
        ((2, 2), (Shard(0), StridedShard(0, split_factor=3))),
        ((2, 2), (StridedShard(0, split_factor=3), StridedShard(0, split_factor=6))),
        ((2, 2), (StridedShard(0, split_factor=4), StridedShard(0, split_factor=2))),
        ((3, 2, 2), (Shard(0), StridedShard(0, split_factor=2), StridedShard(0, split_factor=6))),
    ],
)
def test_the_blocks_are_those_of_the_definition(sizes, placements):
    axes = Axes(sizes)
    layout = Layout.of((72,), axes, placements)
    for coord in product(*map(range, sizes)):
        assert list(owned(layout, coord)[0]) == _by_definition(72, sizes, placements, coord)


def test_uneven_dims_are_cut_by_the_inner_axis_first():
    layout = Layout.of((5,), Axes((2, 2), ("dp", "tp")), (StridedShard(0, split_factor=2), Shard(0)))
    assert layout is Layout.of((5,), layout.axes, (Shard(0, order=1), Shard(0, order=0)))


def test_fsdp_over_a_packed_dim_cuts_the_packed_parts():
    packed = StridedShard(0, split_factor=2)
    layout = Layout.of((24,), Axes((2, 2), ("dp", "tp")), (StridedShard(0, split_factor=2), packed))
    # the block of tp=1 is 6..11 and 18..23; dp cuts it in the middle
    assert [list(owned(layout, (dp, 1))[0]) for dp in (0, 1)] == [list(range(6, 12)), list(range(18, 24))]


@pytest.mark.parametrize(
    "placements",
    [
        (StridedShard(0, split_factor=5), Shard(0)),
        (StridedShard(0, split_factor=7), sw.Replicate()),
        (StridedShard(0, split_factor=2), Shard(0, order=0)),
        (StridedShard(0, split_factor=3), Shard(0)),  # half of three parts
        (Shard(0), StridedShard(0, split_factor=5)),
    ],
)
def test_what_cannot_be_read_is_an_error(placements):
    with pytest.raises(LayoutError, match="split_factor"):
        Layout.of((24,), Axes((2, 2)), placements)


def test_it_is_not_a_shard():
    p = _StridedShard(0, split_factor=2)
    assert not isinstance(p, Shard)
    assert not p.is_shard()
    assert (p.dim, p.split_factor) == (0, 2)
    assert p == _StridedShard(0, split_factor=2) != _StridedShard(0, split_factor=3)
    assert repr(p) == "_StridedShard(dim=0, sf=2)"
    with pytest.raises(LayoutError, match="at least 1"):
        _StridedShard(0, split_factor=0)
    assert isinstance(_MaskPartial(offset_shape=(4,)), sw.Partial)


def test_what_was_given_is_given_back_by_ops_too():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        given = (_StridedShard(0, split_factor=2), Shard(0))
        full = torch.arange(24.0).view(8, 3)
        x = sw.distribute_tensor(full, mesh, given)
        assert x.placements == given
        for y in (x.detach(), x + 1, torch.zeros_like(x), x * x, x.clone(), torch.nn.Parameter(x).data):
            assert y.placements == given
        assert x.t().placements == (_StridedShard(1, split_factor=2), Shard(1))
        assert torch.equal((x + 1).full_tensor(), full + 1)
        y = sw.distribute_tensor(full, mesh, [sw.Replicate(), Shard(0)]).redistribute(placements=given)
        assert y.placements == given
        assert torch.equal(y.full_tensor(), full)
        assert sw.DTensor.from_local(y.to_local(), mesh, given).placements == given
        # another layout forgets it
        assert y.redistribute(dp=sw.Replicate()).placements == (sw.Replicate(), Shard(0))
        assert y.sum(0).placements == (sw.Partial(), sw.Partial())
        assert y._spec.num_shards_map == [4, 1]
        assert y._spec.shard_order == ((0, (1, 0)),)
        z = sw.DTensor.from_local(torch.ones(2, 3), mesh, [MaskPartial(offset_shape=(8,)), sw.Replicate()])
        assert z.placements == (MaskPartial(offset_shape=(8,)), sw.Replicate())
        assert torch.equal(z.full_tensor(), torch.full((2, 3), 2.0))


def test_specs_are_constructed_and_replaced_as_torch_has_it():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meta = TensorMeta(torch.Size([8, 3]), (3, 1), torch.float32)
        given = (_StridedShard(0, split_factor=2), Shard(0))
        spec = DTensorSpec(mesh, given, tensor_meta=meta)
        assert isinstance(spec, DTensorSpec)
        assert (spec.mesh, spec.placements, spec.tensor_meta) == (mesh, given, meta)
        other = dataclasses.replace(spec, tensor_meta=meta._replace(dtype=torch.bfloat16))
        assert (other.placements, other.tensor_meta.dtype) == (given, torch.bfloat16)
        x = sw.distribute_tensor(torch.arange(24.0).view(8, 3), mesh, given)
        assert x._spec is spec
        again = sw.DTensor(x._local_tensor, spec, requires_grad=True)
        assert again.requires_grad
        again._local_tensor = x._local_tensor * 2
        assert torch.equal(again.detach().full_tensor(), x.full_tensor() * 2)
        ordered = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=((0, (1, 0)),))
        assert ordered.layout is spec.layout
        with pytest.raises(LayoutError, match="tensor_meta"):
            DTensorSpec(mesh, given)
        draft = copy.copy(spec)
        for order, words in (
            (((0, ()),), "has empty mesh dim"),
            (((0, (0, 2)),), r"has invalid mesh dim \(0,2,\)"),
            (((-1, (0, 1)),), "has invalid tensor dim -1"),
            (((1, (1,)), (0, (0,))), "should be sorted in shard_order"),
            (((0, (0,)), (1, (1,))), r"placement\[1\] doesn't have a matching shard in shard_order"),
        ):
            with pytest.raises(AssertionError, match=words):
                draft.shard_order = order
        assert draft == spec


@pytest.mark.parametrize("split_factor", [1, 2, 3, 4])
@pytest.mark.parametrize("size", range(14))
def test_sizes_and_offsets_are_those_of_the_blocks(size, split_factor):
    p = _StridedShard(0, split_factor=split_factor)
    for chunks in (1, 2, 3, 4):
        blocks, _ = p._split_tensor(torch.arange(size), chunks, with_padding=False)
        for rank, block in enumerate(blocks):
            indices = block.tolist()
            assert p.local_shard_size_and_offset(size, chunks, rank, 1) == (len(indices), indices)
            assert p.local_shard_size_and_offset(size, chunks, rank) == (len(indices), [*indices, -1][0])
            assert p.local_shard_size_and_offset(size, chunks, rank, 2) == (len(indices), None)
