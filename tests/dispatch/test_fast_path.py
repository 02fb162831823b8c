"""The fast path, which only real processes take: each form of call gives the dense result, cold and cached."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.layout import block_shape
from shardwise.plan.settings import current_settings
from shardwise.torch_internals.dispatcher import (
    _FUNCTIONS,
    _METHODS,
    _NN_FUNCTIONS,
    boxed_call,
    python_binding,
)

pytestmark = pytest.mark.processes

A = torch.arange(40, dtype=torch.float64).view(5, 8).sin() * 3
B = torch.arange(40, dtype=torch.float64).view(5, 8).cos() + 1.5
W = torch.arange(64, dtype=torch.float64).view(8, 8).cos()
N = torch.arange(40).view(5, 8) % 7 - 3
T = torch.arange(120, dtype=torch.float64).view(5, 3, 8).sin()

CALLS = {
    "unary": lambda a, b, w, n, t: [a.exp(), -a, a.detach(), a.clone(), a.sum(), a.abs().sqrt(), n.sign()],
    "binary": lambda a, b, w, n, t: [a + b, a * b, a / b, a - b, a > b, torch.maximum(a, b), a @ w, a.abs() ** b],
    "binary with a number": lambda a, b, w, n, t: [torch.add(a, b, alpha=3), torch.sub(a, b, alpha=0.5)],
    "ternary": lambda a, b, w, n, t: [torch.where(a > b, a, b), torch.addcmul(a, b, b), torch.lerp(a, b, 0.3)],
    "numbers": lambda a, b, w, n, t: [a * 2, a * 2.0, a + 1, a + True, 3 / b, a.pow(2), b.pow(0.5), a.clamp(-1, 1)],
    "equal numbers of different types": lambda a, b, w, n, t: [n * 1, n * 1.0, n * True, n + 1, n + 1.0, n.sum(dim=1), n == 1],
    "dims": lambda a, b, w, n, t: [t.transpose(0, 1), t.transpose(1, 2), t.permute(2, 0, 1), a.t(), t.select(2, -1)],
    "reductions": lambda a, b, w, n, t: [t.sum(1), t.sum((0, 2), keepdim=True), t.mean(-1), t.amax(1), a.mean(), n.sum()],
    "dtypes": lambda a, b, w, n, t: [a.to(torch.float32), n.to(torch.int8), n.sum(1, dtype=torch.int32), a.float() + 1],
    "slices": lambda a, b, w, n, t: [a[:, 2:6], a[:, -3:], a[:, ::2], t[:, 1], t[..., 3:100], a[:, 5:2], a[:]],
    "slices with default bounds": lambda a, b, w, n, t: [
        torch.ops.aten.slice.Tensor(a, 1),
        torch.ops.aten.slice.Tensor(a, 1, 3),
        torch.ops.aten.slice.Tensor(t, -1, None, 3),
        torch.ops.aten.slice.Tensor(t, 1, 1, None),
    ],
    "shapes": lambda a, b, w, n, t: [t.view(5, 24), t.flatten(), t.unsqueeze(1), t.unsqueeze(-1), t.reshape(15, 8)],
    "squeeze": lambda a, b, w, n, t: [t[:, :1].squeeze(1), t[:, :1].squeeze(), t.unsqueeze(0).squeeze()],
    "not contiguous": lambda a, b, w, n, t: [t.transpose(1, 2)[..., :2].reshape(5, 16), a.t()[2:5].t().reshape(-1)],
    "lists": lambda a, b, w, n, t: [torch.cat([a, b], 1), torch.cat([a, b, a], -1), torch.stack([a, b], 2)],
    "several outputs": lambda a, b, w, n, t: [*a.split(3, 1), *t.unbind(1), *a.max(1), *F.layer_norm(t, (8,), w[0], w[1]).split(2, 1)],
    "activations": lambda a, b, w, n, t: [F.gelu(a), F.gelu(a, approximate="tanh"), F.silu(a), F.softmax(t, -1), F.log_softmax(t, 1), F.leaky_relu(a, 0.2), F.elu(a), F.hardswish(a)],
    "like": lambda a, b, w, n, t: [torch.zeros_like(a), torch.ones_like(n), torch.zeros_like(a, dtype=torch.int32)],
    "linear": lambda a, b, w, n, t: [F.linear(t, w, w[0]), F.linear(a, w), torch.addmm(w[0], a, w), torch.bmm(t, t.transpose(1, 2))],
}  # fmt: skip


def in_place(a, b, w, n, t):
    x = a.clone()
    x.add_(b).mul_(2).sub_(1.0, alpha=2)
    x[:, 1:3] = 7.0
    x[:, 4] += b[:, 4]
    x.clamp_(min=0).sqrt_()
    y = n.clone()
    y.bitwise_and_(3).fill_(2)
    torch._foreach_add_([x, y], 1)
    several = torch._foreach_mul([x, x], [2.0, 3.0])
    return [x, y, *several]


CALLS["in place"] = in_place


def on_ranks(mesh_shape):
    """Compare each program on plain tensors with three runs on DTensors: one cold, two cached."""
    torch.set_num_threads(1)
    mesh = sw.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
    wrong = []
    for name, program in CALLS.items():
        dense = [A, B, W, N, T]
        expected = program(*dense)
        for first in (Shard(0), Replicate()):
            placements = [first] + [Replicate()] * (mesh.ndim - 1)
            for time in range(3):
                tensors = [sw.distribute_tensor(x, mesh, placements if x is not W else None) for x in dense]
                for i, (got, want) in enumerate(zip(program(*tensors), expected, strict=True)):
                    full = got.full_tensor()
                    if got.dtype != want.dtype or full.dtype != want.dtype or got.shape != want.shape:
                        wrong.append((name, i, first, time, got.dtype, got.shape))
                    elif not torch.allclose(full, want, rtol=1e-12, atol=1e-12):
                        wrong.append((name, i, first, time, full, want))
                    elif got.stride() != want.stride() and name in ("dims", "slices"):
                        wrong.append((name, i, "stride", got.stride(), want.stride()))
    return wrong


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_every_form_of_call_gives_the_dense_result(workers, shape):
    assert workers.run(on_ranks, shape) == [[]] * 4


def blocks_fit(rank_of):
    """Whether blocks have the shapes of their layouts, on ranks without elements too."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(torch.arange(5.0).view(1, 5), mesh, [Shard(0)]).view(5)
    seen = [x.unsqueeze(-1), x.unsqueeze(0), torch.cat([x.unsqueeze(-1), x.unsqueeze(-1)], -1)]
    fits = [tuple(v._local_tensor.shape) == block_shape(v.sharding, (rank_of(),)) for v in seen]
    return all(fits), seen[2].full_tensor().tolist() == [[i, i] for i in range(5)]


