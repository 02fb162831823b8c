"""Rules of users: in our notation and in torch's form, for custom ops and in place of our rules."""

import logging

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import Partial, Replicate, Shard, distribute_tensor, register_sharding
from shardwise.debug import CommDebugMode
from shardwise.plan.settings import forget_decisions
from shardwise.rules import RuleError, verify
from shardwise.rules.table import REGISTERED
from shardwise.rules.tables.pointwise import pointwise

aten = torch.ops.aten


@torch.library.custom_op("shardwise_test::scaled", mutates_args=())
def scaled(x: Tensor, by: Tensor, times: float) -> Tensor:
    return x * by[:, None] * times


scaled.register_fake(lambda x, by, times: torch.empty_like(x * by[:, None] * times))
scaled.register_autograd(
    lambda ctx, g: (scaled(g, ctx.saved_tensors[1], ctx.times), (g * ctx.saved_tensors[0]).sum(1) * ctx.times, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(*inputs[:2]),
        setattr(ctx, "times", inputs[2]),
    )[0],
)  # fmt: skip


@torch.library.custom_op("shardwise_test::centred", mutates_args=())
def centred(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(1)
    return x - mean[:, None], mean


centred.register_fake(lambda x: (torch.empty_like(x), x.new_empty(x.shape[0])))


@torch.library.custom_op("shardwise_test::centred_square", mutates_args=())
def centred_square(x: Tensor) -> Tensor:
    return x * x - 1


centred_square.register_fake(lambda x: x * x - 1)


@torch.library.custom_op("shardwise_test::add_into", mutates_args=("out",))
def add_into(out: Tensor, x: Tensor) -> None:
    out += x


@torch.library.custom_op("shardwise_test::product_into", mutates_args=("out",))
def product_into(out: Tensor, x: Tensor, y: Tensor) -> None:
    torch.mm(x, y, out=out)


@torch.library.custom_op("shardwise_test::push", mutates_args=("x",))
def push(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x * 10


push.register_fake(lambda x, y: torch.empty_like(x * 10))


@torch.library.custom_op("shardwise_test::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x * 2


# custom_op does not support keyword-only tensors, but the dispatcher does
torch.library.define("shardwise_test::keyed", "(Tensor x, *, Tensor y, float z=1.0) -> Tensor")
torch.library.define("shardwise_test::keyed_into", "(Tensor x, *, Tensor(a!) out) -> ()")


@torch.library.impl("shardwise_test::keyed", ("cpu", "meta"))
def _keyed(x, *, y, z=1.0):
    return x + y * z


@torch.library.impl("shardwise_test::keyed_into", ("cpu", "meta"))
def _keyed_into(x, *, out):
    out.add_(x)


keyed = torch.ops.shardwise_test.keyed.default
keyed_into = torch.ops.shardwise_test.keyed_into.default


@pytest.fixture(autouse=True)
def _as_before():
    before = dict(REGISTERED)
    REGISTERED.clear()
    yield
    REGISTERED.clear()
    REGISTERED.update(before)
    forget_decisions()


@pytest.fixture
def mesh():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def full(x):
    return x.full_tensor().ranks[0]


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def run(op, *args, **kwargs):
    """The result of an op, and the number of collectives."""
    with CommDebugMode() as comm:
        out = op(*args, **kwargs)
    return out, comm.get_total_counts()


# ---- our notation


def test_a_custom_op_runs_on_blocks_as_its_row_allows(mesh):
    register_sharding(scaled, "m n, m -> m n", linear=[[0], [1]])
    x, by = numbers(5, 3), numbers(5)
    a = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    b = distribute_tensor(by, mesh, [Shard(0), Replicate()]).requires_grad_()
    out, sent = run(scaled, a, b, 2.0)
    assert (str(out.sharding), sent) == ("[5:dp, 3:tp]", 0)
    torch.testing.assert_close(full(out), scaled(x, by, 2.0))
    x, by = x.requires_grad_(), by.requires_grad_()
    (out * out).sum().backward()
    (scaled(x, by, 2.0) ** 2).sum().backward()
    torch.testing.assert_close(full(a.grad), x.grad)
    torch.testing.assert_close(full(b.grad), by.grad)


def test_register_sharding_returns_the_row_and_numbers_are_passed_on(mesh):
    registered = register_sharding(scaled, "m n, m -> m n", linear=[[0], [1]])
    assert registered.text == "m n, m -> m n; linear in (0) and in (1)"
    x, by = numbers(4, 2), numbers(4)
    a, b = (distribute_tensor(t, mesh, [Replicate(), Shard(0)]) for t in (x, by))
    for times in (1.0, -3.0):
        torch.testing.assert_close(full(scaled(a, b, times)), scaled(x, by, times))


def test_a_row_object_can_be_registered(mesh):
    own = pointwise(linear=[[0]])
    assert register_sharding(centred_square, own) is own
    assert {"shardwise_test.centred_square.default": own} == REGISTERED
    x = distribute_tensor(numbers(5, 3), mesh, [Shard(0), Shard(1)])
    assert str(centred_square(x).sharding) == "[5:dp, 3:tp]"


def test_a_row_object_can_be_verified():
    register_sharding(centred_square, pointwise(linear=[[0]]))
    with pytest.raises(RuleError, match=r"P\(a,sum\)"):
        verify(centred_square)


def test_a_pending_sum_passes_where_the_row_is_linear(mesh):
    register_sharding(scaled, "m n, m -> m n", linear=[[0]])
    x, by = numbers(4, 2), numbers(4)
    a = distribute_tensor(x, mesh, [Partial(), Replicate()])
    out, sent = run(scaled, a, distribute_tensor(by, mesh), 3.0)
    assert (str(out.sharding), sent) == ("[4, 2] P(dp,sum)", 0)
    torch.testing.assert_close(full(out), scaled(x, by, 3.0))


def test_an_op_with_several_outputs(mesh):
    register_sharding(centred, "m !n -> m !n, m")
    x = numbers(5, 3)
    (out, mean), sent = run(centred, distribute_tensor(x, mesh, [Shard(0), Shard(1)]))
    assert (str(out.sharding), str(mean.sharding)) == ("[5:dp, 3]", "[5:dp]")
    assert sent == 1
    for got, want in zip((out, mean), centred(x), strict=True):
        torch.testing.assert_close(full(got), want)


def test_a_registered_rule_takes_precedence_also_after_the_op_has_run(mesh):
    x = distribute_tensor(numbers(4, 6), mesh, [Shard(0), Shard(1)])
    assert str((x + x).sharding) == "[4:dp, 6:tp]"
    register_sharding(aten.add.Tensor, "m !n, m !n -> m !n")
    out = x + x
    assert str(out.sharding) == "[4:dp, 6]"
    torch.testing.assert_close(full(out), numbers(4, 6) * 2)
    y = x.clone()
    y += x  # has the row of add; the target must keep its layout, so it takes the fallback
    torch.testing.assert_close(full(y), numbers(4, 6) * 2)


def test_overload_packets_and_lists_of_ops(mesh):
    register_sharding([aten.exp, aten.sin.default], "… !n -> … !n")
    assert {*REGISTERED} == {"aten.exp.default", "aten.sin.default"}
    x = distribute_tensor(numbers(4, 6), mesh, [Shard(1), Shard(0)])
    assert [str(f(x).sharding) for f in (torch.exp, torch.sin)] == ["[4:tp, 6]"] * 2


def test_a_letter_with_two_sizes_is_an_error(mesh):
    register_sharding(centred, "m n -> m n, n")
    with pytest.raises(sw.LayoutError, match="n is a dim of size 5 and one of size 3"):
        centred(distribute_tensor(numbers(5, 3), mesh, [Shard(0), Replicate()]))


# ---- torch's form


def softmax_placements(x, dim, half_to_float):
    dim = dim if dim >= 0 else dim + x.ndim
    candidates = [([Replicate()], [Replicate(), None, None])]
    candidates += [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim) if d != dim]
    return candidates


def test_placements_listed_for_one_axis_are_combined_for_all(mesh):
    assert register_sharding(aten._softmax.default)(softmax_placements) is softmax_placements
    x = numbers(5, 3, 4)
    out, sent = run(torch.softmax, distribute_tensor(x, mesh, [Shard(0), Shard(1)]), 2)
    assert (str(out.sharding), sent) == ("[5:dp, 3:tp, 4]", 0)
    torch.testing.assert_close(full(out), x.softmax(2))
    out, sent = run(torch.softmax, distribute_tensor(x, mesh, [Shard(0), Shard(1)]), 1)
    assert (str(out.sharding.dims[0]), sent) == (
        str(distribute_tensor(x, mesh, [Shard(0)] * 2).sharding.dims[0]),
        1,
    )
    torch.testing.assert_close(full(out), x.softmax(1))


def test_the_cheapest_candidate_is_taken(mesh):
    @register_sharding(aten.mm.default)
    def _(x, y):
        assert (x.ndim, y.shape[1], x.dtype, x.device_mesh) == (2, 4, torch.float64, mesh)
        return [
            ([Replicate()], [Replicate(), Replicate()]),
            ([Shard(0)], [Shard(0), Replicate()]),
            ([Shard(1)], [Replicate(), Shard(-1)]),
            ([Partial()], [Shard(1), Shard(0)]),
        ]

    x, y = numbers(64, 6), numbers(6, 4)
    for placements, layout, cost in (
        (([Shard(0), Replicate()], [Replicate(), Shard(1)]), "[64:dp, 4:tp]", 0),
        (([Shard(0), Shard(1)], [Replicate(), Shard(0)]), "[64:dp, 4] P(tp,sum)", 0),
        (([Shard(0), Shard(0)], [Replicate(), Shard(1)]), "[64:dp,tp, 4]", 1),  # the smaller operand moves
    ):
        a, b = distribute_tensor(x, mesh, placements[0]), distribute_tensor(y, mesh, placements[1])
        out, sent = run(torch.mm, a, b)
        assert (str(out.sharding), sent) == (layout, cost)
        torch.testing.assert_close(full(out), x @ y)


def test_listed_placements_do_not_split_a_dim_smaller_than_the_mesh(mesh):
    register_sharding(aten._softmax.default)(softmax_placements)
    x = numbers(1, 4)
    out = distribute_tensor(x, mesh, [Shard(0), Replicate()]).softmax(1)
    assert str(out.sharding) == "[1, 4]"
    torch.testing.assert_close(full(out), x.softmax(1))


def test_four_axes():
    register_sharding(aten._softmax.default)(softmax_placements)
    with sw.simulate(16):
        mesh = sw.init_device_mesh("cpu", (2, 2, 2, 2))
        x = numbers(4, 4, 4, 4, 4)
        out = distribute_tensor(x, mesh, [Shard(d) for d in range(4)]).softmax(4)
        assert out.placements == tuple(Shard(d) for d in range(4))


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ([([Replicate()], [Replicate(), Replicate()])], "The call has 1 tensors there"),
        ([([Replicate()] * 2, [Replicate()])], "The call has 1 tensors there"),
        ([([Shard(0)], ["S(0)"])], "is not a placement of shardwise"),
        ([([Shard(2)], [Shard(0)])], r"That tensor has shape \(4, 6\)"),
        ([[Shard(0), Shard(0)]], "A candidate is a pair"),
        ([Shard(0)], "A candidate is a pair"),
    ],
)
def test_invalid_candidates_are_errors(listed, why, mesh):
    register_sharding(aten.exp.default)(lambda x: listed)
    with pytest.raises(sw.LayoutError, match=why):
        distribute_tensor(numbers(4, 6), mesh, [Shard(0), Replicate()]).exp()


