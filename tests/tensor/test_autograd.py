"""First and second gradients through blocks and layouts equal those of the dense program."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, coords, layouts, shapes
from tests.values import blocks_of, dense_tensor, parts, take, tensor, value, wide

import shardwise as sw
from shardwise import DTensor, LayoutError, Partial, PerRank, Replicate, Shard, plan_redistribute, simulate
from shardwise.comm import axes_of, counting, members_of
from shardwise.layout import Layout, block_shape, owned

SHAPE = (5, 3)
KINDS = (Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg"))
SQUARES = list(itertools.product(KINDS, repeat=2))


def names(placements):
    return ",".join(map(str, placements))


@pytest.fixture
def square():
    """A mesh of 2 x 2."""
    with simulate(4):
        yield sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def line():
    """A mesh of 3."""
    with simulate(3):
        yield sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))


def weights(shape=SHAPE, seed=11):
    return dense_tensor(shape, torch.float64, seed) + 0.5


def leaf(mesh, placements, shape=SHAPE, seed=5):
    """A leaf with these placements, and a dense leaf of the same value."""
    whole = dense_tensor(shape, torch.float64, seed)
    x = tensor(whole, Layout.of(shape, axes_of(mesh), placements), mesh, seed)
    return x.requires_grad_(), whole.clone().requires_grad_()


def leaf_blocks(mesh, layout, seed=5):
    """Blocks that require gradients, one for each rank, and the dense value that they represent."""
    whole = dense_tensor(layout.shape, torch.float64, seed)
    blocks = parts(whole, layout, seed)
    at = members_of(mesh)
    local = sw.per_rank(lambda rank: blocks[at[rank]].requires_grad_() if rank in at else whole.new_empty(0))
    return local, whole


def by_coord(local, mesh):
    return {c: local.of_rank(r) for r, c in members_of(mesh).items()}


def cubed(full, w):
    """A nonlinear loss, so that its gradient depends on the value."""
    return (full**3 * w).sum()


def check_grad(found, expected, mesh, layout):
    """Check the value of a gradient, and that it has the layout of its tensor without pending reductions."""
    assert found.sharding is layout.with_partial({})
    check_value(found, expected, mesh)


def check_value(found, expected, mesh):
    """Check the value of a gradient in any layout."""
    assert isinstance(found, DTensor)
    assert found.dtype is expected.dtype
    actual = value(blocks_of(found, mesh), found.sharding)
    torch.testing.assert_close(actual, wide(expected), rtol=1e-12, atol=1e-12)


# ---- redistribute and full_tensor


@pytest.mark.parametrize("source", SQUARES, ids=names)
def test_redistribute_between_all_placements(square, source):
    w = weights()
    for target in SQUARES:
        x, dense = leaf(square, source)
        cubed(x.redistribute(placements=target).full_tensor(), w).backward()
        cubed(dense, w).backward()
        check_grad(x.grad, dense.grad, square, x.sharding)


@given(st.data())
def test_redistribute_between_any_layouts(data):
    on, shape = data.draw(axes(max_count=8)), data.draw(shapes(max_dims=3, max_size=7))
    source, target = (data.draw(layouts(on, shape)) for _ in range(2))
    w = weights(shape)
    with simulate(on.count):
        mesh = sw.DeviceMesh("cpu", torch.arange(on.count).view(on.sizes), mesh_dim_names=on.names)
        whole = dense_tensor(shape, torch.float64, 3)
        x, dense = tensor(whole, source, mesh, 3).requires_grad_(), whole.requires_grad_()
        (x.redistribute(placements=target.placements).full_tensor() * w).sum().backward()
        (dense * w).sum().backward()
        check_grad(x.grad, dense.grad, mesh, source)


def test_the_backward_pass_sends_what_its_plan_states(square):
    for source, target in list(itertools.product(SQUARES, repeat=2))[::7] + list(
        zip(SQUARES, SQUARES, strict=True)
    ):
        x, _ = leaf(square, source)
        y = x.redistribute(placements=target)
        seed = tensor(weights(), y.sharding.with_partial({}), square)
        with counting() as ledger:
            y.backward(seed)
        plan = plan_redistribute(seed.sharding, x.grad.sharding, 8)
        assert (ledger.bytes, ledger.collectives) == (plan.bytes, plan.collectives)
        # gradients have no pending axes, so nothing is sent if the layout did not change
        if source == target:
            assert ledger.collectives == 0


def test_incoming_gradients_may_have_any_layout(square):
    w = weights()
    for source, seed in list(itertools.product(SQUARES, repeat=2))[::4]:
        x, _ = leaf(square, source)
        y = x.redistribute(placements=[Replicate(), Shard(0)])
        y.backward(tensor(w, Layout.of(SHAPE, y.sharding.axes, seed), square, seed=2))
        check_grad(x.grad, w, square, x.sharding)


def test_complex_gradients_are_not_conjugated(line):
    for source in (Replicate(), Shard(0), Partial(), Partial("avg")):
        whole = dense_tensor(SHAPE, torch.complex128, 6)
        w = dense_tensor(SHAPE, torch.complex128, 7)
        layout = Layout.of(SHAPE, axes_of(line), [source])
        x, dense = tensor(whole, layout, line, 6).requires_grad_(), whole.clone().requires_grad_()
        (x.redistribute(placements=[Shard(1)]).full_tensor() ** 2 * w).sum().abs().backward()
        (dense**2 * w).sum().abs().backward()
        check_grad(x.grad, dense.grad, line, layout)


@pytest.mark.parametrize("source", KINDS, ids=str)
def test_a_full_tensor_used_differently_on_each_rank(line, source):
    x, dense = leaf(line, [source])
    full = x.full_tensor(grad_placements=[Partial()])
    sw.per_rank(lambda rank, f: (f**2 * (rank + 1)).sum(), full).backward()
    (dense**2 * (1 + 2 + 3)).sum().backward()
    check_grad(x.grad, dense.grad, line, x.sharding)


def test_distribute_tensor_returns_a_leaf(square):
    whole = dense_tensor(SHAPE, torch.float64, 1).requires_grad_()
    for placements in SQUARES:
        x = sw.distribute_tensor(whole, square, placements)
        assert x.is_leaf
        assert x.requires_grad
        (x.full_tensor() * weights()).sum().backward()
        check_grad(x.grad, weights(), square, x.sharding)
    assert whole.grad is None


# ---- to_local


@pytest.mark.parametrize("source", SQUARES, ids=names)
def test_to_local_with_the_same_loss_on_all_ranks(square, source):
    x, _ = leaf(square, source)
    at, w = members_of(square), weights()
    mine = x.sharding.with_partial({})
    loss = sw.per_rank(lambda rank, b: (b * take(w, owned(mine, at[rank]))).sum(), x.to_local())
    loss.backward()
    # the gradient of a term is 1/n of that of the mean, so gradients of the blocks are n times larger for the mean
    n = math.prod(square.shape[a] for a, p in enumerate(source) if p == Partial("avg"))
    check_grad(x.grad, n * w, square, x.sharding)


@pytest.mark.parametrize(
    ("source", "grads"),
    [
        ((Replicate(), Replicate()), (Partial(), Replicate())),
        ((Replicate(), Replicate()), (Partial(), Partial())),
        ((Shard(0), Replicate()), (Shard(0), Partial())),
        ((Replicate(), Shard(1)), (Partial("avg"), Shard(1))),
        ((Partial(), Shard(0)), (Replicate(), Shard(0))),
        ((Partial(), Replicate()), (Partial(), Replicate())),
    ],
    ids=names,
)
def test_to_local_with_grad_placements(square, source, grads):
    x, _ = leaf(square, source)
    layout = Layout.of(SHAPE, axes_of(square), grads)
    seeds = parts(weights(), layout, seed=3)  # the gradients of the blocks
    local = x.to_local(grad_placements=grads)
    local.backward(PerRank({r: seeds[c] for r, c in members_of(square).items()}))
    assert x.grad.sharding is layout  # nothing is sent before it is needed
    check_value(x.grad, weights(), square)
    x.full_tensor().sum().backward()  # it can be accumulated
    check_value(x.grad, weights() + 1, square)


def test_r38_a_replicated_block_used_on_different_data(square):
    x, dense = leaf(square, [Replicate(), Replicate()])
    local = x.to_local(grad_placements=[Partial(), Partial()])
    sw.per_rank(lambda rank, b: (b**2 * (rank - 1)).sum(), local).backward()
    sum((dense**2 * (rank - 1)).sum() for rank in range(4)).backward()
    check_value(x.grad, dense.grad, square)


def test_only_some_ranks_use_their_block(line):
    x, _ = leaf(line, [Shard(0)])
    x.to_local().ranks[1].sum().backward()
    expected = torch.zeros(SHAPE, dtype=torch.float64)
    expected[2:4] = 1
    check_grad(x.grad, expected, line, x.sharding)


@pytest.mark.parametrize(
    ("source", "grads"), [(Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(1))], ids=str
)
def test_grad_placements_must_split_the_same_dims(line, source, grads):
    x, _ = leaf(line, [source])
    with pytest.raises(LayoutError, match=r"(?s)to_local of \[5.* got grad_placements.*the same dims.*fix: "):
        x.to_local(grad_placements=[grads])
    with pytest.raises(
        LayoutError, match=r"(?s)from_local of \[5.* got grad_placements.*the same dims.*fix: "
    ):
        DTensor.from_local(x.detach().to_local(), line, [source], shape=SHAPE, grad_placements=[grads])


# ---- from_local


def dense_grads(local, layout, mesh, loss):
    """The gradients of the blocks in a dense program that combines them; replicated blocks count once."""
    blocks = {c: b.detach().clone().requires_grad_() for c, b in by_coord(local, mesh).items()}
    on, pending = layout.axes, dict(layout.partial)
    free = [a for a in range(len(on)) if a not in layout.sharded and a not in pending]
    stack = []
    for at in itertools.product(*(range(on.sizes[a]) for a in pending)):
        whole = torch.zeros(layout.shape, dtype=torch.float64)
        for c, block in blocks.items():
            selected = all(c[a] == i for a, i in zip(pending, at, strict=True))
            if selected and all(c[a] == 0 for a in free) and block.numel():
                indices = [torch.tensor(list(i)) for i in owned(layout, c)]
                whole = whole.index_put(torch.meshgrid(*indices, indexing="ij"), block)
        stack.append(whole)
    op = next(iter(pending.values()), "sum")
    terms = torch.stack(stack)
    combined = terms.amax(0) if op == "max" else terms.amin(0) if op == "min" else terms.sum(0)
    n = math.prod(on.sizes[a] for a, op in pending.items() if op == "avg")
    loss(combined / n).backward()
    # every replica of a block has the gradient of the one that was used
    first = {c: tuple(0 if a in free else i for a, i in enumerate(c)) for c in blocks}
    zero = torch.zeros_like
    return {c: zero(blocks[c]) if blocks[first[c]].grad is None else blocks[first[c]].grad for c in blocks}


def check_block_grads(local, expected, mesh):
    for c, block in by_coord(local, mesh).items():
        assert block.grad is not None
        torch.testing.assert_close(block.grad, expected[c], rtol=1e-12, atol=1e-12)


SOURCES = [*SQUARES, *itertools.product((Replicate(), Shard(0), Partial("max")), repeat=2)]
SOURCES += [(Partial("min"), Shard(1)), (Replicate(), Partial("min")), (Partial("min"), Partial("min"))]


@pytest.mark.parametrize("source", dict.fromkeys(SOURCES), ids=names)
def test_from_local(square, source):
    layout = Layout.of(SHAPE, axes_of(square), source)
    for target in ((Replicate(), Replicate()), (Shard(1), Shard(0)), (Partial(), Shard(0)), source):
        local, _ = leaf_blocks(square, layout)
        x = DTensor.from_local(local, square, source, shape=SHAPE)
        cubed(x.redistribute(placements=target).full_tensor(), weights()).backward()
        expected = dense_grads(local, layout, square, lambda v: cubed(v, weights()))
        check_block_grads(local, expected, square)


@pytest.mark.parametrize("op", ["max", "min"])
def test_ties_share_the_gradient_of_a_pending_max_or_min(line, op):
    sign = 1 if op == "max" else -1
    rows = sign * torch.tensor([[3.0, 1.0, 2.0, 5.0], [3.0, 4.0, 2.0, -1.0], [0.0, 4.0, 2.0, -2.0]]).double()
    local = sw.per_rank(lambda rank: rows[rank].clone().requires_grad_())
    x = DTensor.from_local(local, line, [Partial(op)])
    (x.full_tensor() * torch.tensor([6.0, 60.0, 600.0, 6000.0])).sum().backward()
    grads = [[3, 0, 200, 6000], [3, 30, 200, 0], [0, 30, 200, 0]]
    assert [b.grad.tolist() for b in local.ranks] == grads


def test_the_gradient_of_a_pending_product_is_an_error(line):
    local = sw.per_rank(lambda rank: torch.ones(3).requires_grad_())
    x = DTensor.from_local(local, line, [Partial("product")])
    with pytest.raises(RuntimeError, match=r"(?s)depends on all the others.*fix: "):
        x.full_tensor().sum().backward()
    y = sw.distribute_tensor(torch.ones(3), line, [Partial("product")]).requires_grad_()
    with pytest.raises(RuntimeError, match=r"(?s)product of the others.*fix: Redistribute"):
        y.to_local().sum().backward()


@pytest.mark.parametrize(
    ("source", "grads"),
    [
        ((Replicate(), Replicate()), (Partial(), Replicate())),
        ((Replicate(), Shard(0)), (Partial("avg"), Shard(0))),
        ((Partial(), Shard(0)), (Replicate(), Shard(0))),
        ((Partial(), Partial()), (Partial(), Replicate())),
        ((Partial("product"), Replicate()), (Replicate(), Replicate())),
    ],
    ids=names,
)
def test_from_local_with_grad_placements(square, source, grads):
    local, _ = leaf_blocks(square, Layout.of(SHAPE, axes_of(square), source))
    x = DTensor.from_local(local, square, source, shape=SHAPE, grad_placements=grads)
    (x.full_tensor() * weights()).sum().backward()
    layout = Layout.of(SHAPE, axes_of(square), grads)
    found = {c: b.grad for c, b in by_coord(local, square).items()}
    torch.testing.assert_close(value(found, layout), weights())


def test_from_local_of_one_plain_tensor_for_all_ranks(line):
    block = torch.arange(6.0).view(2, 3).requires_grad_()
    x = DTensor.from_local(block, line, [Replicate()])
    (x.full_tensor() * 3).sum().backward()
    assert torch.equal(block.grad, torch.full((2, 3), 3.0))
    y = DTensor.from_local(block, line, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"(?s)differs between the simulated ranks.*fix: "):
        (y.full_tensor() * weights((6, 3))).sum().backward()


def test_from_local_shares_memory_with_strided_blocks(line):
    local = sw.per_rank(lambda rank: torch.randn(3, 2).double().t().requires_grad_())
    x = DTensor.from_local(local, line, [Shard(0)])
    assert x.stride() == (1, 6)
    assert all(b.data_ptr() == i.data_ptr() for b, i in zip(local.ranks, x.to_local().ranks, strict=True))
    (x.full_tensor().t() * weights((3, 6))).sum().backward()
    for rank, block in enumerate(local.ranks):
        assert torch.equal(block.grad, weights((3, 6)).t()[2 * rank : 2 * rank + 2])


# ---- strides of gradients


@pytest.mark.parametrize("source", SQUARES, ids=names)
def test_gradients_that_are_not_contiguous(square, source):
    x, dense = leaf(square, source)
    y = x.redistribute(placements=[Shard(1), Replicate()])
    for twin, t in ((True, y.full_tensor()), (False, dense)):
        # a transposed gradient, and one expanded from a scalar
        loss = (t.t() * weights((3, 5))).sum() + t[::2].sum() + t.sum()
        loss.backward(retain_graph=twin)
    check_grad(x.grad, dense.grad, square, x.sharding)
    assert all(b.is_contiguous() for b in x.grad.to_local().ranks)


def test_expanded_gradients_of_a_block_accumulate(line):
    x, _ = leaf(line, [Shard(0)])
    for times in (1, 2, 3):
        x.to_local().sum().backward()
        check_grad(x.grad, torch.full(SHAPE, float(times)).double(), line, x.sharding)


# ---- higher derivatives


@pytest.mark.parametrize("source", SQUARES, ids=names)
def test_r44_double_backward_through_redistribute(square, source):
    targets = [
        (Replicate(), Shard(0)),
        (Shard(1), Partial()),
        (Partial("avg"), Shard(0)),
        (Shard(0), Shard(0)),
    ]
    for target in targets:
        x, dense = leaf(square, source)
        full = x.redistribute(placements=target).full_tensor()
        (grad,) = torch.autograd.grad(cubed(full, weights()), x, create_graph=True)
        assert isinstance(grad, DTensor)
        cubed(grad.redistribute(placements=target).full_tensor(), weights(seed=4)).backward()
        (twin,) = torch.autograd.grad(cubed(dense, weights()), dense, create_graph=True)
        cubed(twin, weights(seed=4)).backward()
        check_grad(grad.detach(), twin.detach(), square, x.sharding)
        check_grad(x.grad, dense.grad, square, x.sharding)


@pytest.mark.parametrize("source", [*KINDS, Partial("max"), Partial("min")], ids=str)
def test_r44_double_backward_through_blocks(line, source):
    layout = Layout.of(SHAPE, axes_of(line), [source])
    local, _ = leaf_blocks(line, layout)
    x = DTensor.from_local(local, line, [source], shape=SHAPE)
    (grads,) = torch.autograd.grad(cubed(x.full_tensor(), weights()), local, create_graph=True)
    (grads**2).sum().backward()
    twins = dense_second_gradients(local, layout, line)
    check_block_grads(local, twins, line)


def dense_second_gradients(local, layout, mesh):
    """The second gradients of the blocks in a dense program in which each rank squares its first gradient."""
    blocks = [b.detach().clone().requires_grad_() for b in local.ranks]
    n, op = len(blocks), dict(layout.partial).get(0)
    match op:
        case None if layout.sharded:
            whole = torch.cat(blocks, dim=next(d for d, dim in enumerate(layout.dims) if dim[0].axes))
        case None:
            # all ranks run the same program on the same values
            whole = blocks[0]
        case "max":
            whole = torch.stack(blocks).amax(0)
        case "min":
            whole = torch.stack(blocks).amin(0)
        case _:
            whole = sum(blocks) / (n if op == "avg" else 1)
    same_everywhere = not layout.sharded and op not in ("max", "min")
    used = blocks[:1] if op is None and same_everywhere else blocks
    grads = torch.autograd.grad(cubed(whole, weights()), used, create_graph=True)
    # a gradient that is the same on all ranks counts once
    sum((g**2).sum() for g in (grads[:1] if same_everywhere else grads)).backward()
    seconds = [b.grad for b in used] * (n if len(used) == 1 else 1)
    return dict(zip(coords(layout.axes), seconds, strict=True))


def test_r44_double_backward_through_to_local(square):
    at = members_of(square)
    for source in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        x, _ = leaf(square, source)

        def loss(rank, block, mine=x.sharding):
            return (block**3 * take(weights(), owned(mine, at[rank]))).sum()

        (grad,) = torch.autograd.grad(sw.per_rank(loss, x.to_local()), x, create_graph=True)
        (grad.full_tensor() ** 2).sum().backward()
        dense = dense_tensor(SHAPE, torch.float64, 5).requires_grad_()
        (twin,) = torch.autograd.grad(cubed(dense, weights()), dense, create_graph=True)
        (twin**2).sum().backward()
        check_grad(grad.detach(), twin.detach(), square, x.sharding)
        check_grad(x.grad, dense.grad, square, x.sharding)


def test_third_derivatives(line):
    x, dense = leaf(line, [Partial()])
    full = x.redistribute(placements=[Shard(0)]).full_tensor()
    grad, twin = (full**4).sum(), (dense**4).sum()
    for _ in range(3):
        (grad,) = torch.autograd.grad(grad.sum() if isinstance(grad, PerRank) else grad, x, create_graph=True)
        grad = grad.full_tensor().sum()
        (twin,) = torch.autograd.grad(twin, dense, create_graph=True)
        twin = twin.sum()
    assert [g.item() for g in grad.ranks] == [twin.item()] * 3


# ---- leaves, hooks and graphs


def test_gradients_of_two_uses_are_summed(square):
    for source, one, other in itertools.product(SQUARES[::4], SQUARES[::3], SQUARES[1::4]):
        x, dense = leaf(square, source)
        full = [x.redistribute(placements=p).full_tensor() for p in (one, other)]
        (cubed(full[0], weights()) + cubed(full[1], weights(seed=2)) + full[0].sum()).backward()
        (cubed(dense, weights()) + cubed(dense, weights(seed=2)) + dense.sum()).backward()
        check_grad(x.grad, dense.grad, square, x.sharding)


def test_a_second_backward_adds_to_the_gradient(square):
    for source in SQUARES:
        x, _ = leaf(square, source)
        for times, target in enumerate([(Shard(0), Shard(0)), (Partial(), Shard(1)), (Replicate(),) * 2], 1):
            (x.redistribute(placements=target).full_tensor() * weights()).sum().backward()
            check_grad(x.grad, times * weights(), square, x.sharding)
        x.grad = None
        x.full_tensor().sum().backward()
        check_grad(x.grad, torch.ones(SHAPE).double(), square, x.sharding)


def test_parameters(square):
    x, _ = leaf(square, [Shard(0), Replicate()])
    p = torch.nn.Parameter(x.detach())
    assert isinstance(p, DTensor)
    assert isinstance(p, torch.nn.Parameter)
    assert p.is_leaf
    (p.redistribute(tp=Shard(1)).full_tensor() * weights()).sum().backward()
    check_grad(p.grad, weights(), square, p.sharding)
    q = torch.nn.Parameter(x.detach(), requires_grad=False)
    assert not q.redistribute(tp=Shard(1)).requires_grad


def test_hooks_receive_and_may_change_the_gradient(square):
    for source in SQUARES:
        x, _ = leaf(square, source)
        seen = []
        x.register_hook(lambda g, seen=seen: seen.append(g) or g * 2)
        accumulated = []
        x.register_post_accumulate_grad_hook(lambda t, accumulated=accumulated: accumulated.append(t.grad))
        y = x.redistribute(placements=[Shard(1), Replicate()])
        y.register_hook(lambda g, seen=seen: seen.append(g))
        y.retain_grad()
        (y.full_tensor() * weights()).sum().backward()
        assert len(seen) == 2
        for g in (*seen, y.grad):
            assert isinstance(g, DTensor)
            torch.testing.assert_close(value(blocks_of(g, square), g.sharding), weights())
        check_grad(x.grad, 2 * weights(), square, x.sharding)
        assert accumulated[0] is x.grad


def test_a_hook_on_a_block(line):
    x, _ = leaf(line, [Shard(0)])
    local = x.to_local()
    local.register_hook(lambda g: g * 3)
    local.sum().backward()
    check_grad(x.grad, torch.full(SHAPE, 3.0).double(), line, x.sharding)


def test_retained_graphs_and_gradients_of_selected_tensors(square):
    x, _ = leaf(square, [Shard(0), Partial()])
    y, _ = leaf(square, [Replicate(), Shard(1)], seed=8)
    z = x.redistribute(placements=[Shard(1), Replicate()])
    loss = (z.full_tensor() * weights() + y.full_tensor() ** 2).sum()
    first = torch.autograd.grad(loss, [x, y, z], retain_graph=True)
    again = torch.autograd.grad(loss, [z, x], retain_graph=True)
    for g, t in zip(first, (x, y, z), strict=True):
        assert g.sharding is t.sharding.with_partial({})
    assert torch.equal(first[0].full_tensor().ranks[0], again[1].full_tensor().ranks[0])
    assert x.grad is None
    loss.backward()
    check_grad(x.grad, weights(), square, x.sharding)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    unused, _ = leaf(square, [Shard(0), Shard(1)])
    x_again = x.full_tensor().sum()
    assert torch.autograd.grad(x_again, [unused], allow_unused=True) == (None,)


def test_no_grad_records_no_graph(square):
    x, _ = leaf(square, [Shard(0), Partial()])
    with torch.no_grad():
        y = x.redistribute(placements=[Shard(1), Replicate()])
        assert not y.requires_grad
        assert not y.full_tensor().ranks[0].requires_grad
    assert not x.detach().to_local().ranks[0].requires_grad
    assert x.to_local().ranks[0].requires_grad


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_pending_gradients_go_back_through_a_redistribution_of_pending_values_as_they_are(line, op):
    x = sw.distribute_tensor(torch.ones(6), line, [Partial(op)]).requires_grad_()
    y = x.redistribute(placements=[Partial(op)])
    grad = sw.distribute_tensor(torch.arange(6.0), line, [Partial(op)])
    with counting() as ledger:
        y.backward(grad)
    assert x.grad.placements == (Partial(op),)
    assert ledger.collectives == 0
    assert torch.equal(x.grad.full_tensor().ranks[0], torch.arange(6.0))
    x.grad = None
    x.redistribute(placements=[Replicate()]).backward(grad)  # a replicated value has a replicated gradient
    assert x.grad.placements == (Replicate(),)
    assert torch.equal(x.grad.full_tensor().ranks[0], torch.arange(6.0))


def test_async_results_have_gradients(square):
    for source, target in itertools.product(SQUARES, SQUARES[::3]):
        x, dense = leaf(square, source)
        y = x.redistribute(placements=target, async_op=True)
        cubed(y.full_tensor(), weights()).backward()
        cubed(dense, weights()).backward()
        check_grad(x.grad, dense.grad, square, x.sharding)


# ---- cases that are silently wrong in torch


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_r37_to_local_and_from_local_keep_gradients(square, op):
    source = [Partial(op), Shard(0)]
    x, dense = leaf(square, source)
    y = DTensor.from_local(x.to_local(), square, source, shape=SHAPE)
    cubed(y.full_tensor(), weights()).backward()
    cubed(dense, weights()).backward()
    check_value(x.grad, dense.grad, square)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_r37_from_local_and_to_local_keep_gradients(line, op):
    local, _ = leaf_blocks(line, Layout.of(SHAPE, axes_of(line), [Partial(op)]))
    out = DTensor.from_local(local, line, [Partial(op)], shape=SHAPE).to_local()
    sw.per_rank(lambda rank, b: (b * (rank + 1)).sum(), out).backward()
    assert [b.grad.unique().tolist() for b in local.ranks] == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize("source", SQUARES, ids=names)
def test_r41_a_pending_sum_plus_a_replicated_bias(square, source):
    for bias in ((Replicate(), Replicate()), (Shard(0), Replicate()), (Partial(), Partial())):
        x, dense_x = leaf(square, source)
        b, dense_b = leaf(square, bias, seed=8)
        cubed((x + b).full_tensor(), weights()).backward()
        cubed(dense_x + dense_b, weights()).backward()
        check_value(x.grad, dense_x.grad, square)
        check_value(b.grad, dense_b.grad, square)


def test_r41_a_bias_redistributed_to_partial(square):
    x, dense_x = leaf(square, [Partial(), Shard(0)])
    b, dense_b = leaf(square, [Replicate(), Shard(0)], seed=8)
    both = x + b.redistribute(dp=Partial())
    assert both.sharding is x.sharding  # nothing was reduced
    cubed(both.full_tensor(), weights()).backward()
    cubed(dense_x + dense_b, weights()).backward()
    check_value(x.grad, dense_x.grad, square)
    check_value(b.grad, dense_b.grad, square)


def test_r42_from_local_of_a_term_has_the_gradient_of_the_sum(line):
    local = sw.per_rank(lambda rank: torch.full((2,), float(rank)).requires_grad_())
    DTensor.from_local(local, line, [Partial()]).full_tensor().sum().backward()
    assert [b.grad.tolist() for b in local.ranks] == [[1.0, 1.0]] * 3


@pytest.mark.parametrize("source", [Replicate(), Shard(0), Partial()], ids=str)
@pytest.mark.parametrize("target", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_r43_gradients_are_sent_in_backward_dtype(line, source, target):
    whole = dense_tensor(SHAPE, torch.float32, 3)
    fine = torch.full(SHAPE, 1.0 + 2.0**-12)  # bfloat16 rounds this to 1
    for dtype, expected in ((torch.bfloat16, 1.0), (torch.float64, 1.0 + 2.0**-12), (None, 1.0 + 2.0**-12)):
        x = tensor(whole, Layout.of(SHAPE, axes_of(line), [source]), line).requires_grad_()
        y = x.redistribute(placements=[target], backward_dtype=dtype)
        assert y.dtype is torch.float32
        seed = tensor(fine, y.sharding.with_partial({}), line)
        with counting() as ledger:
            y.backward(seed)
        check_grad(x.grad, torch.full(SHAPE, expected), line, x.sharding)
        itemsize = (dtype or torch.float32).itemsize
        assert ledger.bytes == plan_redistribute(seed.sharding, x.grad.sharding, itemsize).bytes


def test_blocks_of_gradients_have_the_shapes_of_the_layout(square):
    for source in SQUARES:
        x, _ = leaf(square, source)
        x.full_tensor().sum().backward()
        for c, block in blocks_of(x.grad, square).items():
            assert tuple(block.shape) == block_shape(x.sharding, c)


def test_r44_double_backward_through_grad_placements(line):
    local, whole = leaf_blocks(line, Layout.of(SHAPE, axes_of(line), [Replicate()]))
    x = DTensor.from_local(local, line, [Replicate()], grad_placements=[Partial()])
    (grads,) = torch.autograd.grad(cubed(x.full_tensor(), weights()), local, create_graph=True)
    (grads * weights(seed=4)).sum().backward()
    found = {c: b.grad for c, b in by_coord(local, line).items()}
    # the first gradients are terms of a sum, and so are the second ones
    layout = Layout.of(SHAPE, axes_of(line), [Partial()])
    torch.testing.assert_close(value(found, layout), 6 * whole * weights() * weights(seed=4))
