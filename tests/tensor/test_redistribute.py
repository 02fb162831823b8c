"""Redistribution keeps the value, for any mesh, shape, dtype and pair of layouts."""

import copy
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, layouts, many, shapes
from tests.values import (
    DTYPES,
    blocks_of,
    dense_tensor,
    dtypes_for,
    parts,
    random_layout,
    same_bits,
    take,
    tensor,
    value,
    wide,
)

import shardwise as sw
from shardwise import DTensor, LayoutError, MeshError, Partial, Replicate, Shard, plan_redistribute, simulate
from shardwise.comm import counting, members_of, siblings_of
from shardwise.layout import Layout, block_offset, block_shape, owned, parse_layout
from shardwise.layout.placement import REDUCE_OPS

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def mesh_of(on, ranks=None):
    """A mesh of these axes over the first ranks of the world, or over the ones given."""
    ranks = range(on.count) if ranks is None else ranks
    return sw.DeviceMesh("cpu", torch.tensor(list(ranks)).view(on.sizes), mesh_dim_names=on.names)


def is_exact(*layouts):
    """Whether the values of `tests.values` stay exact: there is no mean over three ranks, which rounds."""
    return not any(op == "avg" and x.axes.sizes[a] == 3 for x in layouts for a, op in x.partial)


def wire_size(dtype, op):
    """The bytes of an element in a reduction: more than its own if the backend cannot reduce the dtype."""
    if op and dtype.is_floating_point and (op in ("max", "min") or dtype.itemsize == 1):
        return max(dtype.itemsize, 4)
    return (
        {torch.int16: 4, torch.uint16: 4, torch.uint32: 8}.get(dtype, dtype.itemsize)
        if op
        else dtype.itemsize
    )


def check_what_was_sent(ledger, plan, dtype, copies=1):
    """Check that the ledger has the collectives and bytes of the plan."""
    collectives = [step for step in plan.steps if step.is_collective]
    assert [e.step for e in ledger.entries] == [step.name for step in collectives]
    wider = False
    for entry, step in zip(ledger.entries, collectives, strict=True):
        elements, wire = copies * step.elements, wire_size(dtype, next(iter(step.reduced.values()), ""))
        assert entry.axes == step.source.axes.names_of(step.axes)
        assert entry.group_size == step.group_size
        # uneven blocks are sent in their own dtype and reduced locally
        assert elements * dtype.itemsize <= entry.bytes <= elements * wire
        wider = wider or wire > dtype.itemsize
    assert wider or ledger.bytes == copies * plan.bytes


def check_blocks(x, layout, mesh):
    """Check that the blocks have the shapes of the layout and are contiguous."""
    assert x.sharding is layout
    blocks = blocks_of(x, mesh)
    for coord, block in blocks.items():
        assert tuple(block.shape) == block_shape(layout, coord)
        assert block.is_contiguous()
        assert block.dtype is x.dtype
    return blocks


def check_move(mesh, whole, source, target, seed):
    x = tensor(whole, source, mesh, seed)
    before = parts(whole, source, seed)
    with counting() as ledger:
        y = x.redistribute(placements=target.placements)
    check_what_was_sent(
        ledger,
        plan_redistribute(source, target, whole.dtype.itemsize),
        whole.dtype,
        copies=len(siblings_of(mesh)),
    )
    blocks = check_blocks(y, target, mesh)
    full = y.full_tensor()
    if is_exact(source, target):
        assert torch.equal(value(blocks, target), wide(whole))
        assert all(torch.equal(wide(f), wide(whole)) for f in full.ranks)
    else:
        torch.testing.assert_close(value(blocks, target), wide(whole), rtol=1e-2, atol=1e-2)
        for f in full.ranks:
            torch.testing.assert_close(wide(f), wide(whole), rtol=1e-2, atol=1e-2)
    assert all(f.dtype is whole.dtype for f in full.ranks)
    assert all(same_bits(f, full.ranks[0]) for f in full.ranks)
    assert all(same_bits(block, before[c]) for c, block in blocks_of(x, mesh).items())
    assert x.sharding is source
    return y