def test_registering_something_else_than_an_op_is_an_error():
    with pytest.raises(sw.LayoutError, match="is not an op"):
        register_sharding(torch.add)
    with pytest.raises(sw.LayoutError, match="has no ->"):
        register_sharding(aten.exp.default, "m n")


def test_an_op_that_is_decomposed_first_is_logged(caplog):
    register_sharding(aten.linear.default, "… k, n k, n -> … n")
    assert "is decomposed into other ops before a DTensor sees it" in caplog.text


# ---- ops that write, and keyword-only tensors


@pytest.mark.parametrize("registered", [True, False])
def test_keyword_only_tensors(registered, mesh):
    if registered:
        register_sharding(keyed, "… n, … n -> … n", linear=[[0, 1]])
    x, y = numbers(5, 3), numbers(5, 3).sin()
    a = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    out, sent = run(keyed, a, y=distribute_tensor(y, mesh, [Shard(0), Replicate()]), z=-2.0)
    torch.testing.assert_close(full(out), keyed(x, y=y, z=-2.0))
    assert (str(out.sharding), sent) == (("[5:dp, 3]", 0) if registered else ("[5, 3]", 2))


@pytest.mark.parametrize("form", ["ours", "torch's", None])
@pytest.mark.parametrize("placements", [[Shard(0), Replicate()], [Shard(1), Shard(0)], [Partial(), Shard(0)]])
def test_an_op_that_only_writes(form, placements, mesh):
    if form == "ours":
        register_sharding(add_into, "… n, … n ->")
    elif form is not None:
        register_sharding(add_into)(
            lambda out, x: [([], [Replicate()] * 2), *(([], [Shard(d)] * 2) for d in range(x.ndim))]
        )
    x, y = numbers(5, 3), numbers(5, 3).sin()
    a = distribute_tensor(x, mesh, placements)
    b = distribute_tensor(y, mesh, [Shard(0), Replicate()])
    before, local = a.sharding, a._local_tensor
    result, sent = run(add_into, a, b)
    assert result is None
    assert a.sharding is before
    assert a._local_tensor is local
    if placements == [Shard(0), Replicate()]:
        assert sent == (2 if form is None else 0)
    torch.testing.assert_close(full(a), x + y)


