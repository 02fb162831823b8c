"""Convolutions: a split batch, or channels; where positions are split, `tensor/convolution.py` exchanges their halos."""

from __future__ import annotations

from typing import Any

from shardwise.rules.call import Call, Local, Out
from shardwise.rules.rule import Letters, Place, Row, Rule

__all__ = ["ROWS"]


def _channels(call: Call, channels: int, weight: tuple[int, ...]) -> tuple[str | None, str | None, Letters]:
    """The letters of the channels that go in and come out, and of the weight's first two dims."""
    groups = call.args["groups"]
    if groups == 1:
        return "c", "o", ("c", "o") if call.args["transposed"] else ("o", "c")
    # of other groups, blocks of what goes in and of what comes out differ in size, which no letter says
    each = groups == channels and weight[:2] == (groups, 1)
    return ("c", "c", ("c", None)) if each else (None, None, (None, None))


def _positions(said: tuple[str | None, ...], shape: tuple[int, ...]) -> Letters:
    return (*said, *(None for _ in shape[len(said) :]))


def _split_groups(call: Call, place: Place, at: int) -> list[Any] | None:
    """The arguments for a block, if its channels are some of the groups: those are what it has."""
    if call.args["groups"] == 1 or "c" not in place.sharded:
        return None
    return [place.inputs[at][1] if name == "groups" else v for name, v in call.args.items()]


def _forward(call: Call) -> Rule | None:
    x, w = call.shapes[:2]
    if len(x) != len(w):
        return None  # without a batch
    into, out, weight = _channels(call, x[1], w)
    has_bias = len(call.shapes) == 3
    inputs = (_positions(("n", into), x), _positions(weight, w), (out,))

    def local(call: Call, place: Place) -> Local | None:
        args = _split_groups(call, place, 0)
        return None if args is None else Local(((call.op, tuple(args), {}),))

    return Rule(
        inputs[: len(call.shapes)],
        (_positions(("n", out), x),),
        {"c": "sum"} if into == "c" and out == "o" else {},
        tuple(frozenset({i, 2} if has_bias else {i}) for i in (0, 1)),
        addends=frozenset({2} if has_bias else ()),
        local=local,
        empty=False,
    )


def _backward(call: Call) -> Rule | None:
    grad, x, w = call.shapes[:3]
    if len(x) != len(w):
        return None
    into, out, weight = _channels(call, x[1], w)
    made = (_positions(("n", into), x), _positions(weight, w), (out,))
    outputs = tuple(said for said, wanted in zip(made, call.wanted, strict=True) if wanted)
    used = {"n", into, out} - {None}
    return Rule(
        (_positions(("n", out), grad), made[0], made[1]),
        outputs,
        {x: "sum" for x in sorted(map(str, used)) if any(x not in said for said in outputs)},
        (frozenset({0}),),
        local=_backward_local,
        empty=False,
    )


def _backward_local(call: Call, place: Place) -> Local | None:
    args = _split_groups(call, place, 1)
    if args is not None:
        args[3] = None if args[3] is None else [place.inputs[1][1]]
        return Local(((call.op, tuple(args), {}),), (Out(0, 0), Out(0, 1), Out(0, 2)))
    if not call.wanted[2] or call.args["groups"] != 1 or not place.sharded & {"c", "o"}:
        return None
    args = [[place.inputs[0][1]] if name == "bias_sizes" else v for name, v in call.args.items()]
    steps: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [(call.op, tuple(args), {})]
    if "c" in place.sharded and place.starts[1][1] > 0:
        # each rank has all of it, whatever it has of the channels that go in; it must be added once
        steps.append(("aten.zeros_like.default", (Out(0, 2),), {}))
    return Local(tuple(steps), (Out(0, 0), Out(0, 1), Out(0, 2) if len(steps) == 1 else Out(1)))


ROWS: dict[str, Row] = {
    "aten.convolution.default": Row(
        "n c !…, o c !…, o -> n o !…; each channel alone if groups are; linear in (0,2) and in (1,2)",
        _forward,
    ),
    "aten.convolution_backward.default": Row(
        "n o !…, n c !…, o c !… -> n c !…, o c !…, o; linear in (0)", _backward
    ),
}
