"""One test for each bug of other implementations that gave a silently wrong result, by its number in our list."""

import copy
import io
import itertools

import pytest
import torch
from tests.values import same_bits, tensor
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from shardwise import DTensor, LayoutError, Partial, PerRank, Replicate, Shard, simulate
from shardwise.comm import axes_of, counting, members_of
from shardwise.experimental import local_map
from shardwise.layout import block_offset, block_shape, parse_layout
from shardwise.parallel import loss_parallel
from shardwise.plan.settings import current_settings


def cases(names, values):
    return pytest.mark.parametrize(names, list(values))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads slow down ops on tensors this small, a hundredfold on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def line():
    """A mesh of 3."""
    with simulate(3):
        yield sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))


@pytest.fixture
def square():
    """A mesh of 2 x 2."""
    with simulate(4):
        yield sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def layout_of(mesh, text):
    """The layout with this text."""
    return parse_layout(text, axes_of(mesh))[0]


def numbers(shape, seed=0, dtype=torch.float64):
    """A dense tensor of distinct values of both signs."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def distributed(mesh, text, whole=None, seed=0):
    """A DTensor in this layout, of a given value or a random one; partial values differ in value and sign."""
    layout = layout_of(mesh, text)
    whole = numbers(layout.shape, seed) if whole is None else whole
    return tensor(whole, layout, mesh, seed)


def same(got, expected):
    """Assert that a result is, on each rank, that of the same program on one device."""
    if isinstance(expected, Tensor):
        assert isinstance(got, DTensor)
        assert got.shape == expected.shape
        for block in got.full_tensor().ranks:
            torch.testing.assert_close(block.detach(), expected.detach())
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            same(g, e)
    else:
        assert got == pytest.approx(expected, nan_ok=True)


def tensors_in(value):
    return [value] if isinstance(value, Tensor) else [t for v in value for t in tensors_in(v)]


def moved(x, placements):
    """A DTensor redistributed; anything else as it is."""
    return x.redistribute(placements=placements) if isinstance(x, DTensor) else x


def check(mesh, program, *inputs, grads=True):
    """Assert that a program gives the results and, with `grads`, the gradients of one device.

    An input is the text of a layout, or a pair of a dense tensor and such a text. With `grads`, there must be a
    floating-point input and a result that depends on it.
    """
    pairs = [
        (numbers(layout_of(mesh, i).shape, n), i) if isinstance(i, str) else i for n, i in enumerate(inputs)
    ]
    dense = [w.clone() for w, _ in pairs]
    ours = [distributed(mesh, text, w, seed) for seed, (w, text) in enumerate(pairs)]
    leaves = [(x, d) for x, d in zip(ours, dense, strict=True) if grads and d.is_floating_point()]
    for x, d in leaves:
        x.requires_grad_()
        d.requires_grad_()
    expected, got = program(*dense), program(*ours)
    same(got, expected)
    if not grads:
        return
    assert [t.requires_grad for t in tensors_in(got)] == [t.requires_grad for t in tensors_in(expected)]
    for results in (expected, got):
        differentiable = [t for t in tensors_in(results) if t.requires_grad]
        assert differentiable, "no result has a gradient: pass grads=False"
        weights = [numbers(t.shape, 100 + n, t.dtype) for n, t in enumerate(differentiable)]
        if results is got:
            weights = [sw.distribute_tensor(w, mesh) for w in weights]
        sum((t * w).sum() for t, w in zip(differentiable, weights, strict=True)).backward()
    assert any(d.grad is not None for _, d in leaves)
    for x, d in leaves:
        assert (x.grad is None) == (d.grad is None)
        if d.grad is not None:
            same(x.grad, d.grad)


PENDING = ["[5, 3] P(dp,sum)", "[5, 3] P(dp,sum) P(tp,sum)", "[5:tp, 3] P(dp,sum)", "[5, 3:dp] P(tp,avg)"]
EXTREMES = ["[5, 3] P(dp,max)", "[5:tp, 3] P(dp,min)", "[5, 3] P(dp,max) P(tp,max)"]
SPLIT = ["[5:dp, 3]", "[5, 3:tp]", "[5:dp, 3:tp]", "[5:dp,tp, 3]", "[5:tp,dp, 3]", "[5, 3]"]


# Partial


@cases("layout", [*PENDING, *EXTREMES])
@cases(
    "program",
    [
        lambda x: x + 10,
        lambda x: 10 + x,
        lambda x: 5 - x,
        lambda x: x - torch.tensor(3.0),
        lambda x: torch.add(x, 10, alpha=2),
        lambda x: torch.rsub(x, 2),
        lambda x: (x * 1).add_(10),
        lambda x: torch.where(x > 0, x, 10.0),
        lambda x: x.lerp(x * 2, 0.3) + 1,
        lambda x: torch.addcmul(x, x, x, value=2),
    ],
)
def test_r01_a_number_added_to_a_pending_sum(square, program, layout):
    check(square, program, layout, grads="max" not in layout and "min" not in layout)


@cases("layout", [*SPLIT, *PENDING])
def test_r02_scalars_in_a_loop(square, layout):
    check(square, lambda x: [x.mean() * i for i in range(1, 5)], layout)
    check(square, lambda x: [x.mean() * float(i) + i for i in range(4)], layout)
    check(square, lambda x: [x.pow(i).sum() for i in (1, 2, 3)], layout)


@cases("layout", [*SPLIT, *PENDING])
def test_r03_a_norm_plus_a_number(square, layout):
    check(square, lambda x: [x.norm() + 2, x.norm() + torch.tensor(2.0), x.norm() + torch.tensor(2)], layout)
    check(square, lambda x: [2 + x.norm(dim=0), x.norm(dim=1) - torch.tensor(2.0)], layout)


@cases("layout", [*PENDING, *SPLIT])
@cases("order", [0, 1, 2, 3, float("inf")])
def test_r04_norms(square, layout, order):
    check(square, lambda x: torch.linalg.vector_norm(x, order), layout, grads=order in (1, 2, 3))
    check(square, lambda x: torch.linalg.vector_norm(x, order, dim=0, keepdim=True), layout, grads=False)
    others = [layout, "[4] P(tp,sum)", "[3:dp, 2]"]
    check(square, lambda *xs: torch._foreach_norm(list(xs), order), *others, grads=False)


@cases("layout", [*PENDING, *EXTREMES])
def test_r05_max_and_min_of_a_pending_sum(square, layout):
    grads = "max" not in layout and "min" not in layout
    check(square, lambda x: [x.max(), x.min(), x.amax(0), x.amin(1), x.aminmax()], layout, grads=grads)
    check(
        square, lambda x: [*x.max(0), *x.min(1, keepdim=True), x.argmax(0), x.argmin()], layout, grads=False
    )
    check(square, lambda x: [torch.maximum(x, x * 2), x.cummax(0)[0], x.median()], layout, grads=grads)


@cases("layout", [*SPLIT, *PENDING])
@cases("order", [1, 2, float("inf")])
def test_r06_ops_on_a_norm_of_partial_values(square, layout, order):
    def program(x):
        n = torch.linalg.vector_norm(x, order)
        m = torch.linalg.vector_norm(x, order, dim=0)
        return [n.sum(), m.sum(), n + 1, m + 1, n * -2, m / -3, m.mul(-1).max(), -n, m.clone().mul_(-2)]

    check(square, program, layout, grads=order != float("inf"))


@cases("layout", [*EXTREMES, *SPLIT])
def test_r06_ops_on_a_pending_max_or_min(square, layout):
    def program(x):
        m = x.amax(0)
        return [m.sum(), m + 1, m * -2, m / -3, -m, m.min(), m * m, m.neg().amax(), x * -2, x.div(-3), x * 0]

    check(square, program, layout, grads="P" not in layout)


@cases("target", [*PENDING, *EXTREMES, *SPLIT])
@cases("source", ["[5, 3] P(dp,sum)", "[5, 3] P(tp,max)", "[3] P(dp,sum)"])
def test_r07_copying_between_pending_tensors(square, target, source):
    def program(x, y):
        return [x.copy_(y), x]

    check(square, program, target, source, grads=False)
    if "max" not in target + source and "min" not in target + source:
        check(square, lambda x, y: (x * 2).copy_(y) * x, target, source)


@cases("a", ["[2, 5:tp, 3]", "[2:dp, 5, 3:tp]", "[2, 5, 3] P(dp,sum)", "[2, 5:dp, 3] P(tp,sum)"])
@cases("b", ["[2, 3:tp, 4]", "[2:dp, 3, 4:tp]", "[2, 3, 4] P(dp,sum)", "[2, 3, 4]"])
def test_r07_einsum_and_its_gradients(square, a, b):
    check(square, lambda x, y: torch.einsum("bij,bjk->bik", x, y), a, b)
    check(square, lambda x, y: torch.einsum("bij,bjk->k", x, y), a, b)
    check(square, lambda x, y: torch.einsum("bij,cjk->ick", x, y), a, b)


@cases("layout", [*PENDING, *EXTREMES, *SPLIT])
def test_r08_clamp_in_place(square, layout):
    def program(x):
        y = x.clone()
        return [y.clamp_(max=0.5), y, x.clone().clamp_(min=-0.2), x.clamp(-0.1, 0.3), x.clone().relu_()]

    check(square, program, layout, grads="max" not in layout and "min" not in layout)


@cases(
    "a,b",
    itertools.permutations([Partial("sum"), Partial("avg"), Partial("max"), Partial("min"), Replicate()], 2),
)
def test_r09_from_one_pending_reduction_to_another(line, a, b):
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0]), torch.tensor([-7.0, 4.0])]
    parts = parts if a.is_partial() else parts[:1] * 3
    x = DTensor.from_local(sw.per_rank(lambda rank: parts[rank].clone()), line, [a])
    y = x.redistribute(placements=[b])
    assert y.placements == (b,)
    same(y, x.full_tensor().ranks[0])
    value = {"sum": sum(parts), "avg": sum(parts) / 3, "max": torch.stack(parts).amax(0)}
    if isinstance(a, Partial) and a.reduce_op in value:  # independent of full_tensor, which redistributes
        same(y, value[a.reduce_op])


@cases("layout", [*PENDING, *EXTREMES, *SPLIT])
@cases("edges", ["[3]", "[3:dp]", "[3] P(tp,sum)"])
def test_r10_bucketize(square, layout, edges):
    inputs = [
        (numbers(layout_of(square, layout).shape), layout),
        (torch.tensor([-1.0, 0.1, 0.8]).double(), edges),
    ]
    check(
        square, lambda x, e: [torch.bucketize(x, e), torch.bucketize(x, e, right=True)], *inputs, grads=False
    )
    check(square, lambda x, e: torch.searchsorted(e, x), *inputs, grads=False)


@cases("a,b", itertools.product(["sum", "avg", "max", "min", "product"], repeat=2))
def test_r10_two_reductions_in_one_op(square, a, b):
    inputs = [f"[5, 3] P(dp,{a})", f"[5, 3] P(dp,{b})"]
    on_another_axis = [f"[5, 3] P(dp,{a})", f"[5, 3] P(tp,{b})"]
    for pair in (inputs, on_another_axis):
        check(square, lambda x, y: [x + y, x - y, x * y, torch.maximum(x, y)], *pair, grads=False)
        check(
            square, lambda x, y: [torch.where(x > y, x, y), torch.cat([x, y]), x @ y.t()], *pair, grads=False
        )


@cases("op", ["max", "min", "sum"])
@cases("edge,value", [(0.5, 10.0), (0.5, 0.5), (0.5, -3.0), (-0.3, 0.0), (-0.3, -10.0)])
def test_r11_threshold_is_monotone_only_for_some_arguments(square, op, edge, value):
    for layout in (f"[5, 3] P(dp,{op})", f"[5:tp, 3] P(dp,{op})"):
        check(square, lambda x: F.threshold(x, edge, value), layout, grads=op == "sum")
        check(square, lambda x: F.threshold_(x.clone(), edge, value), layout, grads=False)


# Reductions and losses


@cases("layout", [*SPLIT, *PENDING])
def test_r12_indices_of_max_and_min(square, layout):
    check(square, lambda x: [*x.max(0), *x.min(1), *x.max(1, keepdim=True)], layout)
    check(
        square,
        lambda x: [x.argmax(0), x.argmin(1), x.argmax(), x.argmin(), x.argmax(0, keepdim=True)],
        layout,
        grads=False,
    )
    check(
        square, lambda x: [*x.topk(2, 0), *x.sort(0), x.argsort(1), *x.median(0), *x.kthvalue(2, 1)], layout
    )


@cases("shape", [(3, 4), (1, 4), (5, 1), (2, 2)])
@cases("form", ["[{}:dp, {}]", "[{}, {}:tp]", "[{}:dp, {}:tp]", "[{}:dp,tp, {}]", "[{}, {}] P(dp,sum)"])
def test_r13_means_over_uneven_blocks(square, shape, form):
    layout = form.format(*shape)
    check(square, lambda x: [x.mean(), x.mean(0), x.mean(1, keepdim=True), x.mean((0, 1))], layout)
    check(
        square,
        lambda x: [x.var(0, correction=0), x.std(correction=0), *torch.var_mean(x, 1, correction=0)],
        layout,
        grads=False,
    )
    check(square, lambda x: F.mse_loss(x, x * 3), layout)


@cases("scores", ["[5:dp,tp, 4]", "[5:dp, 4:tp]", "[5, 4] P(dp,sum)"])
@cases("weight", ["[4]", "[4:tp]"])
@cases("how", ["mean", "sum", "none"])
def test_r14_class_weights(square, scores, weight, how):
    labels = torch.tensor([0, 3, 1, 3, 2])
    given = [scores, (numbers((4,), 7).abs() + 0.1, weight)]
    for where in ("[5:dp]", "[5]"):

        def loss(x, w, y):
            return [
                F.nll_loss(x.log_softmax(1), y, w.detach(), reduction=how),
                F.nll_loss(x, y, w.detach(), ignore_index=3, reduction=how),
                F.cross_entropy(x, y, w.detach(), reduction=how, label_smoothing=0.1),
            ]

        check(square, loss, *given, (labels, where))


@cases("layout", ["[4, 7:tp]", "[4:dp, 7:tp]", "[4, 7:dp,tp]", "[4, 7]"])
def test_r15_a_log_softmax_that_feeds_no_cross_entropy(square, layout):
    target = torch.tensor([1, 6, 0, 3])

    def program(x):
        there = sw.distribute_tensor(target, square) if isinstance(x, DTensor) else target
        with loss_parallel():
            scores = x.log_softmax(-1)
            return [scores * scores, F.cross_entropy(x, there), F.nll_loss(scores, there, reduction="sum")]

    check(square, program, layout)


# Views


@cases("shape", [(16, 6), (6, 16), (96,), (2, 6, 8), (12, 2, 4), (3, 4, 8), (24, 4), (12, 4, 2)])
@cases("layout", ["[12, 8:tp]", "[12:tp, 8]", "[12, 8] P(tp,sum)", "[12, 8]"])
def test_r16_views_that_split_blocks(shape, layout):
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        check(mesh, lambda x: x.view(shape), layout)
        check(mesh, lambda x: x.t().reshape(shape), layout)


@cases("layout", ["[24:dp,tp]", "[24:tp,dp]", "[24:dp]", "[24] P(dp,sum)"])
@cases("sizes", [(4, 6), (2, 12), (3, 8), (6, 4), (8, 3), (2, 2, 6), (1, 24)])
def test_r17_unflatten_with_two_axes_on_a_dim(square, layout, sizes):
    check(square, lambda x: x.unflatten(0, sizes), layout)
    check(square, lambda x: (x.unflatten(0, sizes) * 2).flatten() * x, layout)


@cases(
    "layout", ["[5:dp,tp, 1, 3]", "[2:dp, 1, 3:tp]", "[2:dp, 1:tp, 1]", "[4:dp,tp, 1, 1]", "[1:dp, 2:tp, 1] "]
)
def test_r18_squeeze_removes_dims_whose_global_size_is_1(square, layout):
    check(
        square,
        lambda x: [x.squeeze(), x.squeeze(0), x.squeeze(1), x.squeeze((0, -1)), x.unsqueeze(1)],
        layout,
    )
    check(square, lambda x: [x.clone().squeeze_(), x.clone().squeeze_(0), x.clone().squeeze_(1)], layout)


@cases("layout", ["[4:dp]", "[5:tp,dp]", "[3] P(dp,sum)", "[2:dp, 3]", "[3:dp, 2:tp]", "[]"])
def test_r19_transposes_of_few_dims(square, layout):
    check(square, lambda x: [x.t(), x.t() * 2, x.clone().t_()], layout)


WRITTEN = {
    "[:2]": lambda x: x[:2],
    "[0]": lambda x: x[0],
    "[-1, 1:]": lambda x: x[-1, 1:],
    "[:, 1:3]": lambda x: x[:, 1:3],
    "[1::2]": lambda x: x[1::2],
    "view": lambda x: x.view(4, 5)[1:3, 2],
    "view(-1)": lambda x: x.view(-1)[3:11],
    "t": lambda x: x.t()[:2],
    "t.t": lambda x: x.t()[:3].t()[1:],
    "split": lambda x: x.split(2)[1],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "unbind": lambda x: x.unbind(1)[1][2:],
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 2, 2)[1],
    "narrow": lambda x: x.narrow(0, 1, 3).select(1, 0),
    "as_strided": lambda x: x.as_strided((2, 3), (4, 1)),
    "t.as_strided": lambda x: x.t().as_strided((3, 2), (1, 4)),
    "detach": lambda x: x[:2].detach()[1:],
    "data": lambda x: x[1:4].data,
    "squeeze_": lambda x: x[1:2].squeeze_(0)[1:],
    "t_": lambda x: x[1:4].t_()[:3].unsqueeze_(0),
    "movedim": lambda x: x.movedim(0, 1)[None][:, :3],
}


@cases("layout", ["[5:dp, 4:tp]", "[5:tp,dp, 4]", "[5:tp, 4] P(dp,sum)", "[5, 4]"])
@cases("seen", WRITTEN)
def test_r20_writes_to_a_view_reach_its_base(square, layout, seen):
    pick = WRITTEN[seen]

    def zeros(x):
        nn.init.zeros_(pick(x))
        return x

    def several(x):
        v = pick(x)
        v.mul_(3).add_(v.detach() + 1)
        torch._foreach_mul_([v], 2)
        torch.add(v, 1, out=v)
        return [v, x, x.t()]

    def both_ways(x):
        v, w = pick(x), pick(x)
        out = [v * 1]
        x.add_(1)
        out += [v * 1, w + 0]
        w.mul_(2)
        out += [v * 1, v.sum(), x]
        x.detach().neg_()
        return [*out, v, w, x]

    for program in (zeros, several, both_ways):
        check(square, program, layout, grads=False)


@cases("layout", ["[5:dp, 4]", "[5, 4:tp]", "[5:tp,dp, 4]", "[5:tp, 4] P(dp,sum)"])
def test_r20_gradients_of_writes_to_views(square, layout):
    def program(x, y):
        z = x * 1
        z[:2].mul_(3)
        z[1] = y[0] * x[2]
        z[:, 1:3].add_(y[:, 1:3])
        z.t()[0].zero_()
        return [z * z, z[3:]]

    check(square, program, layout, "[5:dp, 4:tp]")


def test_r20_a_copy_of_a_view_is_independent(square):
    x = distributed(square, "[5:dp, 4]")
    view, before = x[:2], x.full_tensor().ranks[0].clone()
    saved = io.BytesIO()
    torch.save(view, saved)
    saved.seek(0)
    for other in (copy.deepcopy(view), view.clone(), torch.load(saved)):
        same(other, before[:2])
        other.zero_()
        same(x, before)
    with torch.inference_mode():
        y = distributed(square, "[5:dp, 4]")
        v = y[:2]
        y.add_(1)
        same(v, before[:2] + 1)
        v.zero_()
        same(y[:3], torch.cat([before[:2] * 0, before[2:3] + 1]))


@cases(
    "layout", ["[2, 5:tp, 6]", "[3:dp, 5:tp, 6]", "[3, 5:dp,tp, 6]", "[3, 5, 6:tp]", "[2, 5:tp, 6] P(dp,sum)"]
)
@cases("weight", ["[4, 6]", "[4:tp, 6]", "[4, 6:tp]", "[4:dp, 6:tp]"])
def test_r21_linear_on_a_sharded_sequence(square, layout, weight):
    check(square, lambda x, w, b: F.linear(x, w, b), layout, weight, "[4]")
    check(square, lambda x, w: F.linear(x.relu(), w).view(-1, 4).sum(1), layout, weight)


# Uneven blocks, several axes on a dim


@cases("text", ["[5:dp,tp, 3]", "[5:tp,dp, 3]", "[5, 3:dp,tp]", "[1:dp,tp, 2]", "[7:dp,tp, 3]"])
def test_r22_uneven_over_two_axes(square, text):
    layout = layout_of(square, text)
    whole = numbers(layout.shape)
    plain = sw.distribute_tensor(whole, square, [Shard(0), Shard(0)])
    same(plain, whole)
    same(plain.redistribute(placements=[Replicate(), Replicate()]), whole)
    check(square, lambda x: [moved(x, [Replicate(), Replicate()]), x * 1], text)


@cases("n", [5, 2, 1, 6, 7])
def test_r23_axes_in_reverse_order(square, n):
    goals = [
        [Shard(0), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(0), Replicate()],
        [Replicate(), Replicate()],
    ]
    for goal in goals:
        check(square, lambda x, goal=goal: moved(x, goal) * 2, f"[{n}:tp,dp]")
    x = distributed(square, f"[{n}:tp,dp]")
    sizes = [b.numel() for b in x.to_local().ranks]
    assert sum(sizes) == n
    assert sizes == [
        block_shape(layout_of(square, f"[{n}:tp,dp]"), c)[0] for c in members_of(square).values()
    ]


@cases("layout", ["[5:tp,dp, 6]", "[6, 5:tp,dp]", "[3:dp, 5:tp]", "[4:tp,dp, 3]", "[3 2:tp,dp, 5]"])
@cases(
    "program",
    [
        lambda x: [x.softmax(0), x.log_softmax(1)],
        lambda x: [F.layer_norm(x, x.shape[1:]), F.layer_norm(x, x.shape)],
        lambda x: [x.sum(0), x.sum(1), x.sum(), x.mean(0), x.mean(1), x.mean()],
        lambda x: [x.t(), x.transpose(0, 1) * 2, x.t().softmax(0)],
        lambda x: [x[1:3], x[:, 1:], x[::2], x[2], x[:, -1], x.select(0, 1)],
        lambda x: [
            torch.cat([x, x * 2]),
            torch.cat([x, x.exp()], 1),
            torch.stack([x, x]),
            torch.hstack([x, x]),
        ],
        lambda x: [*x.split(2), *x.split([1, x.shape[1] - 1], 1), *x.unbind(0), *x.chunk(3, 1)],
    ],
)
def test_r24_axes_out_of_order_through_ops(square, program, layout):
    check(square, program, layout)


@cases(
    "a,b",
    itertools.product(
        ["[5, 6:tp,dp]", "[5:dp, 6:tp]", "[5:tp, 6:dp]"],
        ["[6:dp,tp, 3]", "[6:tp, 3:dp]", "[6:tp,dp, 3]", "[2 3:dp, 3:tp]"],
    ),
)
def test_r25_contraction_with_different_orders(square, a, b):
    check(square, lambda x, y: [x @ y, (y.t() @ x.t()).t(), x.matmul(y).sum()], a, b)
    check(square, lambda x, y: [torch.addmm(x @ y, x, y), x.mv(y[:, 0])], a, b)


@cases("n", [1, 2, 3])
def test_r26_offsets_of_empty_blocks(square, n):
    layout = layout_of(square, f"[{n}:dp,tp]")
    x = sw.distribute_tensor(numbers((n,)), square, [Shard(0), Shard(0)])
    for rank, coord in members_of(square).items():
        (size,), (start,) = block_shape(layout, coord), block_offset(layout, coord)
        assert x.to_local().of_rank(rank).shape == (size,)
        assert start + size <= n
        if size:
            torch.testing.assert_close(x.to_local().of_rank(rank), numbers((n,))[start : start + size])
    ends = sorted(
        (block_offset(layout, c)[0], block_shape(layout, c)[0]) for c in members_of(square).values()
    )
    assert [start for start, size in ends if size] == list(range(n))
    saved = io.BytesIO()
    torch.save(x, saved)
    saved.seek(0)
    same(torch.load(saved), numbers((n,)))
    check(square, lambda x: [x.sum(), x * 2, x.mean(), x.max()], f"[{n}:dp,tp]")


def test_r27_blocks_that_are_not_chunks_are_an_error(line):
    wrong = sw.per_rank(lambda rank: torch.zeros((1, 3, 3)[rank], 4))  # 7 rows are split into 3, 3 and 1
    with pytest.raises(LayoutError, match="do not make up"):
        DTensor.from_local(wrong, line, [Shard(0)], run_check=True)
    with pytest.raises(LayoutError, match="do not make up"):
        DTensor.from_local(wrong, line, [Shard(0)], run_check=True, shape=(7, 4))


def test_r28_a_given_shape_is_the_shape_on_each_rank(line):
    whole = numbers((5, 10))
    blocks = whole.chunk(3)
    local = sw.per_rank(lambda rank: blocks[rank].clone())
    given = DTensor.from_local(local, line, [Shard(0)], shape=(5, 10), stride=(10, 1))
    checked = DTensor.from_local(local, line, [Shard(0)], run_check=True)
    for x in (given, checked):
        assert x.shape == (5, 10)
        assert x.stride() == (10, 1)
        r = x.redistribute(placements=[Replicate()])
        assert r.shape == (5, 10)
        assert all(b.shape == (5, 10) for b in r.to_local().ranks)
        same(r, whole)
        same(x * 2 + r, whole * 3)
    with pytest.raises(LayoutError, match="block of shape"):
        DTensor.from_local(local, line, [Shard(0)])


@cases("layout", ["[5:dp, 3]", "[5:dp,tp, 3]", "[5:tp, 3:dp]", "[4:dp, 6]", "[1:dp, 3:tp]"])
def test_r29_local_map_of_uneven_blocks(square, layout):
    def program(x):
        if not isinstance(x, DTensor):
            return [x.exp() * 2, torch.stack([x, -x], -1)]

        def on_blocks(block, number):
            return block.exp() * number, torch.stack([block, -block], -1)

        placements = list(x.placements)
        return list(local_map(on_blocks, out_placements=(placements, placements))(x, 2))

    check(square, program, layout)


@cases("weight", ["[3]", "[3:dp]"])
def test_r29_the_gradient_of_a_replicated_input_of_local_map_is_complete(square, weight):
    def program(x, w):
        if not isinstance(x, DTensor):
            return x * w
        inputs = ([Shard(0), Replicate()], [Replicate(), Replicate()])
        return local_map(torch.mul, inputs[0], inputs, redistribute_inputs=True)(x, w)

    check(square, program, "[5:dp, 3]", weight)


@cases("shape", [(4, 5), (2, 7, 3), (3, 1)])
def test_r30_a_gathered_tensor_is_contiguous(line, shape):
    whole = numbers(shape)
    x = sw.distribute_tensor(whole, line, [Shard(1)])
    r = x.redistribute(placements=[Replicate()])
    assert r.is_contiguous()
    assert all(b.is_contiguous() for b in r.to_local().ranks)
    assert all(b.is_contiguous() for b in x.full_tensor().ranks)
    same(r, whole)


def test_r30_a_dim_counted_from_the_end_is_the_same(line):
    x = sw.distribute_tensor(numbers((4, 5)), line, [Shard(1)])
    with counting() as ledger:
        y = x.redistribute(placements=[Shard(-1)])
    assert ledger.collectives == 0
    assert y.sharding is x.sharding
    for a, b in zip(x.to_local().ranks, y.to_local().ranks, strict=True):
        assert a.data_ptr() == b.data_ptr()


# Indexing, convolution, embedding, caches


@cases("layout", ["[5:dp, 4]", "[5:tp,dp, 4]", "[5, 4:tp]", "[5:tp, 4] P(dp,sum)"])
@cases("given", ["[3:dp,tp, 4]", "[3, 4] P(dp,sum)"])
@cases("where", ["[3]", "[3:dp]"])
def test_r31_index_put(square, layout, given, where):
    at = (torch.tensor([4, 0, 2]), where)
    check(square, lambda x, v, i: torch.index_put(x, (i,), v), layout, given, at)
    check(square, lambda x, v, i: torch.index_put(x, (i,), v, accumulate=True), layout, given, at)

    def write(x, v, i):
        y = x * 1
        y[i] = v
        return [y, x[i], x.index_select(0, i), x.index_add(0, i, v), x.index_copy(0, i, v)]

    check(square, write, layout, given, at)


@cases(
    "layout", ["[2, 3, 7:tp]", "[2:dp, 3, 7:tp]", "[2, 3:tp, 7]", "[3:dp,tp, 3, 7]", "[2, 3, 7] P(dp,sum)"]
)
@cases("weight", ["[4, 3, 3]", "[4:tp, 3, 3]", "[4, 3:dp, 3]"])
def test_r32_convolution_of_a_sharded_width(square, layout, weight):
    check(square, lambda x, w, b: F.conv1d(x, w, b, padding=1), layout, weight, "[4]")
    check(square, lambda x, w: F.conv1d(x, w, stride=2, dilation=2, padding=2), layout, weight)


@cases("layout", ["[2, 4:tp, 5, 6]", "[2:dp, 4:tp, 5, 6]", "[2, 4, 5:dp, 6:tp]", "[2, 4, 5, 6] P(tp,sum)"])
@cases("weight", ["[4:tp, 1, 3, 3]", "[4:dp,tp, 1, 3, 3]"])
def test_r32_depthwise_convolution_of_sharded_channels(square, layout, weight):
    check(square, lambda x, w: F.conv2d(x, w, padding=1, groups=4), layout, weight)
    check(square, lambda x, w: F.conv2d(x, w, groups=4, stride=(1, 2)).relu(), layout, weight)


@cases(
    "weight", ["[7:tp, 3]", "[7:dp,tp, 3]", "[7:tp,dp, 3]", "[7, 3:tp]", "[7:dp, 3:tp]", "[7, 3] P(tp,sum)"]
)
@cases("ids", ["[2, 4]", "[2:dp, 4:tp]"])
@cases("padding", [None, 3, -1])
def test_r33_padding_of_a_row_sharded_embedding(square, weight, ids, padding):
    at = torch.tensor([[0, 3, 6, 3], [5, 1, 0, 6]])
    check(square, lambda w, i: F.embedding(i, w, padding_idx=padding), weight, (at, ids))
    check(
        square,
        lambda w, i: F.embedding(i, w, padding_idx=padding, scale_grad_by_freq=True),
        weight,
        (at, ids),
    )


QKV = [
    "[2:dp, 4, 5, 6]",
    "[2, 4:tp, 5, 6]",
    "[2:dp, 4:tp, 5, 6]",
    "[2, 4, 5:tp, 6]",
    "[2, 4, 5, 6] P(dp,sum)",
]


@cases("layout", QKV)
@cases("causal", [False, True])
def test_r34_attention_with_and_without_gradients(square, layout, causal):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    for _ in range(2):
        with torch.no_grad():
            check(square, attend, layout, layout, "[2:dp, 4:tp, 5, 6]", grads=False)
        check(square, attend, layout, layout, "[2:dp, 4:tp, 5, 6]")


@cases("layout", QKV)
def test_r34_attention_with_other_arguments(square, layout):
    for scale in (None, 0.5, 0.1):
        check(
            square,
            lambda q, k, v, s=scale: F.scaled_dot_product_attention(q, k, v, scale=s),
            layout,
            layout,
            QKV[0],
        )

    def masked(q, k, v, m):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m.detach())

    check(square, masked, layout, layout, QKV[1], "[5, 5]")
    check(square, masked, layout, layout, QKV[1], "[2:dp, 1, 5, 5:tp]")


@cases("layout", SPLIT)
def test_r35_numeric_arguments_of_slices_and_histograms(square, layout):
    def slices(x):
        return [x[:2], x[1:3], x[3:], x[:, :1], x[:, 1:2], x[::2], x[1::2], x[-2:]]

    check(square, slices, layout)

    def histograms(x):
        return [
            torch.histc(x, bins, low, high)
            for bins, low, high in [(4, -2, 2), (5, -2, 2), (4, -1, 1), (4, 0, 0)]
        ]

    check(square, histograms, layout, grads=False)
    check(square, histograms, "[5, 3] P(dp,sum)", grads=False)
    check(
        square,
        lambda x: [x.roll(1, 0), x.roll(2, 0), x.tril(0), x.tril(-1), x.cumsum(0), x.cumsum(1)],
        layout,
    )


@cases("layout", ["[7:tp, 3]", "[7:dp,tp, 3]", "[7, 3:tp]"])
def test_r36_two_embeddings_of_one_shape(square, layout):
    ids, others = torch.tensor([[0, 3, 6], [5, 1, 0]]), torch.tensor([[6, 6, 2], [1, 4, 0]])

    def program(v, w, i, j):
        a, b = F.embedding(i, v), F.embedding(j, w)
        return [a * b, a + F.embedding(j, v), b]

    check(square, program, layout, layout, (ids, "[2, 3]"), (others, "[2, 3]"))
    check(square, program, layout, "[7:dp, 3]", (ids, "[2:dp, 3]"), (others, "[2, 3]"))


# Gradients


@cases("layout", [*PENDING, "[5:dp, 3]"])
@cases("bias", ["[3]", "[5, 3]", "[3:tp]", "[1, 3]"])
def test_r41_a_bias_added_to_a_pending_sum(square, layout, bias):
    check(square, lambda x, b: x + b, layout, bias)
    check(square, lambda x, b: (x + b).relu() * x, layout, bias)
    check(square, lambda x, b: torch.add(b, x, alpha=3) - b, layout, bias)


def test_r41_a_row_parallel_linear(square):
    for bias in ("[4]", "[4:dp]", "[4] P(dp,sum)"):
        check(square, lambda x, w, b: F.linear(x, w, b), "[5:dp, 6:tp]", "[4, 6:tp]", bias)
        check(square, lambda x, w, b: torch.addmm(b, x, w, beta=2, alpha=3), "[5, 6:tp]", "[6:tp, 4]", bias)


# Scalars, asynchronous redistribution, randomness


@cases("layout", [*SPLIT, *PENDING, *EXTREMES])
def test_r45_python_values(square, layout):
    x, whole = distributed(square, layout), numbers((5, 3))
    assert x.sum().item() == pytest.approx(whole.sum().item())
    assert float(x.max()) == pytest.approx(float(whole.max()))
    assert x[4, 2].item() == pytest.approx(whole[4, 2].item())
    assert int((x > 0).sum()) == int((whole > 0).sum())
    other = whole.clone()
    other[4, 2] += 1  # an element that the first ranks do not hold
    for text in ("[5:dp, 3]", "[5, 3]", "[5, 3:tp]"):
        equal, unequal = distributed(square, text), distributed(square, text, other)
        assert torch.allclose(x, equal)
        assert not torch.allclose(x, unequal)
        assert not torch.equal(x, unequal)
        assert torch.equal(equal, distributed(square, "[5:tp,dp, 3]"))
        assert torch.isclose(x, equal).all()
        assert bool((x != unequal).any())
    assert bool(x.abs().sum() > 0)
    assert not bool((x.abs() > 100).any())
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        bool(x)


@cases("goal", [[Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(0), Shard(1)]])
@cases("layout", ["[5:dp, 3:tp]", "[5, 3] P(dp,sum)", "[5:tp, 3] P(dp,sum)"])
def test_r47_an_asynchronous_result_is_waited_for(square, layout, goal):
    whole = numbers((5, 3))

    def pending():
        return distributed(square, layout).redistribute(placements=goal, async_op=True)

    same(pending().float(), whole.float())
    same(pending().to(torch.bfloat16).to(torch.float32), whole.to(torch.bfloat16).float())
    same(pending().add_(1), whole + 1)
    same(pending().t(), whole.t())
    same(torch.stack(torch._foreach_mul([pending(), pending()], 2)), torch.stack([whole * 2] * 2))
    same(pending() + pending(), whole * 2)
    same(pending(), whole)


@cases("layout", ["[7] P(dp,sum) P(tp,sum)", "[7] P(tp,avg) P(dp,sum)"])
def test_r48_replicas_are_bit_equal(layout):
    with simulate(6):
        mesh = sw.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        parts = [(numbers((7,), seed) * 10.0 ** (3 * seed - 8)).float() for seed in range(6)]
        x = DTensor.from_local(
            sw.per_rank(lambda rank: parts[rank]), mesh, layout_of(mesh, layout).placements
        )
        stages = [x.redistribute(dp=Replicate()).redistribute(tp=Replicate())]
        stages += [x.redistribute(tp=Replicate()).redistribute(dp=Replicate())]
        stages += [
            x.redistribute(placements=[Replicate(), Replicate()]),
            x.redistribute(placements=[Shard(0)] * 2),
        ]
        results = [s.full_tensor() for s in stages]
        for whole in [*results, (x.sum() * 2).full_tensor(), x.cumsum(0).full_tensor()]:
            assert all(same_bits(b, whole.ranks[0]) for b in whole.ranks)


def cached_routes():
    """The number of routes in the cache."""
    return sum(len(entry.runs) for entry, *_ in current_settings().routes.values())


@pytest.mark.parametrize(
    "placements", [[Shard(0), Replicate()], [Shard(1), Shard(1)], [Shard(1), Shard(0)], [Replicate()] * 2]
)
def test_r49_initialization_and_dropout_do_not_depend_on_the_layout(square, placements):
    sw.manual_seed(49)
    with sw.one_device():
        alone = torch.nn.init.kaiming_uniform_(torch.empty(5, 7))
        masked = F.dropout(torch.ones(5, 7), 0.3)
    weight = sw.empty(5, 7, device_mesh=square, placements=placements)
    sw.manual_seed(49)
    torch.nn.init.kaiming_uniform_(weight)
    dropped = F.dropout(torch.ones_like(weight), 0.3)
    for got, want in ((weight, alone), (dropped, masked)):
        assert all(torch.equal(r, want) for r in got.full_tensor().ranks)


@cases("how", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_r50_the_cache_does_not_grow_with_steps(square, how):
    params = [
        distributed(square, text, seed=i)
        for i, text in enumerate(["[5:dp, 3]", "[5, 3:tp]", "[4:dp,tp]", "[3]"])
    ]
    dense = [p.full_tensor().ranks[0].clone().requires_grad_() for p in params]
    for p in params:
        p.requires_grad_()
    options = {"lr": 0.1, "weight_decay": 0.1, **how}
    ours, theirs = torch.optim.AdamW(params, **options), torch.optim.AdamW(dense, **options)
    sizes = []
    for step in range(20):
        for group in ours.param_groups + theirs.param_groups:
            group["lr"] = 0.1 / (1 + step)
        for optimizer, some in ((ours, params), (theirs, dense)):
            optimizer.zero_grad()
            sum((p * p * (step + 1.5)).sum() for p in some).backward()
            optimizer.step()
        sizes.append(cached_routes())
    assert 0 < sizes[-1] == sizes[1]
    same([p.detach() for p in params], [d.detach() for d in dense])


def test_r50_the_cache_does_not_grow_with_numbers(square):
    x = distributed(square, "[5:dp, 3]")
    sizes = []
    for i in range(20):
        number = 0.5 + i
        x + number
        x * number
        x.mul(i)
        torch._foreach_add([x, x], number)
        torch._foreach_mul([x, x], [number, number + 1])
        torch.addcmul(x, x, x, value=number)
        x.clone().sub_(number).div_(number)
        torch.lerp(x, x, number)
        sizes.append(cached_routes())
    assert 0 < sizes[-1] == sizes[1]


@cases("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@cases("how", ["foreach", "fused"])
def test_r51_parameters_on_several_meshes(kind, how):
    with simulate(4):
        square = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        flat = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        params = [
            distributed(square, "[5:dp, 3:tp]", seed=1),
            distributed(flat, "[6:ep, 2]", seed=2),
            distributed(square, "[3]", seed=3),
            distributed(flat, "[2, 5:ep]", seed=4),
            sw.distribute_tensor(numbers((5,), 5), square["tp"], [Shard(0)]),
        ]
        dense = [p.full_tensor().ranks[0].clone().requires_grad_() for p in params]
        for p in params:
            p.requires_grad_()
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        ours = kind(params, lr=0.1, weight_decay=0.1, **options, **{how: True})
        theirs = kind(dense, lr=0.1, weight_decay=0.1, **options, **{how: True})
        for step in range(3):
            for optimizer, some in ((ours, params), (theirs, dense)):
                optimizer.zero_grad()
                for p in some:
                    (p * p * (step + 1)).sum().backward()
                optimizer.step()
        same([p.detach() for p in params], [d.detach() for d in dense])
        assert [str(p.sharding) for p in params] == [
            "[5:dp, 3:tp]",
            "[6:ep, 2]",
            "[3]",
            "[2, 5:ep]",
            "[5:tp]",
        ]


@cases(
    "program",
    [
        lambda x, y: x @ y.t(),
        lambda x, y: x + y,
        lambda x, y: x.sum(0),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.softmax(1) * y.exp(),
        lambda x, y: F.layer_norm(x, (6,)),
        lambda x, y: x.view(2, 2, 6).transpose(0, 1),
        lambda x, y: x[1:3],
        lambda x, y: F.embedding(y.abs().long().clamp(max=3), x),
        lambda x, y: torch.baddbmm(x[None], x[None, :, :4], y[None]),
    ],
)
def test_r52_replicated_tensors_stay_replicated(square, program):
    x, y = distributed(square, "[4, 6]", seed=1), distributed(square, "[4, 6]", seed=2)
    with counting() as ledger:
        out = program(x, y)
    assert ledger.collectives == 0
    assert out.placements == (Replicate(), Replicate())
    assert isinstance(out.to_local(), PerRank)
    assert all(b.shape == out.shape for b in out.to_local().ranks)
    same(out, program(numbers((4, 6), 1), numbers((4, 6), 2)))


@cases("dim", [0, 1, None])
def test_a_complex_product_over_a_split_dim(dim):
    dense = torch.complex(numbers((5, 3), 1).double(), numbers((5, 3), 2).double())
    want = dense.prod() if dim is None else dense.prod(dim)
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for placement in (Shard(0), Shard(1)):
            x = sw.distribute_tensor(dense, mesh, [placement])
            got = x.prod() if dim is None else x.prod(dim)
            torch.testing.assert_close(got.full_tensor().ranks[1], want)


@cases("dtype", [torch.bfloat16, torch.complex64, torch.float32])
def test_an_expanded_block_is_sent(dtype):
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        one = torch.ones((), dtype=dtype)
        x = DTensor.from_local(sw.per_rank(lambda rank: one.clone().expand(3)), mesh, [Shard(0)])
        assert torch.equal(x.full_tensor().ranks[1], torch.ones(6, dtype=dtype))
