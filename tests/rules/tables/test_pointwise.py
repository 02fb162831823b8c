"""Reductions that pass because all tensors have them."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate
from shardwise.debug import CommDebugMode


@pytest.fixture
def line():
    with sw.simulate(3):
        yield sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))


def _pending(line, reduce_op, *shape, dtype=torch.float64):
    """A tensor with other values on each rank."""
    blocks = sw.per_rank(
        lambda rank: torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
    )
    return sw.DTensor.from_local(blocks, line, [Partial(reduce_op)])


@pytest.mark.parametrize(("op", "reduce_op"), [(torch.maximum, "max"), (torch.minimum, "min")])
def test_the_greater_of_pending_maxima_stays_pending(line, op, reduce_op):
    x, y = _pending(line, reduce_op, 4, 2), _pending(line, reduce_op, 2)
    with CommDebugMode() as counts:
        z = op(x, y)
    assert counts.get_total_counts() == 0
    assert z.placements == (Partial(reduce_op),)
    assert torch.equal(z.full_tensor(), op(x.full_tensor(), y.full_tensor()))
    other = _pending(line, "min" if reduce_op == "max" else "max", 2)
    assert torch.equal(op(x, other).full_tensor(), op(x.full_tensor(), other.full_tensor()))


@pytest.mark.parametrize("reduce_op", ["sum", "max", "min", "product"])
def test_a_copy_of_a_pending_tensor_into_another_sends_nothing(line, reduce_op):
    x, y = _pending(line, reduce_op, 2), _pending(line, reduce_op, 4, 2)
    with CommDebugMode() as counts:
        y.copy_(x)
    assert counts.get_total_counts() == 0
    assert y.placements == (Partial(reduce_op),)
    assert torch.equal(y.full_tensor(), x.full_tensor().expand(4, 2))


def test_a_cast_of_a_pending_maximum_reduces_it_first(line):
    x, y = _pending(line, "max", 5), _pending(line, "max", 5, dtype=torch.bool)
    want = x.full_tensor().bool()
    y.copy_(x)
    assert torch.equal(y.full_tensor(), want)


@pytest.mark.parametrize("accumulate", [False, True])
def test_pending_values_are_put_into_a_pending_tensor(line, accumulate):
    x, values = _pending(line, "sum", 4, 3), _pending(line, "sum", 3)
    with CommDebugMode() as counts:
        y = torch.index_put(x, [torch.tensor(1)], values, accumulate)
    assert counts.get_total_counts() == 0
    assert y.placements == (Partial("sum"),)
    want = torch.index_put(x.full_tensor(), [torch.tensor(1)], values.full_tensor(), accumulate)
    torch.testing.assert_close(y.full_tensor(), want)
    whole = values.redistribute(placements=[Replicate()])
    torch.testing.assert_close(torch.index_put(x, [torch.tensor(1)], whole, accumulate).full_tensor(), want)
