"""Many tensors redistributed together equal the same tensors redistributed one by one, in values, gradients and bytes."""

import random
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import axes, layouts, shapes
from tests.tensor.test_redistribute import is_exact, mesh_of
from tests.test_processes import both
from tests.test_processes import mesh_of as named_mesh
from tests.values import dense_tensor, dtypes_for, random_layout, same_bits, tensor, wide

import shardwise as sw
from shardwise import LayoutError, Partial, PerRank, Replicate, Shard, simulate
from shardwise.comm import axes_of, counting
from shardwise.layout import Layout, contiguous_stride, parse_layout
from shardwise.plan import Item, plan_redistribute, plan_redistribute_many
from shardwise.tensor.redistribute_many import start_moving_blocks
from shardwise.torch_internals.process_groups import fake_world

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")
few = settings(max_examples=settings.default.max_examples // 5)
F32 = torch.float32


@st.composite
def moves(draw, on, most=5):
    """The shape, source, target and dtype of some tensors."""
    out = []
    for _ in range(draw(st.integers(1, most))):
        shape = draw(shapes(max_dims=3, max_size=7))
        source, target = draw(layouts(on, shape)), draw(layouts(on, shape))
        dtype = draw(st.sampled_from([F32, F32, *dtypes_for(source, target)]))
        out.append((source, target, dtype))
    return out


def blocks_equal(a, b, exact):
    for x, y in zip(a.to_local().ranks, b.to_local().ranks, strict=True):
        if exact:
            assert same_bits(x, y), (x, y)
        else:
            torch.testing.assert_close(wide(x), wide(y), rtol=1e-2, atol=1e-2)


def widens(dtype, layouts):
    """Whether reductions send more bytes than the dtype has."""
    ops = {op for x in layouts for _, op in x.partial}
    return bool(ops) and (dtype.itemsize < 4 or bool(ops & {"max", "min"}) or dtype is torch.uint32)


@few
@given(st.data())
def test_equal_to_one_by_one(data):
    on = data.draw(axes(max_count=8))
    some = data.draw(moves(on))
    with simulate(on.count):
        mesh = mesh_of(on)
        xs = [tensor(dense_tensor(s.shape, d, seed=i), s, mesh, seed=i) for i, (s, _, d) in enumerate(some)]
        targets = [target for _, target, _ in some]
        with counting() as together:
            found = sw.redistribute_many(xs, targets)
        expected = [x.redistribute(placements=t.placements) for x, t in zip(xs, targets, strict=True)]
        plan = plan_redistribute_many([Item(*move) for move in some])
        singles = [plan_redistribute(s, t, d.itemsize) for s, t, d in some]
        for y, e, (source, target, _) in zip(found, expected, some, strict=True):
            assert y._spec is e._spec
            assert y.stride() == contiguous_stride(target.shape)
            blocks_equal(y, e, is_exact(source, target))
    assert plan.bytes == sum(p.bytes for p in singles)
    assert together.collectives == plan.collectives <= sum(p.collectives for p in singles)
    assert plan.collectives >= max(p.collectives for p in singles)
    assert [e.step for e in together.entries] == [s.kind for s in plan.steps if s.is_collective]
    if not any(widens(d, (s, t)) for s, t, d in some):
        assert together.bytes == plan.bytes


@few
@given(st.data())
def test_gradients_equal_one_by_one(data):
    on = data.draw(axes(max_count=8))
    ops = st.sampled_from(["sum", "avg"])
    some = [
        (Layout(on, s.dims, {a: data.draw(ops) for a, _ in s.partial}), t.with_partial({a: "sum" for a, _ in t.partial}))
        for s, t, _ in data.draw(moves(on, most=4))
    ]  # fmt: skip
    asked = [data.draw(st.integers(0, 3)) > 0 for _ in some]
    with simulate(on.count):
        mesh = mesh_of(on)

        def gradients(move):
            xs = [tensor(dense_tensor(s.shape, torch.float64, 1), s, mesh, 1) for s, _ in some]
            xs = [x.detach().requires_grad_(need) for x, need in zip(xs, asked, strict=True)]
            ys = move(xs)
            assert [y.requires_grad for y in ys] == asked
            loss = sum((y * y).sum() for y, need in zip(ys, asked, strict=True) if need)
            if any(asked):
                loss.backward()
            return [x.grad for x in xs]

        targets = [t for _, t in some]
        together = gradients(lambda xs: sw.redistribute_many(xs, targets))
        single = gradients(
            lambda xs: [x.redistribute(placements=t.placements) for x, t in zip(xs, targets, strict=True)]
        )
        for a, b in zip(together, single, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.sharding is b.sharding
                for x, y in zip(a.full_tensor().ranks, b.full_tensor().ranks, strict=True):
                    torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("after", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_even_blocks_beside_uneven_ones_in_groups_of_three(dim, after):
    with simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,))
        for dtypes in ([F32] * 3, [F32, torch.bool, torch.float64]):
            whole = [dense_tensor((n, n + 1), d, seed=n) for n, d in zip((5, 6, 7), dtypes, strict=True)]
            xs = [sw.distribute_tensor(w, mesh, [Shard(dim)]) for w in whole]
            for w, y in zip(whole, sw.redistribute_many(xs, [after]), strict=True):
                assert all(torch.equal(w, f) for f in y.full_tensor().ranks)


def test_second_derivatives():
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        xs = [
            sw.distribute_tensor(torch.arange(1.0, n + 1), mesh, [Shard(0)]).requires_grad_() for n in (3, 4)
        ]
        a, b = sw.redistribute_many(xs, [Replicate()])
        grads = torch.autograd.grad((a**3).sum() + (b**3).sum(), xs, create_graph=True)
        again = torch.autograd.grad(sum(g.sum() for g in grads), xs)
        for x, g in zip(xs, again, strict=True):
            assert torch.equal(g.full_tensor().ranks[0], 6 * x.detach().full_tensor().ranks[0])


def test_steps_of_one_kind_are_one_collective_whatever_the_dtypes():
    on = sw.layout.Axes((2, 2), ("dp", "tp"))

    def item(text, target, dtype=F32):
        return Item(parse_layout(text, on)[0], parse_layout(target, on)[0], dtype)

    gathers = [
        item("[8:dp, 6]", "[8, 6]"),
        item("[5:dp]", "[5]", torch.bfloat16),
        item("[3, 4:dp]", "[3, 4]", torch.bool),
    ]
    plan = plan_redistribute_many(gathers)
    assert plan is plan_redistribute_many(gathers)
    assert [(s.kind, len(s.members)) for s in plan.steps] == [("all-gather", 3)]
    # a reduction for each dtype; the all-reduce over tp waits for the tensor that is first scattered over dp
    both = [
        item("[8, 6] P(dp,sum) P(tp,sum)", "[8:dp, 6]"),
        item("[4] P(tp,avg)", "[4]"),
        item("[6] P(dp,sum)", "[6:dp]", torch.float64),
    ]
    counts = Counter(s.kind for s in plan_redistribute_many(both).steps)
    assert counts == {"reduce-scatter": 2, "all-reduce": 1}
    model = sw.CostModel(latency=1.0, bandwidth=1e30)
    assert plan_redistribute_many(both).seconds(model) == pytest.approx(3.0)
    assert "reduce-scatter over dp: 1 tensor   " in str(plan_redistribute_many(both))


@pytest.mark.parametrize("size", [8, 7], ids=["even", "uneven"])
def test_results_of_a_collective_are_views_of_one_buffer(size):
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        for before, after in [
            (Shard(0), Replicate()),
            (Shard(0), Shard(1)),
            (Partial(), Shard(0)),
            (Partial(), Replicate()),
        ]:
            whole = [torch.arange(float(size * n)).view(size, n) for n in (2, 3)]
            xs = [sw.distribute_tensor(w, mesh, [before]) for w in whole]
            a, b = (y.to_local().ranks for y in sw.redistribute_many(xs, [after]))
            for x, y in zip(a, b, strict=True):
                assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
                before_write = y._version
                x.add_(1)
                assert y._version == before_write
            one, other = (t.untyped_storage().data_ptr() for t in a)
            assert one != other


def test_targets_and_errors():
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        line = mesh["tp"]
        x = sw.distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0), Replicate()])
        y = sw.distribute_tensor(torch.arange(5.0), line, [Shard(0)])
        same, moved = sw.redistribute_many([x, y], [x.sharding, [Replicate()]])
        assert same.sharding is x.sharding
        assert [t.tolist() for t in moved.to_local().ranks] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 4
        assert sw.redistribute_many([], []) == []
        sparse = torch.eye(2).to_sparse()
        z = sw.distribute_tensor(sparse, line, [Replicate()])
        _, kept = sw.redistribute_many([y, z], [[Replicate()]] * 2)
        assert kept.is_sparse
        with pytest.raises(LayoutError, match=r"(?s)2 targets for 1 tensors.*fix: "):
            sw.redistribute_many([x], [[Shard(0), Shard(0)], [Replicate()] * 2])
        with pytest.raises(LayoutError, match=r"(?s)for 2 tensors.*fix: "):
            sw.redistribute_many([x, x], x.sharding)
        with pytest.raises(LayoutError, match=r"(?s)got the target.*fix: Redistribute within one mesh"):
            sw.redistribute_many([x], [y.sharding])
        with pytest.raises(LayoutError, match=r"(?s)mean of integers"):
            sw.redistribute_many([x.long()], [[Partial("avg"), Replicate()]])
        with pytest.raises(TypeError, match=r"(?s)Tensor at index 1.*fix: distribute_tensor"):
            sw.redistribute_many([x, torch.ones(2)], [Replicate()] * 2)


