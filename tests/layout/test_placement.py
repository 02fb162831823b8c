import copy
import dataclasses
import itertools
import pickle

import pytest

from shardwise.layout import REDUCE_OPS, LayoutError, Partial, Placement, Replicate, Shard

EVERY = [
    Replicate(),
    *(Partial(op) for op in REDUCE_OPS),
    *(Shard(dim) for dim in (0, 1, -1)),
    *(Shard(0, order) for order in (0, 1)),
    *(Shard(0, order, (4, 6), factor) for order in (None, 0) for factor in (0, 1)),
    Shard(0, None, (6, 4), 0),
]


def test_shard_knows_its_dim():
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert Shard(1).is_shard(dim=1)
    assert not Shard(1).is_shard(0)
    assert not Shard(0).is_shard(1)
    assert Shard(-1).dim == -1
    assert not Shard(1).is_replicate()
    assert not Shard(1).is_partial()


def test_partial_knows_its_op():
    assert Partial().reduce_op == "sum"
    assert Partial("max").is_partial()
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")
    assert not Partial().is_shard()
    assert not Partial().is_replicate()


def test_replicate_is_neither():
    assert Replicate().is_replicate()
    assert not Replicate().is_shard()
    assert not Replicate().is_shard(0)
    assert not Replicate().is_partial()


@pytest.mark.parametrize(
    ("placement", "long", "short"),
    [
        (Replicate(), "Replicate()", "R"),
        (Partial(), "Partial(sum)", "P(sum)"),
        (Partial("product"), "Partial(product)", "P(product)"),
        (Shard(2), "Shard(dim=2)", "S(2)"),
        (Shard(0, order=1), "Shard(dim=0, order=1)", "S(0, order=1)"),
        (
            Shard(0, factors=(4, 6), factor=1),
            "Shard(dim=0, factors=(4, 6), factor=1)",
            "S(0, factors=(4, 6), factor=1)",
        ),
    ],
)
def test_the_text_of_a_placement_is_complete(placement, long, short):
    assert repr(placement) == long
    assert str(placement) == short


def test_only_a_shard_that_torch_could_express_is_plain():
    assert Shard(0).is_plain
    assert not Shard(0, order=0).is_plain
    assert not Shard(0, factors=(2, 3)).is_plain


@pytest.mark.parametrize("placement", EVERY, ids=str)
def test_placements_are_values(placement):
    assert isinstance(placement, Placement)
    assert copy.deepcopy(placement) == placement
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert hash(pickle.loads(pickle.dumps(placement))) == hash(placement)


def test_different_placements_differ():
    for a, b in itertools.combinations(EVERY, 2):
        assert a != b
    assert len(set(EVERY)) == len({repr(p) for p in EVERY}) == len({str(p) for p in EVERY}) == len(EVERY)


@pytest.mark.parametrize("placement", [Shard(0), Partial()], ids=str)
def test_placements_are_frozen(placement):
    for field in dataclasses.fields(placement):
        with pytest.raises(AttributeError):
            setattr(placement, field.name, 1)
    with pytest.raises((AttributeError, TypeError)):
        placement.other = 1


@pytest.mark.parametrize("op", ["mean", "SUM", "", "premul_sum"])
def test_an_unknown_reduction_is_an_error(op):
    with pytest.raises(LayoutError, match=r"(?s)why: .*fix: .*sum, avg, max, min, product"):
        Partial(op)


@pytest.mark.parametrize("dim", ["0", 1.0, None, True])
def test_shard_takes_the_index_of_a_dim(dim):
    with pytest.raises(TypeError, match="index of a tensor dim"):
        Shard(dim)


@pytest.mark.parametrize("factor", [-1, 2])
def test_a_factor_out_of_range_is_an_error(factor):
    with pytest.raises(LayoutError, match=r"(?s)why: .*2 factors.*fix: .*0\.\.1"):
        Shard(0, factors=(4, 6), factor=factor)