@many
@given(st.data())
def test_a_tensor_keeps_its_value(data):
    on, shape = data.draw(axes(max_count=12)), data.draw(shapes())
    source, target = (data.draw(layouts(on, shape)) for _ in range(2))
    dtype = data.draw(st.sampled_from([torch.float32, *dtypes_for(source, target)]))
    whole = dense_tensor(shape, dtype, seed=7)
    with simulate(on.count):
        y = check_move(mesh_of(on), whole, source, target, seed=7)
        if not target.partial:  # then the blocks are known, not only their value
            expected = {c: take(whole, owned(target, c)) for c in members_of(y.device_mesh).values()}
            if is_exact(source):
                found = blocks_of(y, y.device_mesh)
                assert all(torch.equal(wide(found[c]), wide(e)) for c, e in expected.items())


@given(st.data())
def test_a_mesh_of_some_ranks_in_any_order(data):
    on, shape = data.draw(axes(max_count=6)), data.draw(shapes(max_dims=2))
    ranks = data.draw(st.permutations(range(on.count + 2)))[: on.count]
    source, target = (data.draw(layouts(on, shape)) for _ in range(2))
    dtype = data.draw(st.sampled_from(dtypes_for(source, target)))
    with simulate(on.count + 2):
        mesh = mesh_of(on, ranks)
        y = check_move(mesh, dense_tensor(shape, dtype, seed=3), source, target, seed=3)
        assert set(y.to_local()._blocks) == set(ranks)


@given(st.data())
def test_sub_meshes(data):
    on, shape = data.draw(axes(most=2, max_count=12)), data.draw(shapes(max_dims=2))
    keep = data.draw(st.sampled_from(on.names))
    with simulate(on.count):
        mesh = mesh_of(on)[keep]
        inner = sw.comm.axes_of(mesh)
        source, target = (data.draw(layouts(inner, shape)) for _ in range(2))
        dtype = data.draw(st.sampled_from(dtypes_for(source, target)))
        whole = dense_tensor(shape, dtype, seed=5)
        x = tensor(whole, source, mesh, seed=5)
        with counting() as ledger:
            y = x.redistribute(placements=target.placements)
        plan = plan_redistribute(source, target, dtype.itemsize)
        check_what_was_sent(ledger, plan, dtype, copies=on.count // inner.count)
        tolerance = 0.0 if is_exact(source, target) else 1e-2
        for f in y.full_tensor().ranks:
            torch.testing.assert_close(wide(f), wide(whole), rtol=tolerance, atol=tolerance)


def bits_of(dtype, shape, seed):
    """Random bits, which may include every NaN, infinity and denormal number of the dtype."""
    rng = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=rng).bool()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=rng, dtype=torch.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_keep_every_bit(dtype):
    on, shape = sw.layout.Axes((2, 3), ("dp", "tp")), (5, 7)
    whole, rng = bits_of(dtype, shape, seed=1), random.Random(1)
    with simulate(6):
        mesh = mesh_of(on)
        for _ in range(12):
            source, target = (random_layout(rng, on, shape) for _ in range(2))
            y = tensor(whole, source, mesh).redistribute(placements=target.placements)
            for coord, block in check_blocks(y, target, mesh).items():
                assert same_bits(block, take(whole, owned(target, coord)))
            assert all(same_bits(f, whole) for f in y.full_tensor().ranks)