def test_tensors_in_a_simulation_without_data():
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,))
        with torch.device("meta"):
            xs = [
                sw.DTensor.from_local(sw.per_rank(lambda rank, n=n: torch.empty(n)), mesh, [Shard(0)])
                for n in (2, 3)
            ]
        with counting() as ledger:
            a, b = sw.redistribute_many(xs, [Replicate()])
        assert (a.is_meta, b.to_local().ranks[0].shape) == (True, (12,))
        assert ledger.bytes == 3 * 4 * (8 + 12)


# ---- real processes


def moved_together(name, seed, async_op):
    """Random tensors moved together on a mesh, and the bytes and collectives counted on this rank."""
    mesh, rng = named_mesh(name), random.Random(seed)
    on = axes_of(mesh)
    out, sent = [], 0
    for _ in range(6):
        some = []
        for _ in range(rng.randint(1, 5)):
            shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
            source, target = (random_layout(rng, on, shape, ["sum"]) for _ in range(2))
            some.append((source, target, rng.choice([F32, torch.float64, torch.bfloat16])))
        xs = [tensor(dense_tensor(s.shape, d, seed=i), s, mesh, seed=i) for i, (s, _, d) in enumerate(some)]
        plan = plan_redistribute_many([Item(*move) for move in some])
        with counting() as ledger:
            ys = sw.redistribute_many(xs, [t for _, t, _ in some], async_op=async_op)
        assert ledger.collectives == plan.collectives or sw.comm.coord_of(mesh) is None
        sent += int(ledger.bytes)
        out += [y.to_local() for y in ys]
        want = [x.redistribute(placements=t.placements) for x, (_, t, _) in zip(xs, some, strict=True)]
        for y, w in zip(ys, want, strict=True):
            pairs = [(y.to_local(), w.to_local())]
            if isinstance(pairs[0][0], PerRank):
                pairs = list(zip(y.to_local().ranks, w.to_local().ranks, strict=True))
            assert all(same_bits(a, b) for a, b in pairs)
    return out, sent


