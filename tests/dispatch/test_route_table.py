"""The printed table of routes is correct, and equals docs/routes.txt."""

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.call.trace import trace_calls
from shardwise.dispatch.route_table import printed_routes, routes_of

GOLDEN = Path(__file__).parents[2] / "docs" / "routes.txt"
aten = torch.ops.aten


def test_the_printed_table_is_the_one_in_the_repository():
    printed, golden = printed_routes(), GOLDEN.read_text()
    if torch.__version__.startswith("2.13"):
        assert printed == golden, "run `make rules` and look at the diff"
        return
    # other releases have other ops, and decompositions of other ops
    here, there = (
        dict(
            line.replace("decomposition, fallback", "fallback").split(maxsplit=1)
            for line in text.splitlines()
            if line[:1] not in ("", "#")
        )
        for text in (printed, golden)
    )
    common = here.keys() & there.keys()
    assert len(common) > 0.9 * len(there)
    assert {name: here[name] for name in common} == {name: there[name] for name in common}


CALLS = {
    "rule": lambda x: x.exp(),
    "alternative": lambda x: x.softmax(1),
    "decomposition": lambda x: torch.mvlgamma(x.abs() + 5, 2),
    "functional variant": lambda x: torch.mvlgamma(x.abs() + 5, 2, out=x),
    "random": lambda x: x.clone().normal_(),
    "foreach": lambda x: torch._foreach_add([x], 1),
    "request": lambda x: torch.equal(x, x),
    "in-place view": lambda x: x.clone().set_(x),
    "fallback": lambda x: x.histc(3),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_takes_a_route_that_the_table_lists_for_its_op(kind):
    seen = []
    with sw.simulate(2):
        x = sw.distribute_tensor(torch.randn(2, 400_000), sw.init_device_mesh("cpu", (2,)), [sw.Shard(1)])
        with trace_calls(seen.append):
            CALLS[kind](x)
    taken = [
        (
            call.op,
            "functional variant" if call.route == "decomposition" and "out" in str(call.op) else call.route,
        )
        for call in seen
    ]
    assert kind in [route for _, route in taken]
    for op, route in taken:
        assert route in [r.partition(" (")[0] for r in routes_of(op)], op