def single_elements(mesh, dtype):
    """One element per rank, with the stride of a column; redistributed, for comparison with the original."""
    whole = bits_of(dtype, (mesh.size(), 2), seed=3)
    split = sw.per_rank(lambda rank: whole[rank : rank + 1, 1])
    replicated = sw.per_rank(lambda rank: whole[:1, 1])
    x = DTensor.from_local(split, mesh, [Shard(0)])
    DTensor.from_local(replicated, mesh, [Replicate()], run_check=True)
    return [
        whole[:, 1],
        x.full_tensor(),
        x.view(-1, 1).redistribute(placements=[Shard(1)]).full_tensor()[:, 0],
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_elements_of_any_stride_keep_every_bit(dtype):
    with simulate(2):
        whole, *moved = single_elements(sw.init_device_mesh("cpu", (2,)), dtype)
        assert all(same_bits(f, whole) for m in moved for f in m.ranks)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_bits_are_resolved_before_sending(dtype):
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        z = dense_tensor((4, 3), dtype, seed=2)
        for whole in (z.conj(), z.conj().imag):
            for target in ([Replicate()], [Shard(1)]):
                local = sw.per_rank(lambda rank, w=whole: w.chunk(2)[rank])
                x = DTensor.from_local(local, mesh, [Shard(0)])
                y = x.redistribute(placements=target).full_tensor()
                assert all(torch.equal(f, whole) for f in y.ranks)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2]
)
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("size", [4, 6, 7])  # even and uneven: reduced by a collective, or locally
def test_nan_and_infinities_in_max_and_min(dtype, op, size):
    inf, nan = float("inf"), float("nan")
    seen = [
        [nan, 1.0, -inf, inf, 0.0, -0.5, -inf],
        [2.0, nan, -inf, -1.0, -0.25, -inf, inf],
        [inf, -inf, -inf, nan, -3.0, nan, nan],
    ]
    rows = [torch.tensor(row[:size]).to(dtype) for row in seen]
    stack = torch.stack([wide(row) for row in rows])
    expected = stack.amax(0) if op == "max" else stack.amin(0)
    with simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,))
        x = DTensor.from_local(sw.per_rank(lambda rank: rows[rank]), mesh, [Partial(op)])
        for target in (Replicate(), Shard(0)):
            for f in x.redistribute(placements=[target]).full_tensor().ranks:
                torch.testing.assert_close(wide(f), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES if not d.is_floating_point and not d.is_complex], ids=str
)
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("size", [4, 5])
def test_the_limits_of_integers_in_max_and_min(dtype, op, size):
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    rows = [[low, high, low, 1, 0], [high, high, low, 0, 1]]
    expected = [(max if op == "max" else min)(pair) for pair in zip(*rows, strict=True)]
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        local = sw.per_rank(lambda rank: torch.tensor(rows[rank][:size], dtype=dtype))
        x = DTensor.from_local(local, mesh, [Partial(op)])
        for target in (Replicate(), Shard(0)):
            for f in x.redistribute(placements=[target]).full_tensor().ranks:
                assert f.tolist() == expected[:size]


def test_infinities_and_nan_in_sums():
    rows = torch.tensor([[float("inf"), 1.0, float("nan"), 2.0], [float("-inf"), float("inf"), 0.0, 3.0]])
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = DTensor.from_local(sw.per_rank(lambda rank: rows[rank]), mesh, [Partial()])
        for f in x.redistribute(placements=[Shard(0)]).full_tensor().ranks:
            torch.testing.assert_close(f, rows.sum(0), equal_nan=True)


@pytest.mark.parametrize("op", REDUCE_OPS)
@pytest.mark.parametrize("target", [Replicate(), Partial("sum"), Partial("max"), Partial("avg")], ids=str)
def test_zero_dim_tensors(op, target):
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        on = sw.comm.axes_of(mesh)
        source = Layout.of((), on, [Partial(op), Replicate()])
        goal = Layout.of((), on, [Replicate(), target])
        check_move(mesh, torch.tensor(3.0), source, goal, seed=1)


@pytest.mark.parametrize(
    ("dtype", "op", "why"),
    [
        (torch.int64, "avg", "The mean of integers is not an integer"),
        (torch.bool, "avg", "The mean of integers is not an integer"),
        (torch.complex64, "max", "Complex numbers have no order"),
        (torch.complex64, "product", "real and imaginary parts separately"),
        (torch.float8_e8m0fnu, "sum", "without a zero"),
    ],
)
def test_a_reduction_that_a_dtype_does_not_support_is_an_error(dtype, op, why):
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.ones(4).to(dtype), mesh, [Replicate()])
        for make in (
            lambda: x.redistribute(placements=[Partial(op)]),
            lambda: DTensor.from_local(torch.ones(4).to(dtype), mesh, [Partial(op)]),
            lambda: sw.distribute_tensor(torch.ones(4).to(dtype), mesh, [Partial(op)]),
        ):
            with pytest.raises(LayoutError, match=rf"(?s)Partial\({op}\).*why: .*{why}.*fix: "):
                make()


# ---- arguments


def test_keyword_arguments_change_only_their_axes():
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(20.0).view(5, 4)
        x = sw.distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
        assert x.redistribute(tp=Shard(1)).sharding is parse_layout("[5:dp, 4:tp]", x.sharding.axes)[0]
        both = x.redistribute(tp=Replicate(), dp=Shard(1))
        assert both.sharding is parse_layout("[5, 4:dp]", x.sharding.axes)[0]
        assert all(torch.equal(f, whole) for f in both.full_tensor().ranks)
        assert x.redistribute(mesh, [Shard(0), Replicate()]).placements == (Shard(0), Replicate())
        assert x.redistribute(dp=Shard(-2)).sharding is x.sharding


