"""Autograd functions, hooks and collectives of simulated ranks: what they return, and errors where they cannot be right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from shardwise import PerRank, init_device_mesh, per_rank, simulate

EXPLAINED = r"[\s\S]*\n  why: .+\n  fix: .+"


def numbered(n=3, shape=(2,)):
    """A leaf full of the rank + 1, on each rank."""
    return PerRank({r: torch.full(shape, r + 1.0, requires_grad=True) for r in range(n)})


def listed(x):
    return [t.tolist() for t in x.ranks]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor=1.0):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad, None


class WrongCount(Square):
    @staticmethod
    def backward(ctx, grad):
        return ()


def test_a_function_keeps_its_gradient():
    x = numbered()
    y = Square.apply(x, 1.0)
    assert y.grad_fn.name() == "SquareBackward"
    assert y.requires_grad
    y.sum().backward()
    assert listed(x.grad) == [[2, 2], [4, 4], [6, 6]]
    assert numbered(3).detach().grad_fn is None


def test_a_function_is_differentiated_twice():
    x = numbered()
    (grad,) = torch.autograd.grad((Square.apply(x, 1.0) * x).sum(), x, create_graph=True)
    grad.sum().backward()
    assert listed(x.grad) == [[6, 6], [12, 12], [18, 18]]


def test_a_gradient_is_missing():
    with pytest.raises(
        RuntimeError, match=r"WrongCount.backward returned 0 gradients for 2 arguments" + EXPLAINED
    ):
        WrongCount.apply(numbered(), 1.0).sum().backward()
    with pytest.raises(TypeError, match=r"keyword arguments factor" + EXPLAINED):
        Square.apply(numbered(), factor=1.0)
    with pytest.raises(RuntimeError, match=r"a plain tensor that requires grad" + EXPLAINED):
        Square.apply(numbered(), torch.ones(2, requires_grad=True))


def test_plain_tensors_are_unchanged():
    x = torch.full((2,), 3.0, requires_grad=True)
    Square.apply(x, 1.0).sum().backward()
    assert x.grad.tolist() == [6, 6]


def test_a_gradient_is_reduced_where_it_is_accumulated():
    w = nn.Parameter(numbered().detach())
    with simulate(3):
        handle = w.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        (w * w).sum().backward()
        assert listed(w.grad) == [[12, 12]] * 3
        handle.remove()
        w.grad = None
        w.sum().backward()
    assert listed(w.grad) == [[1, 1]] * 3


def test_a_hook_of_ranks_without_a_gradient_is_not_called():
    w, seen = numbered(), []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p._blocks)))
    with simulate(3):
        per_rank(lambda rank, t: (t if rank else t.detach().requires_grad_()).sum(), w).backward()
    assert seen == [(1, 2)]


def test_a_collective_in_a_hook_that_some_ranks_do_not_call_is_an_error():
    w = numbered()
    w.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    with (
        simulate(3),
        pytest.raises(RuntimeError, match=r"got a PerRank tensor of ranks \(1, 2\)" + EXPLAINED),
    ):
        per_rank(lambda rank, t: (t if rank else t.detach().requires_grad_()).sum(), w).backward()


def test_a_hook_that_is_registered_after_the_tensor_was_used():
    x = numbered()
    y = x * 2
    x.register_hook(lambda grad: grad * 10)
    y.sum().backward()
    assert listed(x.grad) == [[20, 20]] * 3
    z = x * 3
    with pytest.raises(RuntimeError, match=r"had been used before" + EXPLAINED):
        (y.detach() + z + per_rank_use_before_hook(x)).sum().backward()


def per_rank_use_before_hook(x):
    """A use of the blocks that the hooks do not see."""
    return PerRank({r: b * 5 for r, b in x._blocks.items()})


def test_a_tensor_without_a_gradient_has_no_hooks():
    with pytest.raises(RuntimeError, match=r"doesn't require gradient" + EXPLAINED):
        numbered().detach().register_hook(lambda grad: grad)


def test_nodes_of_single_ranks_have_no_hooks():
    y = numbered() * 2
    assert y.grad_fn.name() == "MulBackward0"
    with pytest.raises(RuntimeError, match=r"each rank has its own MulBackward0" + EXPLAINED):
        y.grad_fn.register_hook(lambda a, b: None)


def test_transforms_of_per_rank_tensors_are_errors():
    x, w = numbered(), numbered()
    with pytest.raises(RuntimeError, match=r"inside a torch.func transform" + EXPLAINED):
        torch.func.grad(lambda x: (x * w).sum())(x.detach())
    with pytest.raises(RuntimeError, match=r"bypasses torch functions" + EXPLAINED):
        torch.func.vmap(lambda x: x * 2)(x)


# ---- collectives of plain tensors, which are the same on all ranks


def test_collectives_of_plain_tensors():
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.tensor([1.0, 2.0])
        dist.all_reduce(x)
        assert x.tolist() == [4, 8]
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=mesh.get_group("tp"))
        assert x.tolist() == [4, 8]
        assert funcol.all_reduce(x, "sum", mesh.get_group("tp")).tolist() == [8, 16]
        assert funcol.all_gather_single(x, 0, mesh.get_group("tp")).tolist() == [4, 8, 4, 8]
        parts = [torch.empty(2) for _ in range(4)]
        dist.all_gather(parts, x)
        assert [p.tolist() for p in parts] == [[4, 8]] * 4
        found = [None] * 4
        dist.all_gather_object(found, {"a": 1})
        assert found == [{"a": 1}] * 4
        dist.broadcast(x, 0)
        dist.barrier()
        for call in (
            lambda: dist.reduce_scatter_single(torch.empty(1), torch.ones(4)),
            lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4)),
            lambda: dist.send(x, 1),
            lambda: dist.recv(x, 1),
            lambda: dist.scatter(x, [x] * 4),
            lambda: funcol.all_to_all_single(torch.ones(4), None, None, mesh.get_group("tp")),
        ):
            with pytest.raises(RuntimeError, match=r"got plain tensors in a simulation" + EXPLAINED):
                call()


def test_collectives_inside_per_rank_are_errors():
    with simulate(2):
        with pytest.raises(
            RuntimeError, match=r"all_reduce was called inside per_rank, for rank 0" + EXPLAINED
        ):
            per_rank(lambda rank: dist.all_reduce(torch.ones(2)))
        assert per_rank(lambda rank: torch.tensor(dist.get_rank())).ranks == (
            torch.tensor(0),
            torch.tensor(1),
        )
        assert dist.get_rank() == 0


def test_a_plain_output_receives_what_is_the_same_on_all_ranks():
    with simulate(2):
        x = per_rank(lambda rank: torch.tensor([1.0 * rank]))
        out = torch.empty(2)
        dist.all_gather_single(out, x)
        assert out.tolist() == [0, 1]
        with pytest.raises(RuntimeError, match=r"got a Tensor as its output" + EXPLAINED):
            dist.reduce_scatter_single(torch.empty(1), per_rank(lambda rank: torch.tensor([1.0, 2.0])))


def test_reductions_without_a_gradient():
    with simulate(2):
        x = numbered(2)
        y = funcol.all_reduce(x, "max", dist.group.WORLD)
        assert listed(y) == [[2, 2]] * 2
        with pytest.raises(RuntimeError, match=r"only supports 'sum' reduction" + EXPLAINED):
            y.sum().backward()


def test_the_world_is_as_before():
    with simulate(2):
        dist.all_reduce(torch.ones(2))
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        x = torch.ones(2)
        dist.all_reduce(x)  # the fake backend of torch does nothing
        assert x.tolist() == [1, 1]
        assert funcol.all_reduce(x, "sum", dist.group.WORLD).tolist() == [1, 1]
    finally:
        dist.destroy_process_group()
