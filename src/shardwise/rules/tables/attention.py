"""Attention: batch and heads may be split; queries too, where the kernel does not depend on their positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

from shardwise.rules.call import Call, Slot
from shardwise.rules.letters import Letters, letters_by_name, unsplit
from shardwise.rules.rule import Row, Rule

__all__ = ["ROWS"]

# The dims of the arguments by name: b is the batch, h are heads, s are queries.
_BHS: Mapping[str, str] = {
    "query": "b h s !", "key": "b h ! !", "value": "b h ! !", "out": "b h s !", "grad_out": "b h s !",
    "grad_out_": "b h s !", "logsumexp": "b h s", "attn_mask": "b h s !", "attn_bias": "b h s !",
    "dropout_mask": "b h s !",
}  # fmt: skip
_CUDNN: Mapping[str, str] = {**_BHS, "logsumexp": "b h s !"}  # with a last dim of size 1
_BSH: Mapping[str, str] = {
    "query": "b ! h !", "key": "b ! h !", "value": "b ! h !", "out": "b ! h !", "grad_out": "b ! h !",
    "grad_out_": "b ! h !", "logsumexp": "b h !", "bias": "b h ! !",
}  # fmt: skip
_QKV = ("query", "key", "value")


def _attention(
    names: Mapping[str, str], outputs: Sequence[str], *, queries: bool = False, backward: bool = False
) -> Row:
    """A row for one kernel; `queries`: they may be split if the call is not causal.

    `outputs` are the dims of the first outputs. The others are lengths, and random states that are unused without
    dropout. Several query heads may share a key head; then only whole groups of them are split.
    """

    def build(call: Call) -> Rule | None:
        if call.args.get("dropout_p") or call.args.get("return_debug_mask") or _is_ragged(call):
            return None
        shapes = {n: call.shapes[v.number] for n, v in call.args.items() if isinstance(v, Slot)}
        if any(len(shapes[n]) != 4 for n in _QKV) or any(shapes[n][0] != shapes[_QKV[0]][0] for n in _QKV):
            return None
        fixed = set() if queries and not call.args.get("is_causal") else {"s"}
        sizes = {x: {n} for x, n in zip(names["query"].split(), shapes["query"], strict=True) if x != "!"}
        heads = names["query"].split().index("h")
        key_heads = shapes["key"][heads]
        if key_heads != shapes["value"][heads] or shapes["query"][heads] % max(key_heads, 1):
            fixed.add("h")
        elif key_heads > 1:  # a single key head broadcasts
            sizes["h"].add(key_heads)

        def letters(text: str, shape: Sequence[int]) -> Letters:
            words = text.split()[max(len(text.split()) - len(shape), 0) :]
            words = ["!"] * (len(shape) - len(words)) + words
            return tuple(
                x if x != "!" and x not in fixed and n in sizes[x] else None
                for x, n in zip(words, shape, strict=True)
            )

        inputs = letters_by_name(call, {n: letters(names[n], s) for n, s in shapes.items() if n in names})
        computed = compress(outputs, call.wanted)
        outs = [letters(text, shape) for text, shape in zip(computed, call.outputs, strict=False)]
        rest = range(len(outs), len(call.outputs))
        grad = call.args.get("grad_out", call.args.get("grad_out_"))
        return Rule(
            inputs,
            (*outs, *unsplit(call.outputs[len(outs) :])),
            dict.fromkeys(("b", "h", "s"), "sum") if backward else {},
            linear=(frozenset({grad.number}),) if backward and isinstance(grad, Slot) else (),
            empty=False,
            alike=frozenset(rest),
        )

    text = f"{', '.join(f'{n}: {names[n]}' for n in _QKV)} -> {', '.join(outputs)}"
    text = f"{text}; s unsplit if causal" if queries else text.replace(" s", " !s")
    return Row(text + ("; linear in grad_out" if backward else ""), build)


def _is_ragged(call: Call) -> bool:
    """Whether sequences of different lengths are packed one after the other, so that no dim is the batch."""
    names = "cum_seq_q cu_seqlens_q cu_seqlens_k seqlen_k seqused_k block_table alibi_slopes".split()
    values = (call.args.get(n) for n in names)
    return any(isinstance(v, Slot) and 0 not in call.shapes[v.number] for v in values)


_Q, _K, _LONG = "b h s !", "b h ! !", "b ! h !"
_OUT = [_Q, "b h s"]
_GRADS = [_Q, _K, _K]

ROWS: dict[str, Row] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention(_BHS, _OUT, queries=True),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention(
        _BHS, _GRADS, queries=True, backward=True
    ),
    "aten._scaled_dot_product_flash_attention.default": _attention(_BHS, _OUT),
    "aten._scaled_dot_product_flash_attention_backward.default": _attention(_BHS, _GRADS, backward=True),
    "aten._scaled_dot_product_efficient_attention.default": _attention(_BHS, _OUT),
    "aten._scaled_dot_product_efficient_attention_backward.default": _attention(
        _BHS, [*_GRADS, _Q], backward=True
    ),
    "aten._scaled_dot_product_cudnn_attention.default": _attention(_CUDNN, [_Q, _Q]),
    "aten._scaled_dot_product_cudnn_attention_backward.default": _attention(_CUDNN, _GRADS, backward=True),
    "aten._scaled_dot_product_fused_attention_overrideable.default": _attention(_BHS, _OUT),
    "aten._scaled_dot_product_fused_attention_overrideable_backward.default": _attention(
        _BHS, [*_GRADS, _Q], backward=True
    ),
    "aten._scaled_dot_product_attention_math_for_mps.default": _attention(_BHS, [_Q, _Q]),
    "aten._flash_attention_forward.default": _attention(_BSH, [_LONG, "b h !"]),
    "aten._flash_attention_backward.default": _attention(_BSH, [_LONG] * 3, backward=True),
    "aten._efficient_attention_forward.default": _attention(_BSH, [_LONG, "b h !"]),
    "aten._efficient_attention_backward.default": _attention(_BSH, [_LONG] * 3 + ["b h ! !"], backward=True),
}
