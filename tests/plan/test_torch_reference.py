"""The reference counts what torch sends, and the committed table is up to date."""

import logging
import random

import pytest
import torch
import torch.distributed as dist
from tests.plan.torch_reference import (
    _SHARE_SENT,
    CASES,
    Case,
    Tokens,
    Traffic,
    UnknownCollectiveError,
    _Call,
    _decode,
    _encode,
    _total,
    _world_of,
    all_pairs,
    load_reference,
    torch_table,
    torch_traffic,
)
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # 16 x 8 float32 is 512 bytes, so a block on 8 ranks is 64
        ("R", "S0", Traffic(0, 0)),
        ("S0", "R", Traffic(1, 8 * 7 * 64)),
        ("S1", "R", Traffic(1, 8 * 7 * 64)),
        ("S0", "S1", Traffic(1, 8 * 7 * 64)),  # over gloo it gathers; an all-to-all would send an eighth
        ("P", "R", Traffic(1, 2 * 7 * 512)),
        ("P", "S1", Traffic(1, 7 * 512)),
    ],
)
def test_one_axis(source: str, target: str, expected: Traffic) -> None:
    assert torch_traffic((8,), (16, 8), (source,), (target,)) == expected


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # 13 rows on 8 ranks are padded to 16, 7 columns to 8
        ("S0", "R", Traffic(1, 7 * 16 * 7 * 4)),
        ("S1", "R", Traffic(1, 7 * 13 * 8 * 4)),
        ("S0", "S1", Traffic(1, 7 * 16 * 8 * 4)),
        ("P", "R", Traffic(1, 2 * 7 * 13 * 7 * 4)),
        ("P", "S0", Traffic(1, 7 * 16 * 7 * 4)),
    ],
)
def test_padding_is_sent(source: str, target: str, expected: Traffic) -> None:
    assert torch_traffic((8,), (13, 7), (source,), (target,)) == expected


def test_groups_with_different_blocks_are_summed() -> None:
    # 13 rows are 7 and 6 on the outer axis; in each of its two groups of 4, the 7 columns are padded to 8
    expected = Traffic(1, 3 * 7 * 8 * 4 + 3 * 6 * 8 * 4)
    assert torch_traffic((2, 4), (13, 7), ("S0", "S1"), ("S0", "R")) == expected


def test_nested_uneven_shards_are_planned_by_each_rank() -> None:
    # inner gathers of (4, 3) rows send 4 + 4, of (3, 3) 3 + 3; both outer ones of (7, 6) send 7 + 7
    inner = (4 + 4 + 3 + 3) * 7 * 4
    outer = 2 * (7 + 7) * 7 * 4
    assert torch_traffic((2, 2), (13, 7), ("S0", "S0"), ("R", "R")) == Traffic(2, inner + outer)


def test_torch_does_not_merge_axes() -> None:
    reduced = torch_traffic((2, 2, 2), (16, 8), ("P", "P", "P"), ("R", "R", "R"))
    assert reduced == Traffic(3, 3 * 8 * 512)


def test_an_axis_of_size_one_is_free() -> None:
    assert torch_traffic((1, 4), (16, 8), ("P", "R"), ("S0", "R")) == Traffic(0, 0)
    assert torch_traffic((1, 4), (16, 8), ("S0", "S0"), ("R", "R")) == Traffic(1, 3 * 512)
    assert _total([[_Call("_c10d_functional::all_reduce", 1, 64)]]) == Traffic(0, 0)


def test_bytes_follow_the_dtype() -> None:
    assert torch_traffic((8,), (16, 8), ("S0",), ("R",), torch.bfloat16) == Traffic(1, 8 * 7 * 32)


def test_none_where_torch_raises() -> None:
    assert torch_traffic((2, 2), (16, 8), ("R", "P"), ("P", "R")) is None
    assert _total([[], None]) is None


@pytest.mark.parametrize("tokens", [("S2",), ("S-1",), ("X",), ("R", "R"), ()])
def test_tokens_are_checked(tokens: Tokens) -> None:
    with pytest.raises(ValueError, match="give 1 of R, P, S0, S1"):
        torch_traffic((8,), (16, 8), ("R",), tokens)


def test_unknown_collectives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_SHARE_SENT, "_c10d_functional::all_reduce")
    with pytest.raises(UnknownCollectiveError, match=r"all_reduce.*add a row"):
        torch_traffic((8,), (16, 8), ("P",), ("R",))


def test_ranks_that_disagree_are_refused() -> None:
    gather = _Call("_c10d_functional::all_gather_into_tensor", 2, 64)
    with pytest.raises(RuntimeError, match="disagree"):
        _total([[gather], [gather, gather]])


def test_measuring_restores_the_process(caplog: pytest.LogCaptureFixture) -> None:
    level = logging.getLogger("torch.distributed.tensor").level
    with caplog.at_level(logging.WARNING):
        # a mesh that no other test uses, since torch warns once per mesh
        torch_table((2, 3), (16, 8), all_pairs(2, 2))
    assert not dist.is_initialized()
    assert logging.getLogger("torch.distributed.tensor").level == level
    assert not caplog.records


def test_measuring_beside_a_process_group_is_an_error() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="destroy_process_group"), _world_of(0, (2,)):
            pass
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mesh_ndim", [1, 2])
@pytest.mark.parametrize("tensor_ndim", [1, 2, 3])
def test_all_pairs(mesh_ndim: int, tensor_ndim: int) -> None:
    pairs = all_pairs(mesh_ndim, tensor_ndim)
    # on one axis: R, P and each shard to R and to each shard, and P to P
    on_axis = (tensor_ndim + 1) ** 2 + tensor_ndim + 2
    assert len(pairs) == len(set(pairs)) == on_axis**mesh_ndim - (tensor_ndim + 2) ** mesh_ndim
    for source, target in pairs:
        assert source != target
        assert all(s == "P" for s, t in zip(source, target, strict=True) if t == "P")


def test_the_encoding_keeps_unsupported_pairs() -> None:
    traffic = [Traffic(0, 0), None, Traffic(2, 5), None, Traffic(0, 0)]
    assert _decode(_encode(traffic)) == traffic


def test_the_committed_table_has_all_cases_and_pairs() -> None:
    reference = load_reference()
    assert list(reference) == list(CASES)
    for (mesh_shape, global_shape), table in reference.items():
        assert list(table) == all_pairs(len(mesh_shape), len(global_shape))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_committed_table_equals_what_torch_sends(case: Case) -> None:
    table = load_reference()[case]
    sample = random.Random(0).sample(sorted(table), min(20, len(table)))
    assert torch_table(*case, sample) == {pair: table[pair] for pair in sample}
