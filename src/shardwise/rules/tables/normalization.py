"""Normalisation: what shares a mean must be whole, the rest passes through. Statistics over what is split are offers."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.rules.call import Call, Local, Slot
from shardwise.rules.notation import groups_of, row
from shardwise.rules.rule import Letters, Place, Row, Rule
from shardwise.rules.tables.whole_dims import along

__all__ = ["ROWS"]


def _normalized(call: Call) -> Sequence[int]:
    """The dims of a layer norm: as many last ones as its shape has."""
    return range(len(call.shapes[0]) - len(call.args["normalized_shape"]), len(call.shapes[0]))


def _layer_norm_backward(statistics: int, outputs: int) -> Row:
    """As many last dims are whole as are normalized; weights get a part of their gradient from each row."""
    tensors = ", ".join(["… !d, … !d", *["… !"] * statistics, *["!d"] * (outputs - 1)])
    made = ", ".join(["… !d", *["!d"] * (outputs - 1)])
    short = f"{tensors} -> {made}"

    def build(call: Call) -> Rule | None:
        n = len(call.args["normalized_shape"])
        over, one = " ".join(f"!d{i}" for i in range(n)), " ".join("!" * n)
        said = " ".join(
            over if w == "!d" else one if w == "!" else w for w in short.replace(",", " ,").split()
        )
        return row(said, linear=[[0]], empty=False).build(call)

    return Row(row(short, linear=[[0]]).text, build)


def _channels(call: Call, whole: bool) -> Letters:
    """Letters of a tensor with its channels in dim 1; `whole` if all but those must be."""
    n = len(call.shapes[0])
    return tuple("c" if i == 1 else None if whole else f"d{i}" for i in range(n))


def _names(call: Call, letters: dict[str, Letters]) -> tuple[Letters, ...]:
    """Letters by argument name as letters by slot; what is not named is whole."""
    out: list[Letters] = [(None,) * len(s) for s in call.shapes]
    for name, said in letters.items():
        value = call.args.get(name)
        if isinstance(value, Slot) and len(said) == len(call.shapes[value.number]):
            out[value.number] = said
    return tuple(out)


_PER_CHANNEL = dict.fromkeys(["weight", "bias", "running_mean", "running_var"], ("c",))


def _batch_norm(training: bool | None = None) -> Row:
    """Each channel by itself. With its own statistics a channel must be whole; with given ones all dims pass.

    Running statistics that the op writes are kept from blocks that were made for it: such a call has no row.
    """

    def build(call: Call) -> Rule | None:
        trains = call.args["training"] if training is None else training
        given = call.args.get("running_mean") is not None
        if len(call.shapes[0]) < 2 or given == trains:
            return None
        data = _channels(call, whole=trains)
        ins = _names(call, {"input": data, **_PER_CHANNEL})
        if not trains:
            # the kernel leaves the statistics it was not asked for empty
            others = frozenset(range(1, len(call.outputs)))
            return Rule(ins, (data, *((None,) * len(s) for s in call.outputs[1:])), alike=others, empty=False)
        return Rule(ins, (data, *[("c",)] * (len(call.outputs) - 1)), empty=False)

    return Row("!n c !…, c, c, c, c -> !n c !…, c, …; n c … with given statistics", build)


def _batch_norm_backward() -> Row:
    """As forward; with given statistics the weights get a part of their gradient from each row."""

    def build(call: Call) -> Rule | None:
        trains = call.args["train" if "train" in call.args else "update"]
        if len(call.shapes[0]) < 2:
            return None
        data = _channels(call, whole=trains)
        saved = dict.fromkeys(["save_mean", "save_var", "save_invstd"], ("c",)) if trains else {}
        ins = _names(call, {"grad_out": data, "input": data, **_PER_CHANNEL, **saved})
        each: tuple[Letters, ...] = (data, ("c",), ("c",))
        outs = tuple(x for x, wanted in zip(each, call.wanted, strict=True) if wanted)
        reduced = {x: "sum" for x in data if x is not None and x != "c"}
        return Rule(ins, outs, reduced, groups_of(call, [[0]]), empty=False)

    return Row("!n c !…, !n c !…, c, … -> !n c !…, c, c; n c … with given statistics; linear in (0)", build)


def _group_norm() -> Row:
    """Rows of the batch by themselves."""
    inner = row("n …, *, * -> n …, n !, n !", empty=False)

    def build(call: Call) -> Rule | None:
        shape = call.shapes[0]
        if len(shape) < 2 or shape[0] != call.args["N"]:
            return None
        data: Letters = ("n", *[None] * (len(shape) - 1))
        ins = _names(call, {"input": data})
        return Rule(ins, (data, ("n", None), ("n", None)), local=_batch_here, empty=False)

    return Row(inner.text, build)


def _group_norm_backward() -> Row:
    def build(call: Call) -> Rule | None:
        shape = call.shapes[0]
        if len(shape) < 2 or shape[0] != call.args["N"]:
            return None
        data: Letters = ("n", *[None] * (len(shape) - 1))
        ins = _names(call, {"grad_out": data, "input": data, "mean": ("n", None), "rstd": ("n", None)})
        each: tuple[Letters, ...] = (data, (None,), (None,))
        outs = tuple(x for x, wanted in zip(each, call.wanted, strict=True) if wanted)
        return Rule(ins, outs, {"n": "sum"}, groups_of(call, [[0]]), local=_batch_here, empty=False)

    return Row("n …, n …, n !, n !, * -> n …, !c, !c; linear in (0)", build)


def _batch_here(call: Call, place: Place) -> Local | None:
    """The size of the batch is an argument, and a block's is smaller."""
    if "n" not in place.sharded:
        return None
    args = {**call.args, "N": place.inputs[0][0]}
    return Local(((call.op, tuple(args.values()), {}),))


def _but(name: str = "dim") -> Row:
    """Slices along one dim by themselves, each of them whole."""

    def others(call: Call) -> Sequence[int]:
        ndim = len(call.shapes[0])
        return [d for d in range(ndim) if d != call.args[name] % ndim]

    return along(others)


def _weight_norm_backward() -> Row:
    inner = _but()

    def build(call: Call) -> Rule | None:
        rule = inner.build(call)
        if rule is None:
            return None
        return Rule(rule.inputs, rule.outputs, linear=groups_of(call, [[0]]), empty=False)

    return Row("!… d !…, each -> !… d !…; linear in (0)", build)


_SLICES = _but()

ROWS: dict[str, Row] = {
    "aten.native_layer_norm.default": along(_normalized),
    "aten.native_layer_norm_backward.default": _layer_norm_backward(statistics=2, outputs=3),
    "aten._fused_rms_norm.default": along(_normalized),
    "aten._fused_rms_norm_backward.default": _layer_norm_backward(statistics=1, outputs=2),
    "aten.native_group_norm.default": _group_norm(),
    "aten.native_group_norm_backward.default": _group_norm_backward(),
    "aten.native_batch_norm.default": _batch_norm(),
    "aten._native_batch_norm_legit.no_stats": _batch_norm(),
    "aten._native_batch_norm_legit_no_training.default": _batch_norm(training=False),
    "aten._batch_norm_no_update.default": _batch_norm(training=False),
    "aten.native_batch_norm_backward.default": _batch_norm_backward(),
    "aten.batch_norm_backward.default": _batch_norm_backward(),
    "aten._weight_norm_interface.default": Row("!… d !…, d -> !… d !…, d", _SLICES.build),
    "aten._weight_norm_interface_backward.default": _weight_norm_backward(),
}
