"""PerRank: one tensor per rank, each with its own graph; errors where a value differs between ranks."""

from __future__ import annotations

import copy
import io
import math
import pickle
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise import PerRank, Shard, distribute_tensor, init_device_mesh, per_rank, simulate
from shardwise.comm import map_ranks, spread

EXPLAINED = r"[\s\S]*\n  why: .+\n  fix: .+"


def numbered(n=4, shape=(2, 2)):
    """A tensor full of the rank, on each rank."""
    return PerRank({r: torch.full(shape, float(r)) for r in range(n)})


def growing(n=4):
    """A tensor with as many rows as its rank, on each rank."""
    return PerRank({r: torch.full((r, 2), float(r), requires_grad=True) for r in range(n)})


# ---- ops


OPS = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "matmul with a plain tensor": lambda x: x @ torch.eye(2),
    "a plain tensor first": lambda x: torch.add(torch.ones(2, 2), x),
    "transpose": lambda x: x.T,
    "index": lambda x: x[0],
    "mask": lambda x: x[x > 1],
    "sum": lambda x: x.sum(0),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack((x, x * 2)),
    "where": lambda x: torch.where(x > 1, x, -x),
    "softmax": lambda x: x.softmax(-1),
    "cast": lambda x: x.to(torch.float64),
    "nonzero": lambda x: x.nonzero(),
    "linear": lambda x: nn.functional.linear(x, torch.ones(3, 2)),
    "a module": lambda x: nn.Linear(2, 3).requires_grad_(False)(x) * 0,
    "keyword arguments": lambda x: torch.add(input=x, other=x, alpha=2),
    "new_zeros": lambda x: x.new_zeros(3),
    "comparison": lambda x: x == 1,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_applies_to_each_rank(name):
    x = numbered()
    got = OPS[name](x)
    assert isinstance(got, PerRank)
    for mine, block in zip(got.ranks, x.ranks, strict=True):
        assert torch.equal(mine, OPS[name](block))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_blocks_may_differ_in_shape(sizes):
    x = PerRank({r: torch.arange(float(n)) for r, n in enumerate(sizes)})
    assert [t.tolist() for t in (x * 2).ranks] == [[2.0 * i for i in range(n)] for n in sizes]
    assert [t.tolist() for t in x.sum().ranks] == [sum(range(n)) for n in sizes]
    assert x.dim() == 1


def test_each_of_several_results_is_per_rank():
    x = numbered()
    values, indices = x.max(dim=0)
    assert [v.tolist() for v in values.ranks] == [[r, r] for r in range(4)]
    assert isinstance(indices, PerRank)
    assert [[t.tolist() for t in half.ranks] for half in x.split(1)] == [[[[r, r]] for r in range(4)]] * 2
    assert len(list(x)) == len(x.unbind(1)) == 2


def test_results_with_names_keep_them():
    x = PerRank({0: torch.tensor([[1.0, 5.0]]), 1: torch.tensor([[4.0, 2.0]])})
    assert [t.tolist() for t in x.max(1).values.ranks] == [[5], [4]]
    assert [t.tolist() for t in torch.sort(x).indices.ranks] == [[[0, 1]], [[1, 0]]]
    assert type(x.topk(1)) is torch.return_types.topk


def test_in_place_ops_change_the_blocks():
    x = numbered()
    blocks = x.ranks
    assert x.add_(1).ranks[2] is blocks[2]
    x[0] = -5.0
    x[1] = x[0] * 2
    x += numbered()
    assert [b.tolist() for b in blocks] == [[[r - 5.0] * 2, [r - 10.0] * 2] for r in range(4)]


def test_ranks_and_blocks():
    x = PerRank({3: torch.zeros(2), 1: torch.ones(2)})
    assert x.of_rank(1).tolist() == [1, 1]
    assert [t.tolist() for t in x.ranks] == [[0, 0], [1, 1]]
    assert repr(x) == "PerRank(\n  3: tensor([0., 0.])\n  1: tensor([1., 1.])\n)"
    with pytest.raises(RuntimeError, match=r"have different ranks: \(3, 1\) and \(0, 1, 2, 3\)" + EXPLAINED):
        x + numbered()
    with pytest.raises(ValueError, match=EXPLAINED):
        PerRank({})


