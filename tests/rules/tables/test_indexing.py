"""Reading and writing at indices: dense results, and no communication where none is needed."""

import pytest
import torch
from tests.rules.against_dense import below, check, numbers

import shardwise as sw
from shardwise.comm import counting

X = numbers(5, 7, 3)
FEW = below(7, 2, seed=1)
MANY = below(7, 9, seed=2)
PAIRS = below(5, 6, 1, seed=3)
MORE = below(7, 1, 4, seed=4)
TALL = numbers(13, 3, seed=5)
SIGNED = torch.tensor([-1, 0, -13, 5, 12])


def index(*at):
    return lambda x, *i: x[tuple(i[a] if isinstance(a, int) else a for a in at)]


ALL = slice(None)
READ = {
    "other dims stay split": (index(ALL, 0), [X, MANY], ["[5:tp, 7, 3]", "[9]"], "[5:tp, 9, 3]"),
    "dims after the index stay split": (index(ALL, 0), [X, MANY], ["[5, 7, 3:tp]", "[9]"], "[5, 9, 3:tp]"),
    "a split index": (index(ALL, 0), [X, MANY], ["[5, 7, 3]", "[9:tp]"], "[5, 9:tp, 3]"),
    "indices that broadcast": (index(0, 1), [X, PAIRS, MORE], ["[5, 7, 3]", "[6:tp, 1]", "[1, 4]"], "[6:tp, 4, 3]"),
    "of which the other is split": (index(0, 1), [X, PAIRS, MORE], ["[5, 7, 3]", "[6, 1]", "[1, 4:tp]"], "[6, 4:tp, 3]"),
    "separated indices, whose dims come first": (index(0, ALL, 0), [numbers(3, 7, 3), below(3, 6)], ["[3, 7:tp, 3]", "[6]"], "[6, 7:tp]"),
    "a pending sum": (index(ALL, 0), [X, MANY], ["[5, 7, 3] P(tp,sum)", "[9]"], "[5, 9, 3] P(tp,sum)"),
    "by masked lookup": (index(0), [TALL, SIGNED], ["[13:tp, 3]", "[5]"], "[5, 3] P(tp,sum)"),
    "by masked lookup in the middle": (index(ALL, 0), [X, FEW], ["[5, 7:tp, 3]", "[2]"], "[5, 2, 3] P(tp,sum)"),
    "by masked lookup where blocks are empty": (
        index(ALL, 0), [numbers(2, 5), below(5, 2)], ["[2, 5:tp]", "[2]"], "[2, 2] P(tp,sum)"
    ),
    "by masked lookup, and more dims": (
        index(0), [TALL, below(13, 3, 2)], ["[13:tp, 3]", "[3, 2]"], "[3, 2, 3] P(tp,sum)"
    ),
    "select": (lambda x, i: x.index_select(1, i), [X, MANY], ["[5:tp, 7, 3]", "[9]"], "[5:tp, 9, 3]"),
    "select by a split index": (lambda x, i: x.index_select(-2, i), [X, MANY], ["[5, 7, 3]", "[9:tp]"], "[5, 9:tp, 3]"),
    "select by masked lookup": (lambda x, i: x.index_select(1, i), [X, FEW], ["[5, 7:tp, 3]", "[2]"], "[5, 2, 3] P(tp,sum)"),
    "select with a scalar index": (lambda x, i: x.index_select(0, i), [X, below(5)], ["[5, 7:tp, 3]", "[]"], "[1, 7:tp, 3]"),
    "take": (torch.take, [X, below(105, 9)], ["[5, 7, 3]", "[9:tp]"], "[9:tp]"),
    "gather": (lambda x, i: x.gather(1, i), [X, below(7, 5, 2, 3)], ["[5:tp, 7, 3]", "[5:tp, 2, 3]"], "[5:tp, 2, 3]"),
    "gather at a split index": (
        lambda x, i: x.gather(1, i), [X, below(7, 5, 6, 3)], ["[5, 7, 3]", "[5, 6:tp, 3]"], "[5, 6:tp, 3]"
    ),
    "gather by masked lookup": (
        lambda x, i: x.gather(1, i), [X, below(7, 5, 1, 3)], ["[5, 7:tp, 3]", "[5, 1, 3]"], "[5, 1, 3] P(tp,sum)"
    ),
    "along a dim": (
        lambda x, i: torch.take_along_dim(x, i, 1), [X, below(7, 5, 2, 3)], ["[5:tp, 7, 3]", "[5, 2, 3]"],
        "[5:tp, 2, 3]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_reading(name):
    fn, values, layouts, expect = READ[name]
    check(fn, values, layouts, expect=expect)


def put(accumulate, *at):
    def fn(x, *rest):
        *indices, values = rest
        return torch.ops.aten.index_put(
            x, [None if a is None else indices[a] for a in at], values, accumulate
        )

    return fn


ONCE = torch.tensor([6, 0, 3])
SRC = numbers(5, 3, 3, seed=7)
SMALLER = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(k))[:3] for k in range(15)])
SMALLER = SMALLER.view(5, 3, 3).transpose(1, 2).contiguous()  # distinct indices along dim 1
LONG = numbers(5, 9, 3, seed=8)
WRITE = {
    "put into other dims": (put(False, None, 0), [X, ONCE, SRC], ["[5:tp, 7, 3]", "[3]", "[5, 3, 3]"], "[5:tp, 7, 3]"),
    "put into the split dim": (
        put(False, None, 0), [X, ONCE, SRC], ["[5, 7:tp, 3]", "[3]", "[5, 3, 3]"], "[5, 7:tp, 3]"
    ),
    "put one value": (
        put(False, None, 0), [X, ONCE, numbers(1, 3)], ["[5, 7:tp, 3]", "[3]", "[1, 3]"], "[5, 7:tp, 3]"
    ),
    "put into two dims": (
        put(False, 0, 1), [X, torch.tensor([[0], [4]]), torch.tensor([[-1, 2]]), numbers(2, 2, 3)],
        ["[5:tp, 7, 3]", "[2, 1]", "[1, 2]", "[2, 2, 3]"], "[5:tp, 7, 3]",
    ),
    "add at a split index": (
        put(True, None, 0), [X, MANY, LONG], ["[5, 7, 3]", "[9:tp]", "[5, 9, 3]"], "[5, 7, 3] P(tp,sum)"
    ),
    "add into the split dim": (
        put(True, None, 0), [X, MANY, LONG], ["[5, 7:tp, 3]", "[9]", "[5, 9, 3]"], "[5, 7:tp, 3]"
    ),
    "add to a pending sum": (
        put(True, None, 0), [X, MANY, LONG], ["[5, 7, 3] P(tp,sum)", "[9]", "[5, 9, 3]"], "[5, 7, 3] P(tp,sum)"
    ),
    "index_add": (
        lambda x, i, s: x.index_add(1, i, s, alpha=2), [X, MANY, LONG], ["[5:tp, 7, 3]", "[9]", "[5, 9, 3]"],
        "[5:tp, 7, 3]",
    ),
    "index_add at a split index": (
        lambda x, i, s: x.index_add(1, i, s), [X, MANY, LONG], ["[5, 7, 3]", "[9:tp]", "[5, 9:tp, 3]"],
        "[5, 7, 3] P(tp,sum)",
    ),
    "index_add into the split dim": (
        lambda x, i, s: x.index_add(1, i, s), [X, MANY, LONG], ["[5, 7:tp, 3]", "[9]", "[5, 9, 3]"], "[5, 7:tp, 3]"
    ),
    "index_copy": (
        lambda x, i, s: x.index_copy(1, i, s), [X, ONCE, SRC], ["[5, 7, 3:tp]", "[3]", "[5, 3, 3:tp]"], "[5, 7, 3:tp]"
    ),
    "index_copy into the split dim": (
        lambda x, i, s: x.index_copy(1, i, s), [X, ONCE, SRC], ["[5, 7:tp, 3]", "[3]", "[5, 3, 3]"], "[5, 7:tp, 3]"
    ),
    "index_fill": (lambda x, i: x.index_fill(1, i, 2.5), [X, FEW], ["[5:tp, 7, 3]", "[2]"], "[5:tp, 7, 3]"),
    "index_fill of the split dim": (
        lambda x, i: x.index_fill(1, i, 2.5), [X, -1 - FEW], ["[5, 7:tp, 3]", "[2]"], "[5, 7:tp, 3]"
    ),
    "index_fill by 0 of a pending sum": (
        lambda x, i: x.index_fill(1, i, 0), [X, FEW], ["[5, 7, 3] P(tp,sum)", "[2]"], "[5, 7, 3] P(tp,sum)"
    ),
    "scatter": (
        lambda x, i, s: x.scatter(1, i, s), [X, SMALLER, SRC], ["[5:tp, 7, 3]", "[5:tp, 3, 3]", "[5:tp, 3, 3]"],
        "[5:tp, 7, 3]",
    ),
    "scatter into the split dim": (
        lambda x, i, s: x.scatter(1, i, s), [X, SMALLER, SRC], ["[5, 7:tp, 3]", "[5, 3, 3]", "[5, 3, 3]"],
        "[5, 7:tp, 3]",
    ),
    "scatter a number": (
        lambda x, i: x.scatter(1, i, 1.5), [X, SMALLER], ["[5, 7, 3:tp]", "[5, 3, 3:tp]"], "[5, 7, 3:tp]"
    ),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(1, i, s), [X, below(7, 5, 9, 3), LONG],
        ["[5:tp, 7, 3]", "[5, 9, 3]", "[5:tp, 9, 3]"], "[5:tp, 7, 3]",
    ),
    "scatter_add at a split index": (
        lambda x, i, s: x.scatter_add(1, i, s), [X, below(7, 5, 9, 3), LONG],
        ["[5, 7, 3]", "[5, 9:tp, 3]", "[5, 9:tp, 3]"], "[5, 7, 3] P(tp,sum)",
    ),
    "select_scatter": (
        lambda x, s: x.select_scatter(s, 1, -2), [X, numbers(5, 3)], ["[5, 7:tp, 3]", "[5, 3]"], "[5, 7:tp, 3]"
    ),
    "slice_scatter": (
        lambda x, s: x.slice_scatter(s, 1, 1, 6, 2), [X, SRC], ["[5:tp, 7, 3]", "[5:tp, 3, 3]"], "[5:tp, 7, 3]"
    ),
    "diagonal_scatter": (
        lambda x, s: x.diagonal_scatter(s, 1, 1, 2), [X, numbers(5, 2)], ["[5:tp, 7, 3]", "[5:tp, 2]"], "[5:tp, 7, 3]"
    ),
    "put with accumulate": (
        lambda x, i, s: x.put(i, s, accumulate=True), [X, below(105, 9), numbers(9)], ["[5, 7, 3]", "[9:tp]", "[9:tp]"],
        "[5, 7, 3] P(tp,sum)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITE)
def test_writing(name):
    fn, values, layouts, expect = WRITE[name]
    check(fn, values, layouts, expect=expect, grad=False)
    check(fn, values, layouts, expect=expect, free=False)


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("layout", ["[5, 7:tp, 3]", "[5:tp, 7, 3]"])
def test_scatter_reduce(reduce, layout):
    values = [X, below(7, 5, 9, 3), LONG]

    def fn(x, i, s):
        return x.scatter_reduce(1, i, s, reduce, include_self=False)

    check(fn, values, [layout, "[5, 9, 3]", "[5, 9, 3]"], expect=layout, grad=False)


def test_part_of_a_larger_source_is_not_confused_with_a_block():
    def fn(x, i):
        return x.gather(1, i)

    check(fn, [X, below(7, 4, 2, 3)], ["[5:tp, 7, 3]", "[4:tp, 2, 3]"], free=False)

    def scatter(x, i, s):
        return x.scatter_add(1, i, s)

    check(
        scatter,
        [X, below(7, 4, 2, 3), LONG],
        ["[5:tp, 7, 3]", "[4:tp, 2, 3]", "[5:tp, 9, 3]"],
        free=False,
        grad=False,
    )


def test_a_lookup_in_a_dim_split_within_factors():
    table, at = numbers(12, 3), below(12, 4)
    for layout in ["[2 6:tp, 3]", "[3 4:tp, 3]", "[12:tp, 3]"]:
        check(lambda x, i: x[i], [table, at], [layout, "[4]"], free=False)
        check(lambda x, i: x.index_select(0, i), [table, at], [layout, "[4]"], free=False)
        check(lambda x, i: torch.nn.functional.embedding(i, x), [table, at], [layout, "[4]"], free=False)
        check(lambda x, i: x.index_fill(0, i, 7.0), [table, at], [layout, "[4]"], free=False)


def test_in_place_writes_keep_the_layout_of_the_target():
    def fn(x, i, s):
        y = x.clone()
        y[:, i] = s
        y.index_add_(1, i, s)
        y[y > 1] = 0.5
        return y.scatter_(1, i.view(1, 3, 1).expand(5, 3, 3), 0.25)

    for layout in ["[5:tp, 7, 3]", "[5, 7:tp, 3]", "[5, 7, 3:tp]"]:
        check(fn, [X, ONCE, SRC], [layout, "[3]", "[5, 3, 3]"], expect=layout, grad=False)


def test_in_place_writes_are_visible_through_views():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.zeros(7, device_mesh=mesh, placements=[sw.Shard(0)])
        y = x.view(7, 1)
        i = sw.distribute_tensor(torch.tensor([6, 2]), mesh, [sw.Replicate()])
        x.index_fill_(0, i, 3.0)
        assert y.full_tensor().ranks[1].flatten().tolist() == [0, 0, 3, 0, 0, 0, 3]


@pytest.mark.parametrize("mask", ["[5:tp, 7]", "[5, 7]"])
@pytest.mark.parametrize("value", [numbers(), numbers(1), numbers(3), numbers(1, 3)])
def test_a_value_written_where_a_mask_is_true(mask, value):
    def fn(x, m, v):
        return x.index_put((m,), v)

    layout = "[" + ", ".join(map(str, value.shape)) + "]"
    check(fn, [X, X[..., 0] > 0, value], ["[5:tp, 7, 3]", mask, layout], expect="[5:tp, 7, 3]", grad=False)


def test_different_values_written_at_a_mask():
    m = X[..., 0] > 0

    def fn(x, m, v):
        return x.index_put((m,), v)

    check(
        fn,
        [X, m, numbers(int(m.sum()), 3)],
        ["[5:tp, 7, 3]", "[5:tp, 7]", f"[{int(m.sum())}, 3]"],
        free=False,
    )


@pytest.mark.parametrize("bad", [13, -14])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: torch.nn.functional.embedding(i, x),
        lambda x, i: x.index_fill(0, i, 1.0),
        lambda x, i: x.index_put((i,), x[:2]),
    ],
)
def test_an_index_out_of_range_is_an_error(fn, bad):
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(TALL, mesh, [sw.Shard(0)])
        i = sw.distribute_tensor(torch.tensor([3, bad]), mesh, [sw.Replicate()])
        with pytest.raises((IndexError, RuntimeError), match=r"range|bounds"):
            fn(x, i)


def test_reading_many_elements_of_a_small_tensor_gathers_the_tensor():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.ones(8, device_mesh=mesh, placements=[sw.Shard(0)])
        i = sw.zeros(1000, device_mesh=mesh, placements=[sw.Replicate()]).long()
        with counting() as ledger:
            y = x[i]
            y.full_tensor()
        assert ledger.bytes == 4 * 8 * 3  # each of 4 ranks receives 3 blocks of 2 elements


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8])
def test_dtypes(dtype):
    x = numbers(13, 3).mul(4).to(dtype)
    check(lambda x, i: x[i], [x, SIGNED], ["[13:tp, 3]", "[5]"], free=False, grad=False)
    check(lambda x, i: x.index_fill(0, i, 1), [x, SIGNED], ["[13:tp, 3]", "[5]"], grad=False)
    check(
        lambda x, i, s: x.index_add(0, i, s),
        [x, below(13, 9), x[:9]],
        ["[13:tp, 3]", "[9]", "[9, 3]"],
        grad=False,
    )
    check(
        lambda x, i, s: x.index_add(0, i, s), [x, below(13, 9), x[:9]], ["[13, 3]", "[9:tp]", "[9, 3]"],
        free=False, grad=False,
    )  # fmt: skip
