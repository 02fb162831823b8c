"""Normalization: dims that share statistics must not be split, the others may.

If they are split, `alternatives/normalization` combines the statistics of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from shardwise.rules.call import Call, Local
from shardwise.rules.letters import Letters, letters_by_name, unsplit
from shardwise.rules.notation import groups_of, row
from shardwise.rules.rule import Place, Row, Rule
from shardwise.rules.tables.whole_dims import along

__all__ = ["ROWS"]


def _normalized_dims(call: Call) -> Sequence[int]:
    return range(len(call.shapes[0]) - len(call.args["normalized_shape"]), len(call.shapes[0]))


def _layer_norm_backward(statistics: int, outputs: int, empty: bool) -> Row:
    """A row in which `!d` stands for all normalized dims; each row of the batch adds to the gradients of the weights."""
    inputs = ", ".join(["… !d, … !d", *["… !"] * statistics, *["!d"] * (outputs - 1)])
    short = f"{inputs} -> {', '.join(['… !d', *['!d'] * (outputs - 1)])}"

    def build(call: Call) -> Rule | None:
        n = len(call.args["normalized_shape"])
        long = {"!d": " ".join(f"!d{i}" for i in range(n)), "!": " ".join("!" * n)}
        text = " ".join(long.get(w, w) for w in short.replace(",", " ,").split())
        return row(text, linear=[[0]], empty=empty).build(call)

    return Row(row(short, linear=[[0]]).text, build)


def _channels(call: Call, only: bool) -> Letters:
    """The letters of a tensor with channels in dim 1; `only` those if the other dims must not be split."""
    ndim = len(call.shapes[0])
    return tuple("c" if i == 1 else None if only else f"d{i}" for i in range(ndim))


_GIVEN = "with given statistics n and … may be split"
_PER_CHANNEL: dict[str, Letters] = dict.fromkeys(["weight", "bias", "running_mean", "running_var"], ("c",))


def _batch_norm(training: bool | None = None) -> Row:
    """A row for a batch norm: channels may be split, and with given statistics all dims.

    A call that updates running statistics has no rule, because it writes to them.
    """

    def build(call: Call) -> Rule | None:
        trains = call.args["training"] if training is None else training
        has_statistics = call.args.get("running_mean") is not None
        if len(call.shapes[0]) < 2 or has_statistics == trains:
            return None
        data = _channels(call, only=trains)
        inputs = letters_by_name(call, {"input": data, **_PER_CHANNEL})
        if trains:
            return Rule(inputs, (data, *[("c",)] * (len(call.outputs) - 1)), empty=False)
        # the kernel returns empty statistics
        alike = frozenset(range(1, len(call.outputs)))
        return Rule(inputs, (data, *unsplit(call.outputs[1:])), alike=alike, empty=False)

    return Row(f"!n c !…, c, c, c, c -> !n c !…, c, c; {_GIVEN}", build)


def _batch_norm_backward(call: Call) -> Rule | None:
    trains = call.args["train" if "train" in call.args else "update"]
    if len(call.shapes[0]) < 2:
        return None
    data = _channels(call, only=trains)
    names = {"grad_out": data, "input": data, **_PER_CHANNEL}
    if trains:
        names |= dict.fromkeys(["save_mean", "save_var", "save_invstd"], ("c",))
    grads: tuple[Letters, ...] = (data, ("c",), ("c",))
    reduced = {x: "sum" for x in data if x is not None and x != "c"}
    outputs = tuple(compress(grads, call.wanted))
    return Rule(letters_by_name(call, names), outputs, reduced, groups_of(call, [[0]]), empty=False)


def _batch_letters(call: Call) -> Letters | None:
    """The letters of a group norm's data, or None if its first dim is not the batch."""
    shape = call.shapes[0]
    return ("n", *[None] * (len(shape) - 1)) if len(shape) >= 2 and shape[0] == call.args["N"] else None


def _group_norm(call: Call) -> Rule | None:
    data = _batch_letters(call)
    if data is None:
        return None
    inputs = letters_by_name(call, {"input": data})
    return Rule(inputs, (data, ("n", None), ("n", None)), local=_with_block_batch, empty=False)


def _group_norm_backward(call: Call) -> Rule | None:
    data = _batch_letters(call)
    if data is None:
        return None
    names: dict[str, Letters] = {"grad_out": data, "input": data, "mean": ("n", None), "rstd": ("n", None)}
    inputs, grads = letters_by_name(call, names), (data, (None,), (None,))
    outputs = tuple(compress(grads, call.wanted))
    return Rule(inputs, outputs, {"n": "sum"}, groups_of(call, [[0]]), local=_with_block_batch, empty=False)


def _with_block_batch(call: Call, place: Place) -> Local | None:
    """Run the op with the batch size of the block, which is one of its arguments."""
    if "n" not in place.sharded:
        return None
    return Local((call.step(N=place.inputs[0][0]),))


def _other_dims(call: Call) -> Sequence[int]:
    return [d for d in range(len(call.shapes[0])) if d != call.dim()]


_SLICES = along(_other_dims)


def _weight_norm_backward(call: Call) -> Rule | None:
    rule = _SLICES.build(call)
    return None if rule is None else replace(rule, linear=groups_of(call, [[0]]))


_BATCH_NORM_BACKWARD = Row(
    f"!n c !…, !n c !…, c, c, c, c, c -> !n c !…, c, c; {_GIVEN}; linear in (0)", _batch_norm_backward
)

ROWS: dict[str, Row] = {
    "aten.native_layer_norm.default": along(_normalized_dims, empty=True),
    "aten.native_layer_norm_backward.default": _layer_norm_backward(statistics=2, outputs=3, empty=True),
    "aten._fused_rms_norm.default": along(_normalized_dims),
    "aten._fused_rms_norm_backward.default": _layer_norm_backward(statistics=1, outputs=2, empty=False),
    "aten.native_group_norm.default": Row("n !…, *, * -> n !…, n !, n !", _group_norm),
    "aten.native_group_norm_backward.default": Row(
        "n !…, n !…, n !, n !, * -> n !…, !c, !c; linear in (0)", _group_norm_backward
    ),
    "aten.native_batch_norm.default": _batch_norm(),
    "aten._native_batch_norm_legit.no_stats": _batch_norm(),
    "aten._native_batch_norm_legit_no_training.default": _batch_norm(training=False),
    "aten._batch_norm_no_update.default": _batch_norm(training=False),
    "aten.native_batch_norm_backward.default": _BATCH_NORM_BACKWARD,
    "aten.batch_norm_backward.default": _BATCH_NORM_BACKWARD,
    "aten._weight_norm_interface.default": Row("!… d !…, d -> !… d !…, d", _SLICES.build),
    "aten._weight_norm_interface_backward.default": Row(
        "!… d !…, !… d !…, d, d -> !… d !…, d; linear in (0)", _weight_norm_backward
    ),
}
