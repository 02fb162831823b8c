"""Matrix products and embedding lookups: splitting a contracted dim leaves partial sums."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.rules.call import Call, Local, Out, Slot, Step
from shardwise.rules.letters import without_broadcast
from shardwise.rules.notation import linear_text, row
from shardwise.rules.rule import Place, Row, Rule
from shardwise.rules.tables import masked_lookup

__all__ = ["ROWS", "plus_product"]


def plus_product(
    text: str, local: Callable[[Call, Place], Local | None] | None = None, *, reads: bool = True
) -> Row:
    """A row for `added + product`, with the text of the product: the first tensor broadcasts to the output.

    Where the product is a partial sum, the first tensor must be one too.
    """
    before, _, after = text.partition("->")
    inputs, output = [tuple(words.split()) for words in before.split(",")], tuple(after.split())
    reduced = {x: "sum" for letters in inputs for x in letters if x not in output}
    linear = [[0, 1], [0, 2]]

    def build(call: Call) -> Rule | None:
        shape = call.shapes[0]
        if call.dtypes[0] == "bool" or len(shape) > len(output):
            return None
        sizes = dict(zip(output, call.outputs[0], strict=True))
        added = without_broadcast(output[len(output) - len(shape) :], shape, sizes)
        return Rule(
            (added, *inputs),
            (output,),
            reduced,
            tuple(map(frozenset, linear)),
            addends=frozenset({0}),
            local=local,
        )

    return Row(f"{after.strip()}, {text}; (0) broadcasts{linear_text(linear)}", build, reads)


def _lookup(call: Call, place: Place) -> Local | None:
    def op(here: Out) -> Step:
        return "aten.embedding.default", (Slot(0), here), {}

    return masked_lookup.read(call, place, 0, Slot(1), op, 1)


def _lookup_backward() -> Row:
    split = row("… d, … -> !v d", linear=[[0]])
    # the number of occurrences of an index is not a sum over blocks
    replicated = row("*, * -> *", linear=[[0]])
    return Row(
        f"{split.text}; unsplit if scale_grad_by_freq",
        lambda call: (replicated if call.args["scale_grad_by_freq"] else split).build(call),
    )


ROWS: dict[str, Row] = {
    "aten.mm.default": row("m k, k n -> m n", linear=[[0], [1]], reads=False),
    "aten.bmm.default": row("b m k, b k n -> b m n", linear=[[0], [1]], reads=False),
    "aten.mv.default": row("m k, k -> m", linear=[[0], [1]], reads=False),
    "aten.dot.default": row("k, k -> ", linear=[[0], [1]], reads=False),
    "aten.vdot.default": row("k, k -> ", linear=[[0], [1]], reads=False),
    "aten.addmm.default": plus_product("m k, k n -> m n", reads=False),
    "aten.baddbmm.default": plus_product("b m k, b k n -> b m n", reads=False),
    "aten.embedding.default": row("v d, … -> … d", linear=[[0]], local=_lookup, ranges="v"),
    "aten.embedding_dense_backward.default": _lookup_backward(),
}
