"""Who watches is told by which way each call runs, and the sweep's judge of what could have stayed split."""

import torch
from tests.op_db.cheaper import cheaper

import shardwise as sw
from shardwise.call.trace import Ran, watching


def test_each_rung_is_told_of_and_what_a_watcher_runs_is_not():
    seen = []

    def see(ran):
        seen.append((str(ran.op), ran.rung, ran.sends))
        ran.args[0].exp()

    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [sw.Shard(0)])
        with watching(see):
            x.neg()
            x.cumsum(0)
            x.histc(3)
        x.abs()
    assert seen == [
        ("aten.neg.default", "row", False),
        ("aten.cumsum.default", "row", True),
        ("aten.histc.default", "whole", True),
    ]


def test_an_offer_is_told_of():
    seen = []
    with sw.simulate(2):
        x = sw.distribute_tensor(
            torch.randn(2, 400_000), sw.init_device_mesh("cpu", (2,)), [sw.Shard(1)]
        )  # wide enough that statistics are cheaper than the rows
        with watching(lambda ran: seen.append((str(ran.op), ran.rung))):
            x.softmax(1)
    assert seen[0] == ("aten._softmax.default", "offer")


def test_the_judge_tries_out_what_could_have_stayed_split():
    aten = torch.ops.aten
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.randn(4, 3), mesh, [sw.Shard(0)])
        y = sw.distribute_tensor(torch.randn(4, 5), mesh, [sw.Shard(0)])
        assert cheaper(Ran(aten.exp.default, "whole", (x,), {}, ())) == "tensors 0 along dim 0 -> dim 0"
        assert cheaper(Ran(aten.sum.default, "whole", (x,), {}, ())) == "tensors 0 along dim 0 -> sum"
        assert cheaper(Ran(aten.cumsum.default, "whole", (x, 0), {}, ())) == ""
        product = cheaper(Ran(aten.mm.default, "whole", (x.t(), y), {}, ()))
        assert product == "tensors 0 along dim 1, 1 along dim 0 -> sum"
