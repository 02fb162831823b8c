"""Ops that work along some dims and treat all others alike: those dims must be whole, the others pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.rules.call import Call
from shardwise.rules.notation import groups_of, linear_text
from shardwise.rules.rule import Letters, Row, Rule
from shardwise.rules.tables.reduction import reduction_letters

__all__ = ["ROWS", "along", "last"]

_Dims = Callable[[Call], Sequence[int]]


def along(dims: _Dims | None = None, *, linear: Sequence[Sequence[int]] = (), empty: bool = False) -> Row:
    """A row for an op whose tensors all have the dims of the first one, whole along some of them."""
    pick: _Dims = dims or (lambda call: call.dims())

    def build(call: Call) -> Rule | None:
        first = call.shapes[0]
        ndim = len(first)
        over = {d % ndim for d in pick(call)} if ndim else set()

        def said(shape: Sequence[int], made: bool = False) -> Letters:
            rest = [i for i in range(ndim) if i not in over]
            if len(shape) == ndim:
                return tuple(
                    f"d{i}" if i not in over and n == first[i] else None for i, n in enumerate(shape)
                )
            if made and len(shape) == len(rest):
                return tuple(f"d{i}" if n == first[i] else None for i, n in zip(rest, shape, strict=True))
            return (None,) * len(shape)

        ins, outs = [said(s) for s in call.shapes], [said(s, made=True) for s in call.outputs]
        # a dim passes through only if every tensor of as many dims has it; smaller ones, like weights, are whole
        kept = set(ins[0]).intersection(*(i for i in ins if len(i) == ndim), *outs)
        return Rule(
            inputs=tuple(tuple(x if x in kept else None for x in i) for i in ins),
            outputs=tuple(tuple(x if x in kept else None for x in o) for o in outs),
            linear=groups_of(call, linear),
            empty=empty,
        )

    return Row("… !d -> … !d" + linear_text(linear), build)


def last(n: int) -> _Dims:
    return lambda call: range(max(len(call.shapes[0]) - n, 0), len(call.shapes[0]))


def _reducing() -> Row:
    """A row for a reduction that needs its dims whole: a median, a mode, an argmax."""

    def build(call: Call) -> Rule | None:
        over = call.dims()
        before, after = reduction_letters(call, over)
        whole: Letters = tuple(None if i in over else x for i, x in enumerate(before))
        return Rule(inputs=(whole,), outputs=(after,) * len(call.outputs), empty=False)

    return Row("… !d -> …", build)


def _names(text: str) -> list[str]:
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in text.split()]


ROWS: dict[str, Row] = {
    **dict.fromkeys(
        _names("_softmax _safe_softmax _log_softmax"),
        along(),
    ),
    **dict.fromkeys(
        _names("cummax cummin cumprod logcumsumexp sort sort.stable topk glu"), along(empty=True)
    ),
    **dict.fromkeys(_names("_fft_r2c _fft_c2r _fft_c2c"), along(linear=[[0]])),
    **dict.fromkeys(_names("_softmax_backward_data _log_softmax_backward_data"), along(linear=[[0]])),
    "aten.cumsum.default": along(linear=[[0]], empty=True),
    **dict.fromkeys(_names("flip roll"), along(lambda call: call.dims("dims"), linear=[[0]])),
    **dict.fromkeys(
        _names(
            "argmax argmin max.dim min.dim median.dim nanmedian.dim mode kthvalue logsumexp linalg_vector_norm "
            "var.correction std.correction var_mean.correction std_mean.correction aminmax _aminmax _aminmax.dim "
            "norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype"
        ),
        _reducing(),
    ),
}
