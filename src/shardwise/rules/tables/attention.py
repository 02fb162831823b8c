"""Attention: each sequence of the batch and each head by itself; queries too, where no position counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.rules.call import Call, Slot
from shardwise.rules.rule import Letters, Row, Rule

__all__ = ["ROWS"]

# Letters of the arguments by name; s are queries and t keys, and what is not here is whole.
_BHS: Mapping[str, str] = {
    "query": "b h s !", "key": "b h ! !", "value": "b h ! !", "out": "b h s !", "grad_out": "b h s !",
    "grad_out_": "b h s !", "logsumexp": "b h s", "attn_mask": "b h s !", "attn_bias": "b h s !",
    "dropout_mask": "b h s !",
}  # fmt: skip
_CUDNN: Mapping[str, str] = {**_BHS, "logsumexp": "b h s !"}  # with a dim of one more
_BSH: Mapping[str, str] = {
    "query": "b ! h !", "key": "b ! h !", "value": "b ! h !", "out": "b ! h !", "grad_out": "b ! h !",
    "grad_out_": "b ! h !", "logsumexp": "b h !", "bias": "b h ! !",
}  # fmt: skip


def _attention(
    names: Mapping[str, str], outputs: Sequence[str], *, queries: bool = False, backward: bool = False
) -> Row:
    """A row for one flavour; `outputs` are those that are not the same everywhere, by their letters.

    The others are lengths, and states of a generator that without dropout nobody reads. `queries` may be split where
    positions do not count. Several heads of queries may share one of keys: then a block has whole groups.
    """

    def build(call: Call) -> Rule | None:
        if call.args.get("dropout_p") or call.args.get("return_debug_mask") or _is_ragged(call):
            return None
        shapes = {n: call.shapes[v.number] for n, v in call.args.items() if isinstance(v, Slot)}
        heads = names["query"].split().index("h")
        if any(len(shapes[n]) != 4 for n in ("query", "key", "value")):
            return None
        if len({shapes[n][0] for n in ("query", "key", "value")}) > 1:
            return None
        whole = set() if queries and not call.args.get("is_causal") else {"s"}
        sizes = {x: {n} for x, n in zip(names["query"].split(), shapes["query"], strict=True) if x != "!"}
        shared = shapes["key"][heads]
        if shared != shapes["value"][heads] or shapes["query"][heads] % max(shared, 1):
            whole.add("h")
        elif shared > 1:  # one head for all is whole, as if broadcast
            sizes["h"].add(shared)

        def said(text: str, shape: Sequence[int]) -> Letters:
            words = text.split()[max(len(text.split()) - len(shape), 0) :]
            words = ["!"] * (len(shape) - len(words)) + words
            return tuple(
                x if x != "!" and x not in whole and n in sizes[x] else None
                for x, n in zip(words, shape, strict=True)
            )

        ins: list[Letters] = [(None,) * len(s) for s in call.shapes]
        for name, shape in shapes.items():
            if name in names:
                ins[call.args[name].number] = said(names[name], shape)
        made = [t for t, wanted in zip(outputs, call.wanted, strict=False) if wanted]
        outs = [said(text, shape) for text, shape in zip(made, call.outputs, strict=False)]
        rest = range(len(outs), len(call.outputs))
        outs += [(None,) * len(call.outputs[i]) for i in rest]
        grad = call.args.get("grad_out", call.args.get("grad_out_"))
        return Rule(
            tuple(ins),
            tuple(outs),
            dict.fromkeys(("b", "h", "s"), "sum") if backward else {},
            linear=(frozenset({grad.number}),) if backward and isinstance(grad, Slot) else (),
            empty=False,
            alike=frozenset(rest),
        )

    text = ", ".join(f"{n}: {t}" for n, t in names.items() if n in ("query", "key", "value"))
    return Row(f"{text} -> {', '.join(outputs)}" + ("; linear in the gradient" if backward else ""), build)


def _is_ragged(call: Call) -> bool:
    """Whether sequences of several lengths lie one after the other, so that no dim is the batch."""
    lengths = (
        "cum_seq_q",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqlen_k",
        "seqused_k",
        "block_table",
        "alibi_slopes",
    )
    found = (call.args.get(n) for n in lengths)
    return any(isinstance(v, Slot) and 0 not in call.shapes[v.number] for v in found)


_Q, _K = "b h s !", "b h ! !"
_SEEN = [_Q, "b h s"]
_GRADS = [_Q, _K, _K]
_LONG = "b ! h !"

ROWS: dict[str, Row] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention(_BHS, _SEEN, queries=True),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention(
        _BHS, _GRADS, queries=True, backward=True
    ),
    "aten._scaled_dot_product_flash_attention.default": _attention(_BHS, _SEEN),
    "aten._scaled_dot_product_flash_attention_backward.default": _attention(_BHS, _GRADS, backward=True),
    "aten._scaled_dot_product_efficient_attention.default": _attention(_BHS, _SEEN),
    "aten._scaled_dot_product_efficient_attention_backward.default": _attention(
        _BHS, [*_GRADS, _Q], backward=True
    ),
    "aten._scaled_dot_product_cudnn_attention.default": _attention(_CUDNN, [_Q, _Q]),
    "aten._scaled_dot_product_cudnn_attention_backward.default": _attention(
        _CUDNN, _GRADS, backward=True
    ),
    "aten._scaled_dot_product_fused_attention_overrideable.default": _attention(_BHS, _SEEN),
    "aten._scaled_dot_product_fused_attention_overrideable_backward.default": _attention(
        _BHS, [*_GRADS, _Q], backward=True
    ),
    "aten._scaled_dot_product_attention_math_for_mps.default": _attention(_BHS, [_Q, _Q]),
    "aten._flash_attention_forward.default": _attention(_BSH, [_LONG, "b h !"]),
    "aten._flash_attention_backward.default": _attention(_BSH, [_LONG] * 3, backward=True),
    "aten._efficient_attention_forward.default": _attention(_BSH, [_LONG, "b h !"]),
    "aten._efficient_attention_backward.default": _attention(_BSH, [_LONG] * 3 + ["b h ! !"], backward=True),
}  # fmt: skip
