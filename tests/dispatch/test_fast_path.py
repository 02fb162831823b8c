"""The shortest ways, which only real processes take: each form of call gives the dense answer, cold and cached."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 (as everyone calls it)

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.layout import block_shape
from shardwise.plan.settings import current_settings
from shardwise.torch_internals.dispatcher import _FUNCTIONS, _METHODS, _NN_FUNCTIONS, python_binding

pytestmark = pytest.mark.processes

A = torch.arange(40, dtype=torch.float64).view(5, 8).sin() * 3
B = torch.arange(40, dtype=torch.float64).view(5, 8).cos() + 1.5
W = torch.arange(64, dtype=torch.float64).view(8, 8).cos()
N = torch.arange(40).view(5, 8) % 7 - 3
T = torch.arange(120, dtype=torch.float64).view(5, 3, 8).sin()

CALLS = {
    "alone": lambda a, b, w, n, t: [a.exp(), -a, a.detach(), a.clone(), a.sum(), a.abs().sqrt(), n.sign()],
    "two": lambda a, b, w, n, t: [a + b, a * b, a / b, a - b, a > b, torch.maximum(a, b), a @ w, a.abs() ** b],
    "two and more": lambda a, b, w, n, t: [torch.add(a, b, alpha=3), torch.sub(a, b, alpha=0.5)],
    "three": lambda a, b, w, n, t: [torch.where(a > b, a, b), torch.addcmul(a, b, b), torch.lerp(a, b, 0.3)],
    "numbers": lambda a, b, w, n, t: [a * 2, a * 2.0, a + 1, a + True, 3 / b, a.pow(2), b.pow(0.5), a.clamp(-1, 1)],
    "numbers that are equal": lambda a, b, w, n, t: [n * 1, n * 1.0, n * True, n + 1, n + 1.0, n.sum(dim=1), n == 1],
    "dims": lambda a, b, w, n, t: [t.transpose(0, 1), t.transpose(1, 2), t.permute(2, 0, 1), a.t(), t.select(2, -1)],
    "reduced": lambda a, b, w, n, t: [t.sum(1), t.sum((0, 2), keepdim=True), t.mean(-1), t.amax(1), a.mean(), n.sum()],
    "dtypes": lambda a, b, w, n, t: [a.to(torch.float32), n.to(torch.int8), n.sum(1, dtype=torch.int32), a.float() + 1],
    "slices": lambda a, b, w, n, t: [a[:, 2:6], a[:, -3:], a[:, ::2], t[:, 1], t[..., 3:100], a[:, 5:2], a[:]],
    "slices that only begin": lambda a, b, w, n, t: [
        torch.ops.aten.slice.Tensor(a, 1),
        torch.ops.aten.slice.Tensor(a, 1, 3),
        torch.ops.aten.slice.Tensor(t, -1, None, 3),
        torch.ops.aten.slice.Tensor(t, 1, 1, None),
    ],
    "shapes": lambda a, b, w, n, t: [t.view(5, 24), t.flatten(), t.unsqueeze(1), t.unsqueeze(-1), t.reshape(15, 8)],
    "one of one": lambda a, b, w, n, t: [t[:, :1].squeeze(1), t[:, :1].squeeze(), t.unsqueeze(0).squeeze()],
    "not dense": lambda a, b, w, n, t: [t.transpose(1, 2)[..., :2].reshape(5, 16), a.t()[2:5].t().reshape(-1)],
    "lists": lambda a, b, w, n, t: [torch.cat([a, b], 1), torch.cat([a, b, a], -1), torch.stack([a, b], 2)],
    "several": lambda a, b, w, n, t: [*a.split(3, 1), *t.unbind(1), *a.max(1), *F.layer_norm(t, (8,), w[0], w[1]).split(2, 1)],
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
    """Each program on plain tensors, then three times on DTensors: cold, and twice by what is kept."""
    torch.set_num_threads(1)
    mesh = sw.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
    wrong = []
    for name, program in CALLS.items():
        dense = [A, B, W, N, T]
        expected = program(*dense)
        for lies in ([Shard(0)], [Replicate()]):
            there = lies + [Replicate()] * (mesh.ndim - 1)
            for time in range(3):
                given = [sw.distribute_tensor(x, mesh, there if x is not W else None) for x in dense]
                for i, (got, want) in enumerate(zip(program(*given), expected, strict=True)):
                    whole = got.full_tensor()
                    if got.dtype != want.dtype or whole.dtype != want.dtype or got.shape != want.shape:
                        wrong.append((name, i, lies, time, got.dtype, got.shape))
                    elif not torch.allclose(whole, want, rtol=1e-12, atol=1e-12):
                        wrong.append((name, i, lies, time, whole, want))
                    elif got.stride() != want.stride() and name in ("dims", "slices"):
                        wrong.append((name, i, "stride", got.stride(), want.stride()))
    return wrong


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_every_form_of_call_gives_the_dense_answer(workers, shape):
    assert workers.run(on_ranks, shape) == [[]] * 4


def lone(rank_of):
    """A view whose axis finds another dim to be idle on: blocks without elements lie as the layout says."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(torch.arange(5.0).view(1, 5), mesh, [Shard(0)]).view(5)
    seen = [x.unsqueeze(-1), x.unsqueeze(0), torch.cat([x.unsqueeze(-1), x.unsqueeze(-1)], -1)]
    fits = [tuple(v._local_tensor.shape) == block_shape(v.sharding, (rank_of(),)) for v in seen]
    return all(fits), seen[2].full_tensor().tolist() == [[i, i] for i in range(5)]


