"""Ops without a rule: decomposed where a dry run sends less than gathering, with the dense result."""

import pytest
import torch

import shardwise as sw
from shardwise.call.op_call import OpCall
from shardwise.call.schema import op_info
from shardwise.call.variants import program_for
from shardwise.comm import counting
from shardwise.dispatch import find_route, routes
from shardwise.dispatch.dry_run import dry_run
from shardwise.plan.settings import current_costs, forget_decisions
from shardwise.rules.table import TABLE
from shardwise.torch_internals.dispatcher import is_composite

aten = torch.ops.aten


@pytest.fixture
def mesh():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def distribute(mesh, t, *placements):
    return sw.distribute_tensor(t, mesh, list(placements) or [sw.Shard(0)])


def full(t):
    return t.full_tensor().ranks[2]


@pytest.mark.parametrize("rows", [16, 7])  # 7 rows on 4 ranks: the last block is short
@pytest.mark.parametrize(
    "op",
    [
        lambda x: torch.mvlgamma(x.abs() + 5, 3),
        lambda x: torch.special.ndtr(x),
        lambda x: torch.nn.functional.logsigmoid(x).rad2deg(),
    ],
)
def test_a_decomposition_into_ops_with_rules_sends_nothing(mesh, op, rows):
    dense = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = distribute(mesh, dense)
    with counting() as ledger:
        got = op(x)
    assert ledger.bytes == 0
    torch.testing.assert_close(full(got), op(dense))


@pytest.mark.parametrize("placements", [[sw.Shard(0)], [sw.Shard(1)], [sw.Replicate()]])
def test_an_out_tensor_keeps_its_layout(mesh, placements):
    a, b = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    out = distribute(mesh, torch.zeros(8, 4, dtype=torch.float64), *placements)
    block = out._local_tensor
    got = torch.add(distribute(mesh, a), distribute(mesh, b), alpha=2, out=out)
    assert got is out
    assert out.placements == tuple(placements)
    assert out._local_tensor is block
    torch.testing.assert_close(full(out), a + 2 * b)


def test_an_op_with_several_out_tensors(mesh):
    dense = torch.randn(8, 4, dtype=torch.float64)
    values = distribute(mesh, torch.zeros(8, dtype=torch.float64))
    indices = distribute(mesh, torch.zeros(8, dtype=torch.int64))
    x = distribute(mesh, dense)
    with counting() as ledger:
        torch.max(x, 1, out=(values, indices))
    assert ledger.bytes == 0
    torch.testing.assert_close(full(values), dense.max(1).values)
    assert torch.equal(full(indices), dense.max(1).indices)


def test_an_error_of_the_op_is_raised(mesh):
    x = distribute(mesh, torch.randn(8, 4))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(x, x, out=distribute(mesh, torch.zeros(8, 4, dtype=torch.int64)))


def estimate(program, *args):
    """The estimated seconds of what a program sends, by a dry run; None if it needs values."""
    found = dry_run(program, OpCall(aten.neg.default, args, {}), find_route)
    return None if found is None else current_costs().total(found[0])


def test_a_dry_run_estimates_what_a_program_sends(mesh):
    x = distribute(mesh, torch.randn(8, 4))
    assert estimate(lambda t: t.exp() + 1, x) == 0.0
    assert estimate(lambda t: t.sort(0).values, x) > 0.0
    assert estimate(lambda t: t if t.sum().item() > 0 else -t, x) is None
    assert estimate(lambda t: torch.zeros(3), x) is None  # a plain tensor has no layout


def test_a_decomposition_that_sends_more_than_gathering_is_not_taken(mesh, monkeypatch):
    op = aten.mvlgamma.default
    x = distribute(mesh, torch.randn(8, 4).abs() + 5)
    assert find_route(op, (x, 2), {}).kind == "decomposition"
    monkeypatch.setattr(routes, "program_for", lambda func: lambda t, p: t.sort(0).values + t.sort(0).values)
    forget_decisions()
    assert find_route(op, (x, 2), {}).kind == "fallback"
    forget_decisions()


def test_a_dry_run_counts_reductions_that_a_nested_program_leaves_pending(mesh, monkeypatch):
    x = distribute(mesh, torch.randn(8, 4).abs() + 5)
    programs = {aten.mvlgamma.default: lambda t, p: t.sum(0)}
    monkeypatch.setattr(routes, "program_for", programs.get)
    forget_decisions()
    assert estimate(lambda t: torch.mvlgamma(t, 2), x) == 0.0
    sent = estimate(lambda t: torch.mvlgamma(t, 2).exp(), x)
    assert sent == estimate(lambda t: t.sum(0).exp(), x)
    assert sent > 0.0
    forget_decisions()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("op", [torch.linspace, torch.logspace])
def test_linspace_and_logspace_round_like_the_kernel(mesh, op, dtype):
    for start, end in ((4.3, 1.2), (-2.0, 1.0)):
        ends = [torch.tensor(start), torch.tensor(end)]
        pending = [
            sw.DTensor.from_local(sw.per_rank(lambda r, t=t: t * (r == 0)), mesh, [sw.Partial()])
            for t in ends
        ]
        for bounds in (pending, [distribute(mesh, ends[0], sw.Replicate()), pending[1]], [start, pending[1]]):
            assert torch.equal(full(op(*bounds, 50, dtype=dtype)), op(start, end, 50, dtype=dtype))


def test_views_and_random_ops_have_no_decomposition():
    assert program_for(aten.diagonal.default) is None
    assert program_for(aten.bernoulli.default) is None
    assert program_for(aten.squeeze_.default) is None
    assert op_info(aten.add_.Tensor).functional is aten.add.Tensor
    assert op_info(aten.max.dim_max).functional is aten.max.dim
    assert is_composite(aten.matmul.default)
    assert not is_composite(aten.mm.default)


def test_inference_mode_decomposes_composite_ops(mesh):
    a, b = torch.randn(8, 3, 4), torch.randn(8, 4, 5)
    x, y = distribute(mesh, a), distribute(mesh, b)
    with torch.inference_mode(), counting() as ledger:
        got = torch.matmul(x, y)
    assert ledger.bytes == 0
    torch.testing.assert_close(full(got), a @ b)


def test_mvlgamma_has_no_rule():
    assert op_info(aten.mvlgamma.default).rule_name not in TABLE