@pytest.mark.parametrize("registered", [True, False])
def test_a_target_never_becomes_pending(registered, mesh):
    if registered:
        register_sharding(product_into, "m n, m k, k n ->")
    x, y = numbers(4, 6), numbers(6, 2)
    for placements in (
        [Replicate()] * 2,
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Replicate(), Partial()],
    ):
        out = distribute_tensor(torch.zeros(4, 2, dtype=torch.float64), mesh, placements)
        a, b = (
            distribute_tensor(x, mesh, [Shard(1), Shard(0)]),
            distribute_tensor(y, mesh, [Shard(0), Shard(1)]),
        )
        assert product_into(out, a, b) is None
        torch.testing.assert_close(full(out), x @ y)


@pytest.mark.parametrize("registered", [True, False])
def test_an_op_that_writes_and_returns_another_tensor(registered, mesh):
    if registered:
        register_sharding(push, "… n, … n -> … n")
    x, y = numbers(5, 3), numbers(5, 3).sin()
    a = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    out = push(a, distribute_tensor(y, mesh, [Shard(0), Shard(1)]))
    torch.testing.assert_close(full(a), x + y)
    torch.testing.assert_close(full(out), (x + y) * 10)
    assert str(out.sharding) == ("[5:dp, 3:tp]" if registered else "[5, 3]")


