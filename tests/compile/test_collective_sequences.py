"""Compiled programs run the same collectives in the same order on all ranks, whatever the blocks of a rank are.

CI compares programs whose ranks differ most; SHARDWISE_DEEP=1 all of the matrix, with all backends, on 3 ranks.
"""

import os

import pytest
import torch
from tests.compile.collective_sequences import NOT_ON_3, compare, mismatch, noted_collectives, sequence
from tests.compile.matrix import PROGRAMS, P, R, tensor
from torch.utils.checkpoint import checkpoint

import shardwise as sw

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
QUICK = (
    "slices uneven convolution_with_halo sort_and_cumsum cat_and_stack several_outputs checkpointed".split()
)


def reduced(block, mesh):
    return sw.DTensor.from_local(block, mesh, [P]).redistribute(mesh, [R]).to_local()


def equal_on_one_rank(mesh):
    """Two collectives that have the same input on rank 0."""
    rank = mesh.get_rank()
    return lambda x: reduced(x * 2, mesh) * reduced(x * (2 + rank), mesh).sin(), (x_of(),)


def unused_on_one_rank(mesh):
    """A collective whose result rank 1 does not use, before another that all use."""

    def fn(x):
        y = reduced(x.sin(), mesh)
        z = reduced(x.cos(), mesh)
        return z + y.exp() if mesh.get_rank() == 0 else z * 2

    return fn, (x_of(),)


def unused_in_backward(mesh):
    """The same in a backward pass, and one that sends what does not depend on the gradients on rank 1."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            first = reduced(grad * 3, mesh)
            second = reduced(grad if mesh.get_rank() == 0 else x, mesh)
            return first + second if mesh.get_rank() == 0 else grad + second

    return lambda x: Function.apply(reduced(x, mesh)), (x_of(),)


def recomputed(mesh):
    """Collectives that a checkpoint runs again, and exchanges of rows that not all ranks send."""

    def layer(x):
        y = (x.sin() @ x.t()).redistribute(tp=R)
        return (y[1:] * y[:-1]).sin().sum() + x * x[1:3].exp().sum() + x.cos()

    def fn(x):
        for _ in range(3):
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    return fn, (tensor(mesh, 4, 6),)


def x_of():
    return torch.arange(6.0).view(2, 3).requires_grad_()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", *(["inductor"] if DEEP else [])])
@pytest.mark.parametrize("make", [equal_on_one_rank, unused_on_one_rank, unused_in_backward, recomputed])
def test_ranks_that_use_their_results_in_other_ways(make, backend):
    found = [sequence(make, backend, rank, 3) for rank in range(3)]
    assert mismatch(found) is None
    assert len(found[0]) >= 2


@pytest.mark.parametrize("name", PROGRAMS if DEEP else QUICK)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"] if DEEP else ["aot_eager"])
def test_matrix(name, backend):
    ranks = 2 if name in NOT_ON_3 else 3
    assert compare(name, backend, ranks)[0] is None


def test_inductor():
    assert compare("slices", "inductor", 2) == (None, 6)


def test_a_difference_is_found():
    def differing(mesh):
        def fn(x):
            return reduced(x, mesh) + (reduced(x * 2, mesh) if mesh.get_rank() == 0 else x)

        return fn, (x_of(),)

    assert "numbers of collectives" in mismatch([sequence(differing, "eager", r, 2) for r in range(2)])


def test_equal_collectives_of_all_ranks_are_noted():
    with sw.compile.fake_mesh((2,), ("tp",)) as mesh, noted_collectives() as seen:
        tensor(mesh, 4, 6).full_tensor()
    assert [s.kind for s in seen] == ["all_gather"]