def test_views_of_what_one_rank_has(workers):
    assert workers.run(lone, torch.distributed.get_rank) == [(True, True)] * 4


def shared():
    """Whether views share the memory of what they are of, as they do elsewhere, and writes are seen on both sides."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(T, mesh, [Shard(0)])
    seen = [
        x.view(5, 24),
        x.unsqueeze(0),
        x.transpose(0, 1),
        x[:, 1:],
        x.select(1, 2),
        x.detach(),
        *x.split(2, 2),
    ]
    apart = [x.clone(), x + 0]
    own = x._local_tensor.untyped_storage().data_ptr()
    empty = x._local_tensor.numel() == 0
    views = all(v._local_tensor.untyped_storage().data_ptr() == own for v in seen)
    copies = all(c._local_tensor.untyped_storage().data_ptr() != own for c in apart)
    x.zero_()
    return views and (copies or empty) and all(int(v.abs().sum().full_tensor()) == 0 for v in seen)


def test_views_share_memory(workers):
    assert all(workers.run(shared))


def kept():
    """How many recipes more there are after numbers changed, and after sizes did."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(A, mesh, [Shard(0)])

    def count():
        return sum(len(entry.runs) for entry in current_settings().routes.values())

    def use(number):
        return [x * number, x + number, torch.add(x, x, alpha=number), x.clone().mul_(number), number - x]

    use(1.5)
    before = count()
    for i in range(20):
        use(i + 0.25)
    same = count() - before
    for i in range(3):
        x[:, i:]
    return same, count() - before - same


def test_numbers_that_no_row_reads_make_no_new_recipes(workers):
    assert workers.run(kept) == [(0, 3)] * 4


def test_bindings_take_what_their_ops_take():
    for name in _FUNCTIONS | _METHODS | _NN_FUNCTIONS:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            func = getattr(packet, overload)
            if any(a.is_out for a in func._schema.arguments):
                continue
            assert callable(python_binding(func)), func


def test_a_wrapped_block_is_a_dtensor_without_a_graph():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        made = DTensor(
            torch.ones(2, requires_grad=True), sw.ones(4, device_mesh=mesh, placements=[Shard(0)])._spec
        )
    assert not made._local_tensor.requires_grad
    assert not made.requires_grad
