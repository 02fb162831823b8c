"""Ops without a row: as programs of others where a rehearsal says that sends less, and with the dense answer."""

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
def line():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def spread(mesh, t, *placements):
    return sw.distribute_tensor(t, mesh, list(placements) or [sw.Shard(0)])


def whole(t):
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
def test_a_program_of_ops_with_rows_sends_nothing(line, op, rows):
    dense = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = spread(line, dense)
    with counting() as ledger:
        got = op(x)
    assert ledger.bytes == 0
    torch.testing.assert_close(whole(got), op(dense))


@pytest.mark.parametrize("lies", [[sw.Shard(0)], [sw.Shard(1)], [sw.Replicate()]])
def test_out_is_written_in_the_layout_it_has(line, lies):
    a, b = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    out = spread(line, torch.zeros(8, 4, dtype=torch.float64), *lies)
    kept = out._local_tensor
    got = torch.add(spread(line, a), spread(line, b), alpha=2, out=out)
    assert got is out
    assert out.placements == tuple(lies)
    assert out._local_tensor is kept
    torch.testing.assert_close(whole(out), a + 2 * b)


def test_several_outs(line):
    dense = torch.randn(8, 4, dtype=torch.float64)
    values = spread(line, torch.zeros(8, dtype=torch.float64))
    indices = spread(line, torch.zeros(8, dtype=torch.int64))
    x = spread(line, dense)
    with counting() as ledger:
        torch.max(x, 1, out=(values, indices))
    assert ledger.bytes == 0
    torch.testing.assert_close(whole(values), dense.max(1).values)
    assert torch.equal(whole(indices), dense.max(1).indices)


def test_what_the_op_refuses_is_refused(line):
    x = spread(line, torch.randn(8, 4))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(x, x, out=spread(line, torch.zeros(8, 4, dtype=torch.int64)))


def sent_by(program, *args):
    """The seconds that a program sends by its dry run; None if it needs values."""
    found = dry_run(program, OpCall(aten.neg.default, args, {}), find_route)
    return None if found is None else current_costs().total(found[0])


def test_a_dry_run_tells_what_a_program_sends(line):
    x = spread(line, torch.randn(8, 4))
    assert sent_by(lambda t: t.exp() + 1, x) == 0.0
    assert sent_by(lambda t: t.sort(0).values, x) > 0.0
    assert sent_by(lambda t: t if t.sum().item() > 0 else -t, x) is None
    assert sent_by(lambda t: torch.zeros(3), x) is None  # a plain tensor has no layout


def test_a_program_that_sends_more_than_gathering_is_not_taken(line, monkeypatch):
    op = aten.mvlgamma.default
    x = spread(line, torch.randn(8, 4).abs() + 5)
    assert find_route(op, (x, 2), {}).kind == "decomposition"
    monkeypatch.setattr(routes, "program_for", lambda func: lambda t, p: t.sort(0).values + t.sort(0).values)
    forget_decisions()
    assert find_route(op, (x, 2), {}).kind == "fallback"
    forget_decisions()


def test_a_reduction_that_a_nested_program_leaves_pending_is_sent_too(line, monkeypatch):
    x = spread(line, torch.randn(8, 4).abs() + 5)
    programs = {aten.mvlgamma.default: lambda t, p: t.sum(0)}
    monkeypatch.setattr(routes, "program_for", programs.get)
    forget_decisions()
    assert sent_by(lambda t: torch.mvlgamma(t, 2), x) == 0.0
    sent = sent_by(lambda t: torch.mvlgamma(t, 2).exp(), x)
    assert sent == sent_by(lambda t: t.sum(0).exp(), x)
    assert sent > 0.0
    forget_decisions()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("op", [torch.linspace, torch.logspace])
def test_ranges_round_where_the_kernel_does(line, op, dtype):
    for start, end in ((4.3, 1.2), (-2.0, 1.0)):
        ends = [torch.tensor(start), torch.tensor(end)]
        pending = [
            sw.DTensor.from_local(sw.per_rank(lambda r, t=t: t * (r == 0)), line, [sw.Partial()])
            for t in ends
        ]
        for mine in (pending, [spread(line, ends[0], sw.Replicate()), pending[1]], [start, pending[1]]):
            assert torch.equal(whole(op(*mine, 50, dtype=dtype)), op(start, end, 50, dtype=dtype))


def test_programs_are_not_made_of_views_or_draws():
    assert program_for(aten.diagonal.default) is None
    assert program_for(aten.bernoulli.default) is None
    assert program_for(aten.squeeze_.default) is None
    assert op_info(aten.add_.Tensor).functional is aten.add.Tensor
    assert op_info(aten.max.dim_max).functional is aten.max.dim
    assert is_composite(aten.matmul.default)
    assert not is_composite(aten.mm.default)


def test_inference_mode_runs_composite_ops_as_what_they_are_made_of(line):
    a, b = torch.randn(8, 3, 4), torch.randn(8, 4, 5)
    x, y = spread(line, a), spread(line, b)
    with torch.inference_mode(), counting() as ledger:
        got = torch.matmul(x, y)
    assert ledger.bytes == 0
    torch.testing.assert_close(whole(got), a @ b)


def test_the_op_of_these_tests_has_no_row():
    assert op_info(aten.mvlgamma.default).rule_name not in TABLE
