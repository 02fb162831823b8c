"""Rules inferred by running ops on pieces: which dims may be split, and which reductions are pending then."""

import pytest
import torch

import shardwise as sw
from shardwise.comm import counting
from shardwise.dispatch.infer_rule import inferred_row
from shardwise.rules import Call, Slot

aten = torch.ops.aten


def infer(op, *shapes, dtypes=None, **args):
    """The inferred rule of a call, with letters in order of appearance."""
    names = [a.name for a in op._schema.arguments]
    given = {a.name: a.default_value for a in op._schema.arguments}
    given |= (
        dict(zip([n for n in names if n not in args], map(Slot, range(len(shapes))), strict=False)) | args
    )
    call = Call(str(op), given, (), tuple(shapes), (), (), tuple(dtypes or ["float64"] * len(shapes)))
    rule = inferred_row(op).build(call)
    if rule is None:
        return None
    letters = {}
    for dims in (*rule.inputs, *rule.outputs):
        for x in dims:
            letters.setdefault(x, None if x is None else "abcdefgh"[len(letters) - (None in letters)])
    return (
        [tuple(letters[x] for x in dims) for dims in rule.inputs],
        [tuple(letters[x] for x in dims) for dims in rule.outputs],
        {letters[x]: op for x, op in rule.reduced.items()},
        [set(g) for g in rule.linear],
    )


PRODUCT = ([("a", "b"), ("b", "c")], [("a", "c")], {"b": "sum"}, [{0}, {1}])


@pytest.mark.parametrize("shapes", [((4, 6), (6, 8)), ((6, 6), (6, 6)), ((1024, 512), (512, 1024))])
def test_a_matrix_product_of_any_size(shapes):
    assert infer(aten.mm.default, *shapes) == PRODUCT


def test_a_dim_that_must_not_be_split():
    ins, outs, reduced, linear = infer(aten._softmax.default, (4, 5, 6), dim=1, half_to_float=False)
    assert ins == outs == [("a", None, "b")]
    assert (reduced, linear) == ({}, [])


def test_a_broadcast_dim_is_not_split():
    assert infer(aten.add.Tensor, (5, 4), (1, 4))[:2] == ([("a", "b"), (None, "b")], [("a", "b")])
    assert infer(aten.add.Tensor, (5, 4), (4,))[:2] == ([("a", "b"), ("b",)], [("a", "b")])


def test_embedding():
    ins, outs, _, linear = infer(aten.embedding.default, (7, 5), (3, 4), dtypes=["float64", "int64"])
    assert ins == [(None, "a"), ("b", "c")]
    assert outs == [("b", "c", "a")]
    assert linear == [{0}]


def test_only_linear_ops_are_linear():
    assert infer(aten.exp.default, (4, 3))[3] == []
    assert infer(aten.sum.default, (4, 3)) == ([("a", "b")], [()], {"a": "sum", "b": "sum"}, [{0}])


def test_an_op_that_refuses_small_tensors_has_no_rule():
    big = (4096, 4096)
    assert infer(aten.slice_scatter.default, big, (1, 4096), dim=0, start=4000, end=4001, step=1) is None
    assert (
        infer(aten.nonzero.default, (4, 3), dtypes=["bool"]) is None
    )  # the number of rows depends on the values


def test_an_op_registered_with_a_question_mark_runs_by_its_inferred_rule():
    @torch.library.custom_op("infer_rule::rows", mutates_args=())
    def rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(1) * w).tanh()

    rows.register_fake(lambda x, w: torch.empty_like(x))
    x, w = torch.randn(7, 4, 3), torch.randn(3)
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dx = sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Shard(2)])
        dw = sw.distribute_tensor(w, mesh, [sw.Replicate(), sw.Shard(0)])
        with counting() as ledger:
            gathered = rows(dx, dw)
        assert ledger.bytes > 0  # it has no rule yet
        sw.register_sharding(rows, "?")
        with counting() as ledger:
            got = rows(dx, dw)
        assert ledger.bytes == 0
        assert str(got.sharding) == "[7:dp, 4, 3:tp]"
        torch.testing.assert_close(got.full_tensor().ranks[3], rows(x, w))
        torch.testing.assert_close(gathered.full_tensor().ranks[3], rows(x, w))
    assert sw.rules.verify(rows, [((x, w), {})]).candidates > 4
