"""Reductions that pass: because all tensors have them, from one tensor beside replicated ones, or of one tensor."""

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


@pytest.mark.parametrize("op", [torch.maximum, torch.minimum])
@pytest.mark.parametrize("reduce_op", ["max", "min"])
@pytest.mark.parametrize("first", [True, False])
def test_the_greater_of_a_pending_extremum_and_a_replicated_tensor_stays_pending(line, op, reduce_op, first):
    x = _pending(line, reduce_op, 4, 2)
    whole = torch.randn(2, dtype=torch.float64)
    whole[0] = float("nan")
    y = sw.distribute_tensor(whole, line, [Replicate()])
    with CommDebugMode() as counts:
        z = op(x, y) if first else op(y, x)
    assert counts.get_total_counts() == 0
    assert z.placements == (Partial(reduce_op),)
    torch.testing.assert_close(z.full_tensor(), op(x.full_tensor(), whole), equal_nan=True)


def test_a_pending_maximum_beside_a_pending_sum_reduces_the_sum_only(line):
    x, y = _pending(line, "max", 4), _pending(line, "sum", 4)
    with CommDebugMode() as counts:
        z = torch.maximum(x, y)
    assert counts.get_total_counts() == 1
    assert torch.equal(z.full_tensor(), torch.maximum(x.full_tensor(), y.full_tensor()))


@pytest.mark.parametrize("op", [torch.sign, torch.sgn])
def test_the_sign_of_a_pending_maximum_that_is_nan_is_zero(line, op):
    blocks = sw.per_rank(lambda rank: torch.tensor([float("nan"), 1.0] if rank else [1.0, 2.0]))
    x = sw.DTensor.from_local(blocks, line, [Partial("max")])
    assert op(x).full_tensor().tolist() == [0.0, 1.0]
    exact = _pending(line, "max", 4, dtype=torch.int64)
    assert op(exact).placements == (Partial("max"),)


def test_ops_of_prims_are_pointwise(line):
    prims = torch.ops.prims
    whole = torch.rand(6, 2) * 0.8 + 0.1
    x = sw.distribute_tensor(whole, line, [sw.Shard(0)])
    with CommDebugMode() as counts:
        for op in (prims.bessel_i0e, prims.ndtri, prims.rsqrt, prims.view_of, torch.special.erfcx):
            y = op(x)
            assert y.placements == (sw.Shard(0),)
            torch.testing.assert_close(y.to_local().ranks[1], op(whole[2:4]))
        for op in (prims.div, prims.hypot, prims.ne):
            y = op(x, x)
            assert y.placements == (sw.Shard(0),)
            torch.testing.assert_close(y.to_local().ranks[2], op(whole[4:], whole[4:]))
    assert counts.get_total_counts() == 0
    pending = _pending(line, "sum", 3)
    assert prims.neg(pending).placements == (Partial("sum"),)
    torch.testing.assert_close(prims.exp(pending).full_tensor(), pending.full_tensor().exp())