@pytest.mark.processes
@pytest.mark.parametrize("name", ["(4,)", "(2, 2)", "permuted", "sub-mesh tp"])
@pytest.mark.parametrize("async_op", [False, True], ids=["now", "later"])
def test_on_real_processes(workers, name, async_op):
    real, simulated = both(workers, moved_together, name, 5, async_op)
    for (blocks, _), (expected, _) in zip(real, simulated, strict=True):
        assert all(same_bits(a, b) for a, b in zip(blocks, expected, strict=True))
    assert sum(sent for _, sent in real) == simulated[0][1]


@pytest.mark.parametrize(
    ("source", "target"), [("[4:dp]", "[4]"), ("[4] P(dp,sum)", "[4:dp]"), ("[4] P(dp,sum)", "[4]")]
)
def test_a_started_move_does_not_hold_its_sources(source, target):
    with fake_world(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        layouts = [parse_layout(text, axes_of(mesh))[0] for text in (source, target)]
        block = torch.ones(2 if source == "[4:dp]" else 4)
        held = weakref.ref(block)
        pending = start_moving_blocks(plan_redistribute_many([Item(*layouts, F32)]), [block], mesh)
        del block
        assert not pending.is_complete
        assert held() is None
        assert pending.wait()[0].numel() == (2 if target == "[4:dp]" else 4)