@pytest.mark.parametrize("registered", [True, False])
def test_an_op_that_writes_to_a_keyword_argument(registered, mesh):
    if registered:
        register_sharding(keyed_into, "… n, … n ->")
    x, y = numbers(5, 3), numbers(5, 3).sin()
    out = distribute_tensor(y, mesh, [Shard(0), Replicate()])
    assert keyed_into(distribute_tensor(x, mesh, [Replicate(), Shard(1)]), out=out) is None
    torch.testing.assert_close(full(out), x + y)
    assert str(out.sharding) == "[5:dp, 3]"


def test_a_rule_without_a_fake_is_not_used_which_is_logged_once(mesh, caplog):
    caplog.set_level(logging.WARNING, logger="shardwise")
    register_sharding(unknown, "… n -> … n")
    x = distribute_tensor(numbers(5, 3), mesh, [Shard(0), Replicate()])
    for _ in range(2):
        torch.testing.assert_close(full(unknown(x)), numbers(5, 3) * 2)
    assert caplog.text.count("has a registered rule, but it runs on the gathered tensors") == 1
    assert "torch.library.register_fake" in caplog.text
    assert str(unknown(x).sharding) == "[5, 3]"


# ---- verification


def test_rules_of_users_can_be_verified():
    register_sharding(scaled, "m n, m -> m n", linear=[[0], [1]])
    register_sharding(centred, "m !n -> m !n, m", linear=[[0]])
    register_sharding(add_into, "m n, m n ->", linear=[[0, 1]])
    register_sharding(product_into, "m n, m k, k n ->", linear=[[0, 1], [0, 2]])
    register_sharding(push, "… n, … n -> … n", linear=[[0, 1]])
    register_sharding(keyed, "… n, … n -> … n", linear=[[0, 1]])
    register_sharding(aten._softmax.default)(softmax_placements)
    for op in (scaled, centred, add_into, product_into, push, keyed):
        assert verify(op).candidates > 30
    calls = [((numbers(*shape), dim, False), {}) for shape in ((5, 4), (3, 2, 4), (2, 3)) for dim in (0, -1)]
    assert verify(aten._softmax.default, calls).candidates > 30
    assert verify(scaled).gradients > 20


