"""Ops that work along some dims and treat all others as a batch: the former must not be split, the latter may."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.rules.call import Call
from shardwise.rules.letters import Letters, dim_letters
from shardwise.rules.notation import groups_of, linear_text, op_names
from shardwise.rules.rule import Row, Rule
from shardwise.rules.tables.reduction import reduction_letters

__all__ = ["ROWS", "along", "last_dims"]

_Dims = Callable[[Call], Sequence[int]]


def along(dims: _Dims | None = None, *, linear: Sequence[Sequence[int]] = (), empty: bool = False) -> Row:
    """A row for an op along `dims`, by default its argument `dim`, whose tensors have the dims of the first one."""
    pick: _Dims = dims or (lambda call: call.dims())

    def build(call: Call) -> Rule | None:
        first = call.shapes[0]
        ndim = len(first)
        letters = dim_letters(ndim, *(d % ndim for d in pick(call))) if ndim else ()
        batch = [i for i, x in enumerate(letters) if x is not None]

        def match(shape: Sequence[int], dims: Sequence[int]) -> Letters:
            if len(shape) != len(dims):
                return (None,) * len(shape)
            return tuple(letters[i] if n == first[i] else None for i, n in zip(dims, shape, strict=True))

        inputs = [match(s, range(ndim)) for s in call.shapes]
        outputs = [match(s, range(ndim) if len(s) == ndim else batch) for s in call.outputs]
        # a dim may be split only if every tensor with as many dims has it; smaller inputs, like weights, are replicated
        common = set(inputs[0]).intersection(*(x for x in inputs if len(x) == ndim), *outputs)
        return Rule(
            inputs=tuple(tuple(x if x in common else None for x in one) for one in inputs),
            outputs=tuple(tuple(x if x in common else None for x in one) for one in outputs),
            linear=groups_of(call, linear),
            empty=empty,
        )

    return Row("… !d -> … !d" + linear_text(linear), build)


def last_dims(n: int) -> _Dims:
    """The last `n` dims of the first tensor."""
    return lambda call: range(max(len(call.shapes[0]) - n, 0), len(call.shapes[0]))


def _reduce(call: Call) -> Rule | None:
    """A reduction that cannot be composed from partial values: a median, a mode, an argmax."""
    over = call.dims()
    _, after = reduction_letters(call, over)
    return Rule((dim_letters(len(call.shapes[0]), *over),), (after,) * len(call.outputs), empty=False)


ROWS: dict[str, Row] = {
    **dict.fromkeys(op_names("_softmax _safe_softmax _log_softmax"), along()),
    **dict.fromkeys(
        op_names("cummax cummin cumprod logcumsumexp sort sort.stable topk glu"), along(empty=True)
    ),
    **dict.fromkeys(
        op_names("_fft_r2c _fft_c2r _fft_c2c _softmax_backward_data _log_softmax_backward_data"),
        along(linear=[[0]]),
    ),
    "aten.cumsum.default": along(linear=[[0]], empty=True),
    **dict.fromkeys(op_names("flip roll"), along(lambda call: call.dims("dims"), linear=[[0]])),
    **dict.fromkeys(
        op_names(
            "argmax argmin max.dim min.dim median.dim nanmedian.dim mode kthvalue logsumexp linalg_vector_norm "
            "var.correction std.correction var_mean.correction std_mean.correction aminmax _aminmax _aminmax.dim "
            "norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype"
        ),
        Row("… !d -> …", _reduce),
    ),
}