def test_invalid_arguments_are_errors():
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        other = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = sw.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        for call, what in [
            (lambda: x.redistribute(), "Neither placements nor a mesh axis"),
            (lambda: x.redistribute(placements=[Replicate()], tp=Replicate()), "The target is given once"),
            (lambda: x.redistribute(pp=Replicate()), "Its axes are tp=4"),
            (lambda: x.redistribute(placements=[Replicate()] * 2), "same length as `device_mesh.ndim`"),
            (lambda: x.redistribute(placements=[Shard(1)]), "out of range"),
        ]:
            with pytest.raises(LayoutError, match=f"(?s){what}.*fix: "):
                call()
        with pytest.raises(MeshError, match="moves blocks within one mesh"):
            x.redistribute(other, [Replicate(), Replicate()])


def test_redistribute_to_the_same_layout_sends_nothing():
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
        with counting() as ledger:
            y = x.redistribute(placements=[Shard(-2)])
        assert ledger.collectives == 0
        assert y.sharding is x.sharding
        assert all(torch.equal(f, x.full_tensor().ranks[0]) for f in y.full_tensor().ranks)


def test_results_are_contiguous():
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        whole = torch.arange(20.0).view(4, 5).t()  # (5, 4)
        local = sw.per_rank(lambda rank: whole.chunk(2)[rank])
        assert not local.ranks[0].is_contiguous()
        x = DTensor.from_local(local, mesh, [Shard(0)], shape=(5, 4))
        assert x.stride() == (1, 5)
        for target in ([Replicate()], [Shard(1)], [Partial()]):
            y = x.redistribute(placements=target)
            assert y.stride() == (4, 1)
            assert all(torch.equal(f, whole) for f in y.full_tensor().ranks)
            assert all(b.is_contiguous() for b in y.to_local().ranks)


def test_the_result_does_not_share_memory():
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
        for target in (Shard(0), Partial("sum"), Partial("max")):
            y = x.redistribute(placements=[target])
            for block in y.to_local().ranks:
                block.fill_(-1.0)
            assert all(torch.equal(f, torch.arange(6.0)) for f in x.full_tensor().ranks)


@pytest.mark.parametrize("source", [Shard(0), Partial()], ids=str)
@pytest.mark.parametrize("target", [Replicate(), Shard(1)], ids=str)
def test_forward_dtype_and_backward_dtype(source, target):
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,))
        whole = dense_tensor((8, 4), torch.float64, seed=4)
        x = tensor(whole, Layout.of((8, 4), sw.comm.axes_of(mesh), [source]), mesh).requires_grad_()
        with counting() as forward:
            y = x.redistribute(
                placements=[target], forward_dtype=torch.bfloat16, backward_dtype=torch.float32
            )
        assert y.dtype is torch.bfloat16
        assert all(b.dtype is torch.bfloat16 for b in y.to_local().ranks)
        assert all(torch.equal(f.double(), whole) for f in y.full_tensor().ranks)
        assert forward.bytes == plan_redistribute(x.sharding, y.sharding, 2).bytes
        with counting() as backward:
            y.backward(torch.ones_like(y))
        assert x.grad.dtype is torch.float64
        assert backward.bytes == plan_redistribute(y.sharding, x.grad.sharding, 4).bytes
        assert all(torch.equal(g, torch.ones(8, 4).double()) for g in x.grad.full_tensor().ranks)


def test_meta_tensors_count_what_would_be_sent():
    with simulate(8):
        mesh = sw.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            blocks = sw.per_rank(lambda rank: torch.empty(4, 8))
        x = DTensor.from_local(blocks, mesh, [Shard(0), Partial()])
        with counting() as ledger:
            y = x.redistribute(placements=[Replicate(), Shard(1)])
        assert y.is_meta
        assert y.to_local().ranks[0].shape == (8, 2)
        assert ledger.bytes == plan_redistribute(x.sharding, y.sharding, 4).bytes > 0