def test_views_of_a_tensor_that_one_rank_holds(workers):
    assert workers.run(blocks_fit, torch.distributed.get_rank) == [(True, True)] * 4


def views_share_memory():
    """Whether views share the memory of their base, and copies do not."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(T, mesh, [Shard(0)])
    views = [
        x.view(5, 24),
        x.unsqueeze(0),
        x.transpose(0, 1),
        x[:, 1:],
        x.select(1, 2),
        x.detach(),
        *x.split(2, 2),
    ]
    copies = [x.clone(), x + 0]
    own = x._local_tensor.untyped_storage().data_ptr()
    empty = x._local_tensor.numel() == 0
    shared = all(v._local_tensor.untyped_storage().data_ptr() == own for v in views)
    separate = all(c._local_tensor.untyped_storage().data_ptr() != own for c in copies)
    x.zero_()
    return shared and (separate or empty) and all(int(v.abs().sum().full_tensor()) == 0 for v in views)


def test_views_share_memory(workers):
    assert all(workers.run(views_share_memory))


def new_routes():
    """The number of routes added by calls with other numbers, and by calls with other sizes."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(A, mesh, [Shard(0)])

    def count():
        return sum(len(entry.runs) for entry, *_ in current_settings().routes.values())

    def use(number):
        return [x * number, x + number, torch.add(x, x, alpha=number), x.clone().mul_(number), number - x]

    use(1.5)
    before = count()
    for i in range(20):
        use(i + 0.25)
    by_numbers = count() - before
    for i in range(3):
        x[:, i:]
    return by_numbers, count() - before - by_numbers


def test_numbers_that_no_rule_reads_add_no_routes(workers):
    assert workers.run(new_routes) == [(0, 3)] * 4


def test_every_op_of_the_lists_has_a_python_binding():
    for name in _FUNCTIONS | _METHODS | _NN_FUNCTIONS:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            func = getattr(packet, overload)
            if any(a.is_out for a in func._schema.arguments):
                continue
            assert python_binding(func) is not boxed_call(func), func


def test_the_constructor_detaches_the_block():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        spec = sw.ones(4, device_mesh=mesh, placements=[Shard(0)])._spec
        with pytest.warns(UserWarning, match="requires gradients"):
            x = DTensor(torch.ones(2, requires_grad=True), spec)
    assert not x._local_tensor.requires_grad
    assert not x.requires_grad
