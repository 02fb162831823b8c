"""Convolutions: batch and channels may be split. For split positions see the halo exchange in `alternatives/convolution`."""

from __future__ import annotations

from itertools import compress

from shardwise.rules.call import Call, Local, Out, Step
from shardwise.rules.letters import Letters
from shardwise.rules.rule import Place, Row, Rule

__all__ = ["ROWS"]


def _channels(call: Call, channels: int, weight: tuple[int, ...]) -> tuple[str | None, str | None, Letters]:
    """The letters of the input channels, of the output channels, and of the weight's first two dims."""
    groups = call.args["groups"]
    if groups == 1:
        return "c", "o", ("c", "o") if call.args["transposed"] else ("o", "c")
    # with other groups, input and output blocks differ in size, which one letter cannot express
    depthwise = groups == channels and weight[:2] == (groups, 1)
    return ("c", "c", ("c", None)) if depthwise else (None, None, (None, None))


def _with_positions(letters: Letters, shape: tuple[int, ...]) -> Letters:
    return letters + (None,) * (len(shape) - len(letters))


def _forward(call: Call) -> Rule | None:
    x, w = call.shapes[:2]
    if len(x) != len(w):
        return None  # without a batch
    c, o, weight = _channels(call, x[1], w)
    has_bias = len(call.shapes) == 3
    inputs = (_with_positions(("n", c), x), _with_positions(weight, w), (o,))

    def local(call: Call, place: Place) -> Local | None:
        if call.args["groups"] == 1 or "c" not in place.sharded:
            return None
        return Local((call.step(groups=place.inputs[0][1]),))  # depthwise: as many groups as channels

    return Rule(
        inputs[: len(call.shapes)],
        (_with_positions(("n", o), x),),
        {"c": "sum"} if (c, o) == ("c", "o") else {},
        tuple(frozenset({i, 2} if has_bias else {i}) for i in (0, 1)),
        addends=frozenset({2} if has_bias else ()),
        local=local,
        empty=False,
    )


def _backward(call: Call) -> Rule | None:
    grad, x, w = call.shapes[:3]
    if len(x) != len(w):
        return None
    c, o, weight = _channels(call, x[1], w)
    grads = (_with_positions(("n", c), x), _with_positions(weight, w), (o,))
    outputs = tuple(compress(grads, call.wanted))
    return Rule(
        (_with_positions(("n", o), grad), *grads[:2]),
        outputs,
        {a: "sum" for a in ("n", c, o) if a is not None and any(a not in one for one in outputs)},
        (frozenset({0}),),
        local=_backward_local,
        empty=False,
    )


def _backward_local(call: Call, place: Place) -> Local | None:
    if call.args["groups"] != 1 and "c" in place.sharded:  # depthwise: as many groups as channels
        channels = place.inputs[1][1]
        bias_sizes = None if call.args["bias_sizes"] is None else [channels]
        step = call.step(groups=channels, bias_sizes=bias_sizes)
        return Local((step,), (Out(0, 0), Out(0, 1), Out(0, 2)))
    if not call.wanted[2] or call.args["groups"] != 1 or not place.sharded & {"c", "o"}:
        return None
    steps: list[Step] = [call.step(bias_sizes=[place.inputs[0][1]])]
    if "c" in place.sharded and place.starts[1][1] > 0:
        # ranks with other input channels compute the same bias gradient, which must be added once
        steps.append(("aten.zeros_like.default", (Out(0, 2),), {}))
    return Local(tuple(steps), (Out(0, 0), Out(0, 1), Out(0, 2) if len(steps) == 1 else Out(1)))


_GROUPS = "depthwise: o is c; other groups: neither is split"

ROWS: dict[str, Row] = {
    "aten.convolution.default": Row(
        f"n c !…, o c !…, o -> n o !…; {_GROUPS}; linear in (0,2) and in (1,2)", _forward
    ),
    "aten.convolution_backward.default": Row(
        f"n o !…, n c !…, o c !… -> n c !…, o c !…, o; {_GROUPS}; linear in (0)", _backward
    ),
}