def test_wrong_rules_of_users_are_detected():
    wrong = [
        (scaled, "m n, m -> m n", [[0, 1]]),
        (centred, "m n -> m n, m", []),
        (add_into, "m n, m n ->", [[0]]),
        (product_into, "m n, m k, k n ->", [[0]]),
        (push, "… n, … n -> … n", [[0], [1]]),
        (keyed, "… n, … n -> … n", [[0]]),
    ]
    for op, text, linear in wrong:
        register_sharding(op, text, linear=linear)
        with pytest.raises(sw.LayoutError, match=r"does not agree with its row|does not fit"):
            verify(op)
    register_sharding(aten._softmax.default)(lambda x, dim, _: [([Shard(0)], [Shard(0)])] if x.ndim else [])
    with pytest.raises(RuleError, match="does not agree with its row, 'listed by"):
        verify(aten._softmax.default, [((numbers(4, 3), 0, False), {})])


def test_a_wrong_fake_is_detected():
    with torch.library._scoped_library("shardwise_test", "FRAGMENT") as lib:
        lib.define("halved(Tensor x) -> Tensor")
        lib.impl("halved", lambda x: x / 2, "CPU")
        lib.impl("halved", torch.empty_like, "Meta")
        op = torch.ops.shardwise_test.halved.default
        register_sharding(op, "… n -> … n", linear=[[0]])
        assert verify(op, [((numbers(4, 3),), {})]).candidates
        with pytest.raises(RuleError, match="and its fake kernel"):
            verify(op, [((torch.arange(4),), {})])


def test_a_rule_without_a_fake_cannot_be_verified():
    register_sharding(unknown, "… n -> … n")
    with pytest.raises(RuleError, match="a custom op needs register_fake"):
        verify(unknown)


# ---- real processes


def registered_ops(form):
    """Run custom ops with rules on this rank: their full results, a layout, and the number of collectives."""
    try:
        if form == "ours":
            register_sharding(scaled, "m n, m -> m n", linear=[[0], [1]])
            register_sharding(add_into, "m n, m n ->")
        else:
            register_sharding(scaled)(
                lambda x, by, t: [([Shard(0)], [Shard(0)] * 2), ([Replicate()], [Replicate()] * 2)]
            )
            register_sharding(add_into)(
                lambda o, x: [([], [Shard(0)] * 2), ([], [Shard(1)] * 2), ([], [Replicate()] * 2)]
            )
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(numbers(5, 3), mesh, [Shard(0), Replicate()])
        by = distribute_tensor(numbers(5), mesh, [Shard(0), Replicate()])
        out, sent = run(scaled, x, by, 2.0)
        none, more = run(add_into, x, out)
        return out.full_tensor(), x.full_tensor(), str(out.sharding), none, sent + more
    finally:
        REGISTERED.clear()


@pytest.mark.processes
@pytest.mark.parametrize("form", ["ours", "torch's"])
def test_rules_of_users_on_real_processes(workers, form):
    want = scaled(numbers(5, 3), numbers(5), 2.0)
    for out, x, layout, none, sent in workers.run(registered_ops, form):
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(x, numbers(5, 3) + want)
        assert (layout, none, sent) == ("[5:dp, 3]", None, 0)
