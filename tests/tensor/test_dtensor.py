"""DTensor as a tensor: repr, attributes, copies, serialization, gradients, modules and values."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import layouts, shapes
from tests.values import blocks_of, dense_tensor, tensor, value
from torch import nn

import shardwise as sw
from shardwise import (
    DTensor,
    Partial,
    PerRank,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.call.trace import trace_calls
from shardwise.comm import counting
from shardwise.layout import Axes, Layout, Spec

R = Replicate()
DP_TP = Axes((2, 2), ("dp", "tp"))
some = settings(max_examples=settings.default.max_examples // 2)
"""For properties of simulated tensors, where each example takes some milliseconds."""


def mesh_of(on):
    return sw.DeviceMesh("cpu", torch.arange(on.count).view(on.sizes), mesh_dim_names=on.names)


@pytest.fixture
def square():
    with simulate(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def grid(*shape):
    return torch.arange(float(math.prod(shape))).view(shape)


def full(x):
    """The full value of a DTensor, which must be the same on all ranks."""
    first, *others = x.full_tensor().ranks
    assert all(torch.equal(first, t) for t in others)
    return first.detach()


# ---- repr


@pytest.mark.parametrize(
    ("placements", "dtype", "text"),
    [
        ([Shard(0), R], torch.float32, "f32[8:dp, 6]"),
        ([R, Shard(1)], torch.float32, "f32[8, 6:tp]"),
        ([Shard(0), Shard(0)], torch.int64, "i64[8:dp,tp, 6]"),
        ([Shard(0, order=1), Shard(0, order=0)], torch.bool, "bool[8:tp,dp, 6]"),
        ([Partial(), Shard(1)], torch.bfloat16, "bf16[8, 6:tp] P(dp,sum)"),
        ([Partial("max"), Partial("max")], torch.float64, "f64[8, 6] P(dp,max) P(tp,max)"),
        ([Shard(1, factors=(2, 3), factor=1), R], torch.uint8, "u8[8, 2 3:dp]"),
    ],
)
def test_repr_shows_layout_mesh_and_blocks(square, placements, dtype, text):
    x = distribute_tensor(grid(8, 6).to(dtype), square, placements)
    with counting() as ledger:
        shown = repr(x)
    assert ledger.collectives == 0
    assert shown == str(x) == f"{x}"
    assert shown.startswith(f"DTensor({text} on cpu mesh (dp=2, tp=2)")
    assert repr(x._spec) == f"Spec({text} on dp=2, tp=2)"
    for rank, block in enumerate(x.to_local().ranks):
        assert f"  {rank}: {' '.join(repr(block).split())}" in shown
    assert "requires_grad" not in shown


def test_repr_shows_requires_grad_and_waits_for_async_results(square):
    x = distribute_tensor(grid(4).requires_grad_(), square, [Shard(0), R])
    assert "requires_grad=True" in repr(x)
    assert "requires_grad=True" in repr(nn.Parameter(x.detach()))
    result = x.detach().redistribute(placements=[R, R], async_op=True)
    assert "f32[4] on" in repr(result)
    assert "3.]" in repr(result)
    assert "f32[3]" in repr(distribute_tensor(torch.empty(3, device="meta"), square))


def test_repr_shows_unnamed_axes_as_numbers():
    with simulate(4):
        x = distribute_tensor(grid(4), init_device_mesh("cpu", (2, 2)), [Shard(0), Partial()])
        assert repr(x).startswith("DTensor(f32[4:0] P(1,sum) on cpu mesh (0=2, 1=2)")


def test_repr_on_a_real_rank_shows_its_block():
    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    try:
        x = DTensor.from_local(grid(2), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), [Shard(0)])
        assert repr(x) == "DTensor(f32[4:tp] on cpu mesh (tp=2), local_tensor=tensor([0., 1.]))"
    finally:
        torch.distributed.destroy_process_group()


# ---- attributes


def test_attributes(square):
    x = distribute_tensor(grid(5, 4), square, [Shard(-1), Partial()])
    assert isinstance(x, torch.Tensor)
    assert x.device_mesh is square
    assert x.placements == (Shard(1), Partial("sum"))
    assert x.sharding is Layout.of((5, 4), DP_TP, [Shard(1), Partial()])
    assert (x.shape, x.size(1), x.ndim, x.dim(), x.numel(), len(x)) == ((5, 4), 4, 2, 2, 20, 5)
    assert (x.dtype, x.device, x.stride(), x.is_contiguous()) == (
        torch.float32,
        torch.device("cpu"),
        (4, 1),
        True,
    )
    assert (x.is_leaf, x.requires_grad, x.grad, x.grad_fn) == (True, False, None, None)
    assert isinstance(x._local_tensor, PerRank)
    assert [tuple(b.shape) for b in x._local_tensor.ranks] == [(5, 2)] * 4
    for name in ("placements", "device_mesh", "layout"):
        with pytest.raises(AttributeError):
            setattr(x, name, None)


def test_spec(square):
    x, y = (distribute_tensor(grid(5, 4) + i, square, [Shard(0), R]) for i in (0, 1))
    spec = x._spec
    assert isinstance(spec, Spec)
    assert (spec.mesh, spec.device_mesh, spec.placements) == (square, square, (Shard(0), R))
    assert (spec.shape, spec.ndim, spec.stride, spec.dtype) == (torch.Size([5, 4]), 2, (4, 1), torch.float32)
    assert isinstance(spec.shape, torch.Size)
    assert (spec.tensor_meta.shape, spec.tensor_meta.stride, spec.tensor_meta.dtype) == (
        (5, 4),
        (4, 1),
        torch.float32,
    )
    assert spec is y._spec
    assert {spec: "found"}[y._spec] == "found"
    assert spec != y.double()._spec
    assert spec != y.redistribute(dp=R)._spec


def test_to_local_without_grad_returns_the_block_itself(square):
    x = distribute_tensor(grid(4), square, [Shard(0), R])
    with torch.no_grad():
        assert x.to_local() is x._local_tensor
    assert x.to_local() is not x._local_tensor
    assert x.to_local().ranks[0].data_ptr() == x._local_tensor.ranks[0].data_ptr()


# ---- copies


@some
@given(layouts(DP_TP), st.booleans())
def test_a_deep_copy_is_equal_and_does_not_share_memory(layout, requires_grad):
    dense = dense_tensor(layout.shape, torch.float64, 3)
    with simulate(4):
        x = tensor(dense, layout, mesh_of(DP_TP)).detach().requires_grad_(requires_grad)
        y = copy.deepcopy(x)
        assert (y._spec, y.requires_grad, y.is_leaf, type(y)) == (x._spec, requires_grad, True, DTensor)
        with torch.no_grad():
            for block in y._local_tensor.ranks:
                block.fill_(99)
        torch.testing.assert_close(value(blocks_of(x.detach(), x.device_mesh), layout), dense)


def test_deepcopy_copies_grad_and_attributes_and_uses_the_memo(square):
    x = distribute_tensor(grid(4).requires_grad_(), square, [Shard(0), R])
    x.full_tensor().sum().backward()
    x.note = "mine"
    y, z = copy.deepcopy([x, x])
    assert y is z
    assert y.note == "mine"
    assert y.grad is not x.grad
    again, grad = copy.deepcopy([x, x.grad])
    assert again.grad is grad
    assert y.grad.sharding is x.grad.sharding
    y.grad.zero_()
    assert torch.equal(full(x.grad), torch.ones(4))
    with pytest.raises(RuntimeError, match=r"(?s)graph leaves.*\n  why: .*\n  fix: "):
        copy.deepcopy(x * 2)


def save_and_load(x, weights_only):
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)["x"]


@pytest.mark.parametrize(
    "serialize",
    [
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: save_and_load(x, False),
        lambda x: save_and_load(x, True),
    ],
    ids=["pickle", "save", "save, weights only"],
)
@some
@given(layouts(DP_TP), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64]))
def test_serialization_keeps_spec_and_values(serialize, layout, dtype):
    if any(op not in ("sum",) for _, op in layout.partial):
        dtype = torch.float32
    with simulate(4):
        mesh = mesh_of(DP_TP)
        x = tensor(dense_tensor(layout.shape, dtype, 3), layout, mesh)
        y = serialize(x)
        assert type(y) is DTensor
        assert (y.sharding, y.dtype, y.shape, y.stride()) == (layout, dtype, x.shape, x.stride())
        assert y.device_mesh == mesh
        for a, b in zip(x._local_tensor.ranks, y._local_tensor.ranks, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_loaded_tensor_can_be_used_with_others_of_its_mesh(square, weights_only):
    x = distribute_tensor(grid(5, 4).requires_grad_(), square, [Shard(0), Partial()])
    p = nn.Parameter(x.detach())
    y, q = save_and_load(x, weights_only), save_and_load(p, weights_only)
    assert y.requires_grad
    assert isinstance(q, nn.Parameter)
    assert torch.equal(full(y), grid(5, 4))
    assert torch.equal(full(x.detach() + y.detach()), 2 * grid(5, 4))
    y.full_tensor().sum().backward()
    assert torch.equal(full(y.grad), torch.ones(5, 4))


def test_a_tensor_on_a_sub_mesh_is_loaded_on_the_sub_mesh(square):
    x = distribute_tensor(grid(5), square["tp"], [Shard(0)])
    y = save_and_load(x, True)
    assert y.device_mesh == square["tp"]
    assert torch.equal(full(y), grid(5))


# ---- gradients


def test_detach_shares_memory_and_does_not_require_grad(square):
    x = distribute_tensor(grid(4).requires_grad_(), square, [Shard(0), R])
    y = x.detach()
    assert (y.requires_grad, y.is_leaf, y.sharding) == (False, True, x.sharding)
    y._local_tensor.ranks[0].fill_(9)
    y._local_tensor.ranks[1].fill_(9)
    assert full(x).tolist() == [9, 9, 2, 3]
    assert x.data.sharding is x.sharding


def test_assigning_data(square):
    x = distribute_tensor(grid(4, 3).requires_grad_(), square, [Shard(0), R])
    for dense, placements in (
        (grid(4, 3) + 1, [Shard(0), R]),
        (grid(4, 3) + 2, [R, Shard(1)]),
        (grid(2, 5), [Shard(1), R]),
    ):
        new = distribute_tensor(dense, square, placements)
        x.data = new
        assert (x.sharding, x.shape, x.stride(), x.requires_grad) == (
            new.sharding,
            new.shape,
            new.stride(),
            True,
        )
        assert torch.equal(full(x), dense)
        new.zero_()  # they share memory
        assert full(x).sum() == 0
    pending = distribute_tensor(grid(4), square, [Shard(0), R]).redistribute(dp=R, async_op=True)
    x.data = pending
    assert torch.equal(full(x), grid(4))
    with pytest.raises(TypeError, match=r"(?s)Tensor.*\n  why: .*\n  fix: "):
        x.data = grid(4)


def test_setting_requires_grad(square):
    x = distribute_tensor(grid(4), square, [Shard(0), R])
    assert x.requires_grad_() is x
    assert x.requires_grad
    x.requires_grad = False
    assert not x.requires_grad
    with pytest.raises(RuntimeError, match="floating point"):
        distribute_tensor(torch.arange(4), square).requires_grad_()


@pytest.mark.parametrize("placements", list(itertools.product([Shard(0), Shard(1), R], repeat=2)))
def test_gradients_accumulate_in_the_layout_of_the_leaf(square, placements):
    x = distribute_tensor(grid(5, 3).requires_grad_(), square, placements)
    for times in (1, 2, 3):
        x.full_tensor().sum().backward()  # the gradient of a sum is an expanded scalar
        assert type(x.grad) is DTensor
        assert x.grad.placements == placements
        assert torch.equal(full(x.grad), torch.full((5, 3), float(times)))
    for times in (4, 5):
        x.to_local().sum().backward()
        assert torch.equal(full(x.grad), torch.full((5, 3), float(times)))
    x.grad.zero_()
    assert torch.equal(full(x.grad), torch.zeros(5, 3))
    x.grad = None
    x.full_tensor().square().sum().backward()
    assert torch.equal(full(x.grad), 2 * grid(5, 3))


def test_assigning_grad(square):
    x = distribute_tensor(grid(4).requires_grad_(), square, [Shard(0), R])
    x.grad = x.detach() * 5
    assert torch.equal(full(x.grad), 5 * grid(4))
    with pytest.raises(RuntimeError):
        x.grad = distribute_tensor(grid(5), square)


def test_hooks_receive_the_gradient_as_a_dtensor(square):
    x = distribute_tensor(grid(4).requires_grad_(), square, [Shard(0), R])
    seen = []
    double = x.register_hook(lambda g: seen.append(g.placements) or g * 2)
    after = x.register_post_accumulate_grad_hook(lambda t: seen.append(t is x and full(t.grad).tolist()))
    x.full_tensor().sum().backward()
    assert seen == [(Shard(0), R), [2, 2, 2, 2]]
    double.remove()
    after.remove()
    x.grad = None
    x.full_tensor().sum().backward()
    assert len(seen) == 2
    assert full(x.grad).tolist() == [1, 1, 1, 1]


def test_retain_grad(square):
    x = distribute_tensor(grid(4).requires_grad_(), square, [Shard(0), R])
    y = x * 3
    y.retain_grad()
    y.redistribute(dp=R).full_tensor().sum().backward()
    assert (y.is_leaf, y.grad.shape) == (False, (4,))
    assert full(y.grad).tolist() == [1] * 4
    assert full(x.grad).tolist() == [3] * 4


# ---- in modules


class Net(nn.Module):
    def __init__(self, mesh, placements, value=1.0):
        super().__init__()
        self.w = nn.Parameter(distribute_tensor(grid(6, 3) * value, mesh, placements))
        self.register_buffer("b", distribute_tensor(grid(3) * value, mesh))


def test_a_parameter_is_a_parameter_and_a_dtensor(square):
    net = Net(square, [Shard(0), R])
    assert isinstance(net.w, nn.Parameter)
    assert isinstance(net.w, DTensor)
    assert (net.w.requires_grad, net.w.is_leaf, net.w.placements) == (True, True, (Shard(0), R))
    assert [n for n, _ in net.named_parameters()] == ["w"]
    assert not isinstance(net.b, nn.Parameter)
    assert not isinstance(net.w.detach(), nn.Parameter)
    assert not isinstance(net.w.redistribute(dp=R), nn.Parameter)
    frozen = nn.Parameter(net.w.detach(), requires_grad=False)
    assert isinstance(frozen, nn.Parameter)
    assert not frozen.requires_grad
    with torch.no_grad():
        net.w.zero_()
    assert full(net.w).sum() == 0
    net.w.full_tensor().sum().backward()
    net.zero_grad()
    assert net.w.grad is None


@pytest.mark.parametrize("other", [[Shard(0), R], [Shard(1), Shard(0)], [R, R], [Partial(), Shard(1)]])
def test_load_state_dict_keeps_the_layout_of_the_module(square, other):
    net, state = Net(square, [Shard(0), R]), Net(square, other, 2.0).state_dict()
    assert sorted(state) == ["b", "w"]
    assert all(type(v) is DTensor and not v.requires_grad for v in state.values())
    before = net.w
    net.load_state_dict(state)
    assert net.w is before
    assert net.w.placements == (Shard(0), R)
    assert torch.equal(full(net.w), 2 * grid(6, 3))
    assert torch.equal(full(net.b), 2 * grid(3))


def test_a_state_dict_can_be_assigned(square):
    net, state = Net(square, [Shard(0), R]), Net(square, [Shard(1), R], 2.0).state_dict()
    net.load_state_dict(state, assign=True)
    assert isinstance(net.w, nn.Parameter)
    assert net.w.requires_grad
    assert net.w.placements == (Shard(1), R)
    assert torch.equal(full(net.w), 2 * grid(6, 3))


def test_modules_can_be_copied_and_pickled(square):
    net = Net(square, [Shard(0), R])
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(other.w, nn.Parameter)
        assert other.w.sharding is net.w.sharding
        with torch.no_grad():
            other.w.zero_()
        assert torch.equal(full(net.w), grid(6, 3))


def test_modules_change_dtype_and_device(square):
    net = Net(square, [Shard(0), R])
    for change, dtype in (
        (net.double, torch.float64),
        (net.bfloat16, torch.bfloat16),
        (net.float, torch.float32),
    ):
        change()
        assert (net.w.dtype, net.w._local_tensor.dtype, net.w.placements) == (dtype, dtype, (Shard(0), R))
        assert isinstance(net.w, nn.Parameter)
        assert torch.equal(full(net.w), grid(6, 3).to(dtype))
    net.to("meta")
    assert net.w.is_meta
    net.to_empty(device="cpu")
    assert (net.w.device.type, net.w._local_tensor.device.type, net.w.placements) == (
        "cpu",
        "cpu",
        (Shard(0), R),
    )


def test_optimizers_equal_those_on_dense_parameters(square):
    dense = nn.Parameter(grid(6, 3))
    params = [
        nn.Parameter(distribute_tensor(grid(6, 3), square, placements))
        for placements in ([Shard(0), R], [Shard(1), Shard(0)])
    ]
    for make in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.1)):
        steps = [make([p]) for p in (dense, *params)]
        for _ in range(2):
            for p, step in zip((dense, *params), steps, strict=True):
                step.zero_grad()
                (p if p is dense else p.full_tensor()).square().sum().backward()
                step.step()
    for p in params:
        torch.testing.assert_close(full(p), dense.detach())


def test_a_plain_tensor_is_not_loaded_into_a_dtensor(square):
    net = Net(square, [Shard(0), R])
    with pytest.raises(RuntimeError, match=r"fix: Wrap it"):
        net.load_state_dict({"w": grid(6, 3), "b": grid(3)})


# ---- ops have the dense result


@pytest.fixture
def quiet(caplog):
    """Silence the log of fallbacks."""
    caplog.set_level("ERROR", logger="shardwise")


two_layouts = shapes(max_dims=2, max_size=6).flatmap(
    lambda shape: st.tuples(layouts(DP_TP, shape), layouts(DP_TP, shape))
)


def check(x, expected):
    """Check the value of a tensor in any layout."""
    assert (x.shape, x.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(value(blocks_of(x, x.device_mesh), x.sharding).to(expected.dtype), expected)


@some
@given(two_layouts)
def test_sums_of_tensors_in_any_two_layouts(pair):
    a, b = pair
    u, v = dense_tensor(a.shape, torch.float64, 1), dense_tensor(a.shape, torch.float64, 2)
    with simulate(4):
        mesh = mesh_of(DP_TP)
        x, y = tensor(u, a, mesh), tensor(v, b, mesh)
        check(x + y, u + v)
        check(x - y, u - v)
        check(x + x, u + u)
        check(x.clone().add_(y), u + v)
        check(torch.add(x, y, alpha=-3), u - 3 * v)


@some
@given(layouts(DP_TP), st.sampled_from([2, -3, 0.5, 0, -1.5]))
def test_products_and_sums_with_numbers(layout, number):
    u = dense_tensor(layout.shape, torch.float64, 1)
    with simulate(4):
        x = tensor(u, layout, mesh_of(DP_TP))
        check(x * number, u * number)
        check(number * x, u * number)
        check(x + number, u + number)
        check(number - x, number - u)
        check(x + torch.tensor(number), u + number)
        check(-x, -u)
        check(x / (number or 4), u / (number or 4))
        check(x.mul_(number), u * number)


@some
@given(layouts(DP_TP))
def test_copies_casts_and_fills(layout):
    u = dense_tensor(layout.shape, torch.float32, 1)
    with simulate(4):
        x = tensor(u, layout, mesh_of(DP_TP))
        for same in (x.clone(), x.contiguous(), x.detach(), x.to("cpu"), x.to(torch.float32)):
            assert same.sharding is layout
            check(same, u)
        check(x.double(), u.double())
        check(x.bfloat16(), u.bfloat16())
        check(torch.zeros_like(x), torch.zeros_like(u))
        check(torch.full_like(x, 2.5), torch.full_like(u, 2.5))
        check(torch.ones_like(x, dtype=torch.int64), torch.ones_like(u, dtype=torch.int64))
        assert torch.empty_like(x).shape == x.shape
        y = x.clone()
        assert y.zero_() is y
        assert y.sharding is layout
        check(y, torch.zeros_like(u))
        check(y.fill_(3), torch.full_like(u, 3))
        check(x, u)


@some
@given(two_layouts)
def test_copy_keeps_the_layout_and_memory_of_the_target(pair):
    a, b = pair
    u, v = dense_tensor(a.shape, torch.float64, 1), dense_tensor(a.shape, torch.float64, 2)
    with simulate(4):
        mesh = mesh_of(DP_TP)
        x, y = tensor(u, a, mesh), tensor(v, b, mesh)
        local = x._local_tensor.ranks[0].data_ptr()
        assert x.copy_(y) is x
        assert (x.sharding, x._local_tensor.ranks[0].data_ptr()) == (a, local)
        check(x, v)
        check(y, v)


def test_copy_casts_and_broadcasts(square):
    x = distribute_tensor(torch.zeros(4, 3), square, [Shard(0), Partial()])
    check(x.copy_(distribute_tensor(torch.arange(12).view(4, 3), square, [Shard(1), R])), grid(4, 3))
    row = distribute_tensor(grid(3), square, [Shard(0), R])
    check(x.copy_(row), grid(3).expand(4, 3).clone())


@pytest.mark.usefixtures("quiet")
@some
@given(two_layouts, st.booleans(), st.data())
def test_numbers_and_comparisons_equal_the_dense_ones(pair, same, data):
    a, b = pair
    u = dense_tensor(a.shape, torch.float64, 1)
    v = u.clone()
    if not same and v.numel():
        v.view(-1)[data.draw(st.integers(0, v.numel() - 1))] += 1
    with simulate(4):
        mesh = mesh_of(DP_TP)
        x, y = tensor(u, a, mesh), tensor(v, b, mesh)
        assert torch.equal(x, y) is torch.equal(u, v)
        assert torch.allclose(x, y) is torch.allclose(u, v)
        assert x.sum().item() == u.sum().item()
        assert float((x - y).abs().sum()) == float((u - v).abs().sum())
        assert bool((x == y).all()) is bool((u == v).all())
        if u.numel():
            assert int(x.max()) == int(u.max())
            assert x.min().item() == u.min().item()
            assert (x.argmax() if x.dim() else x).item() == (u.argmax() if u.dim() else u).item()


@pytest.mark.usefixtures("quiet")
def test_item_completes_pending_reductions(square):
    x = DTensor.from_local(
        sw.per_rank(lambda rank: torch.tensor(float(rank))), square, [Partial(), Partial()]
    )
    assert (x.item(), float(x), int(x), bool(x)) == (6.0, 6.0, 6, True)
    assert bool(x == 6)
    assert f"{x.item():.1f}" == "6.0"
    y = DTensor.from_local(
        sw.per_rank(lambda rank: torch.tensor(float(rank))), square, [Partial("max"), Partial("max")]
    )
    assert y.item() == 3.0
    assert (x + 10).item() == 16.0  # the number is not added on each rank


@pytest.mark.usefixtures("quiet")
def test_a_fallback_is_logged_once(square, caplog):
    x = distribute_tensor(grid(5, 4), square, [Shard(0), Shard(1)])
    caplog.set_level("WARNING", logger="shardwise")
    routes = []
    with trace_calls(lambda call: routes.append(call.route)):
        results = [torch.nonzero(x) for _ in range(2)]
    assert routes == ["fallback"] * 2
    assert all(torch.equal(full(result), torch.nonzero(grid(5, 4))) for result in results)
    lines = [r.getMessage() for r in caplog.records if "nonzero" in r.getMessage()]
    assert len(lines) == 1
    assert "f32[5:dp, 4:tp]" in lines[0]
    assert torch.equal(full(x @ x.t()), grid(5, 4) @ grid(5, 4).t())
    assert torch.equal(full(x[1:3, 2]), grid(5, 4)[1:3, 2])


@pytest.mark.usefixtures("quiet")
def test_in_place_fallbacks_write_back(square):
    for placements in itertools.product([Shard(0), Shard(1), R, Partial()], repeat=2):
        x = distribute_tensor(grid(5, 3), square, placements)
        assert x.clamp_(max=4.0) is x
        assert x.placements == placements
        assert torch.equal(full(x), grid(5, 3).clamp(max=4.0))


@pytest.mark.usefixtures("quiet")
def test_gradients_of_ops(square):
    u, v = grid(5, 3).requires_grad_(), (grid(5, 3) - 4).requires_grad_()
    ((u * v).sum() + (u + 3 * v).tanh().sum()).backward()
    for a, b in itertools.product([[Shard(0), R], [R, Shard(1)], [Shard(1), Shard(0)]], repeat=2):
        x = distribute_tensor(grid(5, 3).requires_grad_(), square, a)
        y = distribute_tensor((grid(5, 3) - 4).requires_grad_(), square, b)
        ((x * y).sum() + (x + 3 * y).tanh().sum()).backward()
        assert (x.grad.shape, y.grad.shape) == (u.shape, v.shape)
        torch.testing.assert_close(full(x.grad), u.grad)
        torch.testing.assert_close(full(y.grad), v.grad)


def test_a_view_of_blocks_that_are_not_contiguous_shares_their_memory(square):
    blocks = sw.per_rank(lambda rank: (torch.arange(24.0) + rank).view(4, 6)[:, :3])
    x = DTensor.from_local(blocks, square, [Shard(0), Shard(1)])
    y = x.view(48)
    y.zero_()
    assert full(x).abs().sum() == 0
    x.add_(1)
    assert torch.equal(full(y), torch.ones(48))


_VIEWS = {
    "chunk": lambda x: x.chunk(3),
    "slice": lambda x: x[1:4],
    "select": lambda x: x[2],
    "unbind": lambda x: x.unbind(0),
    "view": lambda x: x.view(3, 2, 3),
    "transpose": lambda x: x.t(),
    "view of a view": lambda x: x[1:4][:2].t(),
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", _VIEWS)
def test_views_in_inference_mode_of_tensors_created_inside_and_outside_it(name, inside):
    view = _VIEWS[name]
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = distribute_tensor(grid(6, 3), mesh, [Shard(0)])
        with torch.inference_mode():
            if inside:
                x = distribute_tensor(grid(6, 3), mesh, [Shard(0)])
            got, want = view(x), view(grid(6, 3))
            pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
            for a, b in pairs:
                assert a.is_inference() == inside
                assert torch.equal(full(a), b)


def test_writes_to_views_in_inference_mode_reach_the_base():
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x, dense = distribute_tensor(grid(6, 3), mesh, [Shard(0)]), grid(6, 3)
        row = x[4]
        with torch.inference_mode():
            for t in (x, dense):
                t[1:4] = -1.0
                t[1:5][1:].mul_(3)
                t.t()[0].add_(1)
            assert torch.equal(full(x), dense)
        assert torch.equal(full(row), dense[4])
        x.add_(1)
        assert torch.equal(full(row), dense[4] + 1)


def test_a_module_runs_in_inference_mode(square):
    layer, data = nn.Linear(3, 4), grid(5, 3)
    want = layer(data).detach()
    for name, placements in {"weight": [R, Shard(0)], "bias": [R, Shard(0)]}.items():
        setattr(
            layer, name, nn.Parameter(distribute_tensor(getattr(layer, name).detach(), square, placements))
        )
    x = distribute_tensor(data, square, [Shard(0), R])
    with torch.inference_mode():
        torch.testing.assert_close(full(layer(x)), want)


def test_constructing_with_a_block_that_requires_gradients_warns_of_the_lost_graph(square):
    spec = distribute_tensor(grid(4), square, [R, R])._spec
    block = grid(4).requires_grad_()
    with pytest.warns(UserWarning, match="To construct"):
        x = DTensor(block, spec)
    assert not x.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DTensor(block, spec, requires_grad=True).requires_grad


def test_numbers_that_all_ranks_have_are_formatted_as_numbers() -> None:
    """Programs make names of them (`f"expert_{index}"`); a pending number would have to be reduced, so it shows its layout."""
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        number = sw.distribute_tensor(torch.tensor(3), mesh)
        pending = sw.distribute_tensor(torch.tensor(2.5), mesh, [sw.Partial()])
        assert f"expert_{number}" == "expert_3"
        assert [f"{i}" for i in sw.distribute_tensor(torch.tensor([4, 5]), mesh)] == ["4", "5"]
        assert f"{pending}".startswith("DTensor(f32[] P(0,sum)")
        assert f"{pending:.1f}" == "2.5"
