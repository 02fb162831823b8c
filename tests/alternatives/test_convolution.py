"""Convolution with split batch, channels or positions: results and gradients equal the dense ones."""

import random

import pytest
import torch
from tests.alternatives.test_rearrange import distribute_like
from torch.nn import functional

import shardwise as sw
from shardwise.alternatives import convolution
from shardwise.comm import counting
from shardwise.plan import plan_redistribute

CONVS = {
    1: (functional.conv1d, functional.conv_transpose1d),
    2: (functional.conv2d, functional.conv_transpose2d),
    3: (functional.conv3d, functional.conv_transpose3d),
}
MESHES = {"one axis": (4,), "two axes": (2, 2)}


def random_convolution(draw, nd, transposed, groups):
    """A convolution with random numbers whose result is not empty: its tensors, arguments and result."""
    while True:
        stride, dilation = draw.choice([1, 2, 3]), draw.choice([1, 2])
        kernel = [draw.choice([1, 2, 3, 4]) for _ in range(nd)]
        padding = [draw.randint(0, k) if not transposed else draw.randint(0, k // 2) for k in kernel]
        size = [draw.randint(3, 9) for _ in range(nd)]
        kwargs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        if transposed:
            kwargs["output_padding"] = draw.randint(0, max(stride, dilation) - 1)
        into, out = (4, 4) if groups == 4 else (groups * 2, groups * 3)
        weight = (into, out // groups) if transposed else (out, into // groups)
        shapes = [(3, into, *size), (*weight, *kernel), (out,)]
        tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
        if draw.random() < 0.3:
            tensors.pop()
        try:
            want = CONVS[nd][transposed](*tensors, **kwargs)
        except RuntimeError:
            continue
        if 0 not in want.shape:
            return tensors, kwargs, want


def check(draw, nd, transposed, groups, shape, placements):
    tensors, kwargs, want = random_convolution(draw, nd, transposed, groups)
    torch.manual_seed(draw.randint(0, 99))
    weights = torch.randn_like(want)
    (want * weights).sum().backward()
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        replicated = [sw.Replicate()] * len(shape)
        placements_of = [placements, replicated, replicated]
        if draw.random() < 0.3:
            placements_of[1] = [sw.Shard(0), *replicated[1:]]
        xs = [
            sw.distribute_tensor(t.detach(), mesh, p).requires_grad_()
            for t, p in zip(tensors, placements_of, strict=False)
        ]
        got = CONVS[nd][transposed](*xs, **kwargs)
        torch.testing.assert_close(got.full_tensor().ranks[1], want)
        (got * distribute_like(weights, got, mesh)).sum().backward()
        for x, t in zip(xs, tensors, strict=True):
            torch.testing.assert_close(x.grad.full_tensor().ranks[3], t.grad)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("nd", [1, 2, 3])
def test_split_positions_give_the_dense_result_and_gradients(nd, transposed, groups, taken):
    draw = random.Random(f"{nd}{transposed}{groups}")
    for turn in range(8):
        d = draw.randrange(nd) + 2
        shape, placements = draw.choice([
            ((4,), [sw.Shard(d)]),
            ((2, 2), [sw.Shard(d), sw.Shard(d)]),
            ((2, 2), [sw.Shard(d), sw.Shard(0)]),
            ((2, 2), [sw.Shard(2), sw.Shard(nd + 1)]),
            ((2, 2), [sw.Shard(1), sw.Shard(d)]),
            ((2, 2), [sw.Partial(), sw.Shard(d)]),
        ])  # fmt: skip
        taken.clear()
        check(draw, nd, transposed, groups, shape, placements)
        assert set(taken) >= convolution.ALTERNATIVES.keys(), (turn, placements)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("into", [sw.Shard(0), sw.Shard(1), sw.Partial()])
@pytest.mark.parametrize("weight", [sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()])
def test_rules_give_the_dense_result_and_gradients(groups, transposed, into, weight):
    draw = random.Random(f"{groups}{transposed}{into}{weight}")
    tensors, kwargs, want = random_convolution(draw, 2, transposed, groups)
    weights = torch.randn_like(want)
    (want * weights).sum().backward()
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        replicated = [sw.Replicate()] * 2
        placements_of = [
            [into, draw.choice([sw.Replicate(), sw.Shard(0)])],
            [draw.choice(replicated), weight],
            replicated,
        ]
        xs = [
            sw.distribute_tensor(t.detach(), mesh, p).requires_grad_()
            for t, p in zip(tensors, placements_of, strict=False)
        ]
        got = CONVS[2][transposed](*xs, **kwargs)
        torch.testing.assert_close(got.full_tensor().ranks[1], want)
        (got * sw.distribute_tensor(weights, mesh, replicated)).sum().backward()
        for x, t in zip(xs, tensors, strict=True):
            torch.testing.assert_close(x.grad.full_tensor().ranks[3], t.grad)


def layouts_and_bytes(x, w, b, dim_of_x, dim_of_w):
    """A convolution on one axis: the layouts of its result and gradients, and the bytes sent for each."""
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))

        def put(t, d):
            p = sw.Replicate() if d is None else sw.Shard(d)
            return sw.distribute_tensor(t, mesh, [p]).requires_grad_()

        xs = put(x, dim_of_x), put(w, dim_of_w), put(b, None)
        with counting() as ledger:
            y = functional.conv2d(*xs, padding=1)
        sent = ledger.bytes
        with counting() as ledger:
            grads = torch.autograd.grad(y, xs, y.detach())
        return [str(t.sharding) for t in (y, *grads)], sent, ledger.bytes


def test_rules_send_nothing_where_partial_sums_are_enough():
    x, w, b = torch.randn(4, 8, 6, 6), torch.randn(8, 8, 3, 3), torch.randn(8)
    assert layouts_and_bytes(x, w, b, 0, None) == (
        ["[4:tp, 8, 6, 6]", "[4:tp, 8, 6, 6]", "[8, 8, 3, 3] P(tp,sum)", "[8] P(tp,sum)"], 0, 0)  # fmt: skip
    assert layouts_and_bytes(x, w, b, None, 0) == (
        ["[4, 8:tp, 6, 6]", "[4, 8, 6, 6] P(tp,sum)", "[8:tp, 8, 3, 3]", "[8:tp]"], 0, 0)  # fmt: skip
    layouts, sent, _ = layouts_and_bytes(x, w, b, 1, 1)
    assert (layouts[0], sent) == ("[4, 8, 6, 6] P(tp,sum)", 0)


def test_a_halo_is_one_row_from_each_neighbor():
    x, w, b = torch.randn(2, 8, 64, 32), torch.randn(8, 8, 3, 3), torch.randn(8)
    layouts, forward, backward = layouts_and_bytes(x, w, b, 2, None)
    row = 4 * 2 * 8 * 32
    assert layouts == ["[2, 8, 64:tp, 32]", "[2, 8, 64:tp, 32]", "[8, 8, 3, 3] P(tp,sum)", "[8] P(tp,sum)"]
    assert forward == backward == 6 * row  # over three borders, in both directions
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        split, replicated = (
            sw.distribute_tensor(x, mesh, [p]).sharding for p in (sw.Shard(2), sw.Replicate())
        )
    assert plan_redistribute(split, replicated, 4).bytes == 192 * row


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("groups", [4, 6, 3])
def test_groups_stay_with_their_channels(groups, has_bias, transposed, taken):
    torch.manual_seed(0)
    x = torch.randn(3, 2 * groups, 5, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(
        2 * groups if transposed else 3 * groups, 3 if transposed else 2, 3, 3, dtype=torch.float64
    )
    w.requires_grad_()
    b = torch.randn(3 * groups, dtype=torch.float64, requires_grad=True) if has_bias else None
    conv = functional.conv_transpose2d if transposed else functional.conv2d
    want = conv(x, w, b, groups=groups)
    weights = torch.randn_like(want)
    (want * weights).sum().backward()
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def put(t, *placements):
            return sw.distribute_tensor(t.detach(), mesh, placements).requires_grad_()

        y = put(x, sw.Shard(0), sw.Shard(1))
        rest = [t if t is None else put(t, sw.Replicate(), sw.Replicate()) for t in (w, b)]
        with counting() as ledger:
            got = conv(y, *rest, groups=groups)
        is_even = groups % 2 == 0
        assert (ledger.bytes == 0) == is_even
        assert not is_even or str(got.sharding).startswith(f"[3:dp, {3 * groups}:tp, ")
        torch.testing.assert_close(got.full_tensor().ranks[1], want)
        (got * sw.distribute_tensor(weights, mesh, [sw.Replicate()] * 2)).sum().backward()
        for ours, t in zip([y, *rest], [x, w, b], strict=True):
            if t is not None:
                torch.testing.assert_close(ours.grad.full_tensor().ranks[3], t.grad)
    assert bool(set(taken) & convolution.ALTERNATIVES.keys()) == is_even


def test_patches_that_do_not_overlap_need_no_halo():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.randn(1, 3, 32, 32), mesh, [sw.Shard(2)])
        w = sw.distribute_tensor(torch.randn(8, 3, 4, 4), mesh, [sw.Replicate()])
        with sw.policy(implicit="error"):
            assert str(functional.conv2d(x, w, stride=4).sharding) == "[1, 8, 8:tp, 8]"


def program(padding):
    """A convolution with its positions split four ways, and its gradients, on real ranks."""
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w, b = torch.randn(2, 4, 9, 5), torch.randn(6, 4, 3, 3), torch.randn(6)
    split, replicated = [sw.Shard(2)] * 2, [sw.Replicate()] * 2
    pairs = zip((x, w, b), (split, replicated, replicated), strict=True)
    xs = [sw.distribute_tensor(t, mesh, p).requires_grad_() for t, p in pairs]
    y = functional.conv2d(*xs, padding=padding, stride=2)
    y.cos().sum().backward()
    return str(y.sharding), [t.detach().full_tensor() for t in (y, *(x.grad for x in xs))]


@pytest.mark.processes
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_the_dense_result_on_real_processes(workers, padding):
    torch.manual_seed(0)
    xs = [t.requires_grad_() for t in (torch.randn(2, 4, 9, 5), torch.randn(6, 4, 3, 3), torch.randn(6))]
    y = functional.conv2d(*xs, padding=padding, stride=2)
    y.cos().sum().backward()
    for layout, got in workers.run(program, padding):
        assert ":dp,tp" in layout
        for g, want in zip(got, (y.detach(), *(x.grad for x in xs)), strict=True):
            torch.testing.assert_close(g, want, rtol=1e-4, atol=1e-4)