def test_spread_copies_for_each_rank():
    x = spread(torch.zeros(2), range(3))
    x.ranks[1].fill_(1)
    assert [t.tolist() for t in x.ranks] == [[0, 0], [1, 1], [0, 0]]


def test_copies():
    for copy_of in (copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), save_and_load):
        x = numbered()
        y = copy_of(x)
        assert isinstance(y, PerRank)
        assert list(y._blocks) == [0, 1, 2, 3]
        y.zero_()
        assert [t[0, 0].item() for t in x.ranks] == [0, 1, 2, 3]


def save_and_load(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# ---- values


def test_values_that_are_equal_on_all_ranks():
    x = PerRank({r: torch.tensor([[1.5, 2.0]]) for r in range(3)})
    assert (x.shape, x.size(), x.ndim, x.numel(), len(x)) == ((1, 2), (1, 2), 2, 2, 1)
    assert (x.dtype, x.device.type, x.is_contiguous(), x.stride()) == (torch.float32, "cpu", True, (2, 1))
    assert (x.sum().item(), float(x.sum()), int(x.sum()), bool(x.sum() > 3)) == (3.5, 3.5, 3, True)
    assert f"{x.sum().item():.2f} {x.sum():.2f}" == "3.50 3.50"
    assert x.tolist() == [[1.5, 2.0]]
    assert isinstance(x.numpy(), np.ndarray)
    assert x.numpy().tolist() == np.asarray(x).tolist() == [[1.5, 2.0]]
    assert 2.0 in x
    assert torch.equal(x, x.clone())
    assert torch.allclose(x, x + 1e-9)
    assert not torch.equal(x, x + 1)
    nan = PerRank({r: torch.tensor([float("nan")]) for r in range(2)})
    assert math.isnan(nan.item())
    assert math.isnan(nan.numpy()[0])
    assert math.isnan(nan.tolist()[0])


QUERIES = {
    "shape": lambda x: x.shape,
    "size": lambda x: x.size(),
    "numel": lambda x: x.numel(),
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "__len__": lambda x: len(x),
    "__float__": lambda x: float(x.detach().sum()),
    "__bool__": lambda x: bool(x.sum() > 3),
    "__format__": lambda x: f"{x.detach().sum():.1f}",
    "unbind": lambda x: list(x),
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_value_that_differs_between_ranks_is_an_error(name):
    with pytest.raises(RuntimeError, match=EXPLAINED) as caught:
        QUERIES[name](growing())
    what, why, fix = str(caught.value).split("\n  ")[0], *str(caught.value).split("\n  ")[-2:]
    assert what.startswith(f"{name} differs between the simulated ranks (rank 0: ")
    assert "One program runs for all ranks" in why
    assert "x.ranks" in fix


def test_the_error_names_the_attribute():
    x = PerRank({0: torch.ones(2), 1: torch.ones(2, dtype=torch.int64)})
    with pytest.raises(RuntimeError, match=r"^dtype differs .*torch.float32.*torch.int64"):
        x.dtype  # noqa: B018 - reading it is the test


def test_long_errors_are_truncated():
    x = PerRank({r: torch.ones(r) for r in range(50)})
    with pytest.raises(RuntimeError, match="…") as caught:
        x.numel()
    assert "rank 49" not in str(caught.value)


def test_assert_close():
    x = numbered(3)
    torch.testing.assert_close(x, x.clone())
    torch.testing.assert_close(x - x, torch.zeros(2, 2))
    for other in (x + 1, torch.zeros(2, 2), numbered(3, (2, 3))):
        with pytest.raises((AssertionError, RuntimeError)):
            torch.testing.assert_close(x, other)


# ---- gradients


def test_each_rank_has_its_own_graph():
    x = growing()
    assert (x.requires_grad, x.is_leaf, x.grad) == (True, True, None)
    (x * x).sum().backward()
    assert [g.tolist() for g in x.grad.ranks] == [[[2.0 * r] * 2] * r for r in range(4)]
    (x * x).sum().backward()
    assert x.grad.ranks[3][0, 0] == 12
    x.grad = None
    assert all(b.grad is None for b in x.ranks)


def test_backward_with_a_gradient_per_rank_or_for_all():
    x = growing()
    (x * 2).sum(0).backward(PerRank({r: torch.full((2,), float(r)) for r in range(4)}))
    assert [g.tolist() for g in x.grad.ranks] == [[[2.0 * r] * 2] * r for r in range(4)]
    y = numbered().requires_grad_()
    (y * 2).backward(torch.ones(2, 2), retain_graph=False)
    assert [g.tolist() for g in y.grad.ranks] == [[[2.0] * 2] * 2] * 4
    z = numbered().requires_grad_()
    torch.autograd.backward([(z * 3).sum(), z.sum()])
    assert [g.tolist() for g in z.grad.ranks] == [[[4.0] * 2] * 2] * 4


def test_autograd_grad_once_and_twice():
    x, y = growing(), numbered().requires_grad_()
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    assert [t.tolist() for t in g.ranks] == [[[3.0 * r**2] * 2] * r for r in range(4)]
    (h,) = torch.autograd.grad(g.sum(), [x])
    assert [t.tolist() for t in h.ranks] == [[[6.0 * r] * 2] * r for r in range(4)]
    a, b = torch.autograd.grad((x * 2).sum(), [x, y], allow_unused=True)
    assert isinstance(a, PerRank)
    assert b is None
    with pytest.raises(RuntimeError):
        torch.autograd.grad((x * 2).sum(), [x, y])


def test_the_gradient_of_an_unused_block_is_zero():
    x = numbered().requires_grad_()
    with simulate(4):
        per_rank(
            lambda rank, t: (t * rank).sum() if rank % 2 else t.detach().sum().requires_grad_(), x
        ).backward()
    assert [g.tolist() for g in x.grad.ranks] == [[[float(r if r % 2 else 0)] * 2] * 2 for r in range(4)]


def test_a_hook_runs_once_with_the_gradients_of_all_ranks():
    x = numbered().requires_grad_()
    seen = []
    handle = x.register_hook(lambda g: seen.append(g) or g * 10)
    x.sum().backward()
    assert [tuple(g.shape) for g in seen] == [(2, 2)]
    assert len(seen[0].ranks) == 4
    assert [g[0, 0].item() for g in x.grad.ranks] == [10] * 4
    handle.remove()
    x.sum().backward()
    assert len(seen) == 1
    assert [g[0, 0].item() for g in x.grad.ranks] == [11] * 4


def test_a_plain_tensor_that_requires_grad_is_an_error():
    w = torch.ones(2, 2, requires_grad=True)
    x = numbered()
    for call in (
        lambda: x @ w,
        lambda: torch.matmul(w, x),
        lambda: torch.add(x, other=w),
        lambda: torch.cat([x, w]),
        lambda: nn.Linear(2, 3)(x),
    ):
        with pytest.raises(
            RuntimeError, match=r"a plain tensor that requires grad beside a PerRank one" + EXPLAINED
        ):
            call()
    with torch.no_grad():
        assert isinstance(x @ w, PerRank)
    assert isinstance(x @ w.detach(), PerRank)
    with simulate(4):
        mine = per_rank(lambda rank: w.detach().clone().requires_grad_())  # the fix in the error
        (x @ mine).sum().backward()
    assert [g[0, 0].item() for g in mine.grad.ranks] == [0, 2, 4, 6]


def test_parameters_and_an_optimizer():
    w = nn.Parameter(numbered())
    assert isinstance(w, PerRank)
    assert w.requires_grad
    (w * numbered()).sum().backward()
    torch.optim.SGD([w], lr=0.5).step()
    assert [t[0, 0].item() for t in w.ranks] == [0, 0.5, 1, 1.5]


# ---- per_rank


def test_the_function_is_called_once_for_each_rank():
    called = []
    with simulate(3):
        x = per_rank(lambda rank: called.append(rank) or torch.full((rank,), rank))
    assert called == [0, 1, 2]
    assert [t.tolist() for t in x.ranks] == [[], [1], [2, 2]]


def test_the_function_gets_the_blocks_of_its_rank():
    with simulate(3):
        x = per_rank(lambda rank: torch.tensor([rank]))
        y = per_rank(lambda rank, a, b, c, d: a + b + c["k"][0] + d, x, 10, {"k": [x]}, torch.tensor([100]))
        assert [t.item() for t in y.ranks] == [110, 112, 114]


def test_values_of_some_ranks_are_mapped_over_those():
    with simulate(4):
        x = PerRank({1: torch.tensor([1]), 3: torch.tensor([3])})
        y = per_rank(lambda rank, t: t * rank, x)
        assert {r: t.item() for r, t in y._blocks.items()} == {1: 1, 3: 9}


def test_kinds_of_results():
    with simulate(2):
        assert per_rank(lambda rank: None) is None
        assert per_rank(lambda rank: ("same", 3)) == ("same", 3)
        a, rest = per_rank(lambda rank: (torch.ones(rank), {"b": [torch.zeros(1), "text"]}))
        assert [len(t) for t in a.ranks] == [0, 1]
        assert isinstance(rest["b"][0], PerRank)
        assert rest["b"][1] == "text"


@pytest.mark.parametrize(
    "fn",
    [
        lambda rank: rank,
        lambda rank: None if rank else torch.ones(1),
        lambda rank: torch.ones(1) if rank else None,
        lambda rank: [torch.ones(1)] * (rank + 1),
        lambda rank: [torch.ones(1)] * (2 - rank),
        lambda rank: {rank: torch.ones(1)},
        lambda rank: (torch.ones(1), rank),
        lambda rank: [torch.ones(1)] if rank else (torch.ones(1),),
        lambda rank: np.array([rank]),
        lambda rank: np.ones((1 + rank, 2)),
    ],
)
def test_results_that_differ_and_are_not_tensors_are_an_error(fn):
    with simulate(2), pytest.raises(RuntimeError, match=r"differs between the simulated ranks" + EXPLAINED):
        per_rank(fn)


def test_a_block_is_not_a_distributed_tensor():
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(2), mesh)
        with pytest.raises(TypeError, match=r"DTensor" + EXPLAINED):
            per_rank(lambda rank: x)
        with pytest.raises(TypeError, match=r"PerRank" + EXPLAINED):
            per_rank(lambda rank: numbered(2))


def test_an_exception_in_the_function_propagates():
    with simulate(3), pytest.raises(ZeroDivisionError):
        per_rank(lambda rank: 1 // (2 - rank))


def test_outside_of_a_simulation_the_function_is_called_once(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # init_process_group replaces it
    assert per_rank(lambda rank, x: (rank, x + 1), torch.ones(1)) == (0, torch.tensor([2.0]))
    dist.init_process_group("fake", rank=2, world_size=3)
    try:
        assert per_rank(lambda rank, x: rank * x, 10) == 20
    finally:
        dist.destroy_process_group()


def rank_and_value(x):
    return per_rank(lambda rank, t: (rank, t + rank), x)


def test_on_real_processes_each_rank_calls_the_function(workers):
    found = workers.run(rank_and_value, torch.zeros(1))
    assert [(rank, t.item()) for rank, t in found] == [(r, r) for r in range(4)]


def test_map_ranks_of_plain_values_is_a_call():
    assert map_ranks(lambda a, b: a + b, 1, b=2) == 3


def test_what_needs_one_tensor_for_all_ranks_is_refused():
    with simulate(2):
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        block = x.requires_grad_().to_local() * 2
        with pytest.raises(RuntimeError, match="register_multi_grad_hook got the blocks"):
            torch.autograd.graph.register_multi_grad_hook([block], print)
        for value in (x.detach(), block.detach()):
            with pytest.raises(RuntimeError, match="tracing_mode='real'"):
                make_fx(lambda t: t * 2, tracing_mode="fake")(value)