USES = {
    "cast": lambda y: y.to(torch.float64).full_tensor(),
    "view": lambda y: y.view(-1).full_tensor().view(y.shape),
    "block": lambda y: y.to_local(),
    "full tensor": lambda y: y.full_tensor(),
    "in place": lambda y: y.add_(torch.ones_like(y)).full_tensor() - 1,
    "copy": lambda y: copy.deepcopy(y).full_tensor(),
    "redistribute": lambda y: y.redistribute(placements=[Shard(0)], async_op=True).full_tensor(),
    "repr": lambda y: y if "local_tensor=" in repr(y) else None,
    "item": lambda y: y if y.sum().item() == float(y.numel() * (y.numel() - 1) / 2) else None,
}
"""Ways to use the result of an asynchronous redistribution; each returns its value."""


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("source", [Shard(0), Shard(1), Partial()], ids=str)
def test_using_an_async_result_waits_for_it(use, source):
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        whole = torch.arange(15.0).view(5, 3)
        x = tensor(whole, Layout.of((5, 3), sw.comm.axes_of(mesh), [source]), mesh)
        used = use(x.redistribute(placements=[Replicate()], async_op=True))
        found = used.full_tensor() if isinstance(used, DTensor) else used
        assert all(torch.equal(f.to(whole.dtype), whole) for f in found.ranks)


# ---- cases that are silently wrong in torch


@pytest.fixture
def square():
    """A mesh of 2 x 2."""
    with simulate(4):
        yield sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_r9_a_pending_sum_becomes_a_pending_mean(square):
    whole = dense_tensor((4, 3), torch.float32, seed=9)
    for source, target in [("sum", "avg"), ("avg", "sum")]:
        a, b = ([Partial(op), Replicate()] for op in (source, target))
        x = tensor(whole, Layout.of((4, 3), sw.comm.axes_of(square), a), square)
        with counting() as ledger:
            y = x.redistribute(placements=b)
        assert ledger.collectives == 0
        assert y.placements == tuple(b)
        assert torch.equal(value(blocks_of(y, square), y.sharding), whole.double())
        assert all(torch.equal(f, whole) for f in y.full_tensor().ranks)


def test_r22_uneven_rows_over_two_axes(square):
    whole = torch.arange(15.0).view(5, 3)
    x = sw.distribute_tensor(whole, square, [Shard(0), Shard(0)])
    y = x.redistribute(placements=[Replicate(), Replicate()])
    assert [len(b) for b in x.to_local().ranks] == [2, 1, 1, 1]
    assert all(torch.equal(b, whole) for b in y.to_local().ranks)


def test_r23_axes_in_the_other_order(square):
    whole = torch.arange(5.0)
    x = sw.distribute_tensor(whole, square, [Shard(0, order=1), Shard(0, order=0)])
    assert str(x.sharding) == "[5:tp,dp]"
    assert [b.tolist() for b in x.to_local().ranks] == [[0, 1], [3], [2], [4]]
    assert all(torch.equal(f, whole) for f in x.full_tensor().ranks)
    y = x.redistribute(placements=[Shard(0), Shard(0)])
    assert [b.tolist() for b in y.to_local().ranks] == [[0, 1], [2], [3], [4]]


def test_r26_empty_blocks(square):
    whole = torch.arange(2.0)
    x = sw.distribute_tensor(whole, square, [Shard(0), Shard(0)])
    assert [b.tolist() for b in x.to_local().ranks] == [[0], [], [1], []]
    offsets = [block_offset(x.sharding, c) for c in members_of(square).values()]
    assert offsets == [(0,), (2,), (1,), (2,)]  # an empty block is at the end
    assert all(torch.equal(f, whole) for f in x.full_tensor().ranks)


def test_r28_uneven_blocks_with_a_given_shape():
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,))
        whole = torch.arange(50.0).view(5, 10)
        local = sw.per_rank(lambda rank: whole[2 * rank : 2 * rank + 2])
        x = DTensor.from_local(local, mesh, [Shard(0)], shape=(5, 10), stride=(10, 1))
        assert x.shape == (5, 10)
        y = x.redistribute(placements=[Replicate()])
        assert all(b.shape == (5, 10) and torch.equal(b, whole) for b in y.to_local().ranks)


def test_r30_uneven_columns_become_contiguous_and_shard_minus_1_is_shard_1():
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,))
        whole = torch.arange(30.0).view(5, 6)
        x = sw.distribute_tensor(whole, mesh, [Shard(1)])
        y = x.redistribute(placements=[Replicate()])
        assert y.is_contiguous()
        assert all(b.is_contiguous() and torch.equal(b, whole) for b in y.to_local().ranks)
        with counting() as ledger:
            assert x.redistribute(placements=[Shard(-1)]).placements == (Shard(1),)
        assert ledger.collectives == 0
