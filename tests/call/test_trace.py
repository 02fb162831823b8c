"""Tracing of calls, and the search for splits that a fallback could have kept."""

import torch
from tests.op_db.missed_splits import find_missed_split

import shardwise as sw
from shardwise.call.trace import TracedCall, trace_calls


def test_each_call_is_traced_but_not_those_of_the_listener():
    seen = []

    def listen(call):
        seen.append((str(call.op), call.route, call.communicates))
        call.args[0].exp()

    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [sw.Shard(0)])
        with trace_calls(listen):
            x.neg()
            x.cumsum(0)
            x.histc(3)
        x.abs()
    assert seen == [
        ("aten.neg.default", "rule", False),
        ("aten.cumsum.default", "rule", True),
        ("aten.histc.default", "fallback", True),
    ]


def test_an_alternative_is_traced():
    seen = []
    with sw.simulate(2):
        x = sw.distribute_tensor(
            torch.randn(2, 400_000), sw.init_device_mesh("cpu", (2,)), [sw.Shard(1)]
        )  # wide enough that reducing statistics costs less than gathering the rows
        with trace_calls(lambda call: seen.append((str(call.op), call.route))):
            x.softmax(1)
    assert seen[0] == ("aten._softmax.default", "alternative")


def test_splits_that_could_have_been_kept_are_found():
    aten = torch.ops.aten
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.randn(4, 3), mesh, [sw.Shard(0)])
        y = sw.distribute_tensor(torch.randn(4, 5), mesh, [sw.Shard(0)])
        assert (
            find_missed_split(TracedCall(aten.exp.default, "fallback", (x,), {}, ()))
            == "tensors 0 along dim 0 -> dim 0"
        )
        assert (
            find_missed_split(TracedCall(aten.sum.default, "fallback", (x,), {}, ()))
            == "tensors 0 along dim 0 -> sum"
        )
        assert find_missed_split(TracedCall(aten.cumsum.default, "fallback", (x, 0), {}, ())) == ""
        product = find_missed_split(TracedCall(aten.mm.default, "fallback", (x.t(), y), {}, ()))
        assert product == "tensors 0 along dim 1, 1 along dim 0 -> sum"
