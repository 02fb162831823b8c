"""Pointwise ops: each element of the result depends on the elements at the same position, so any dim may be split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardwise.rules.call import Call, Local, Slot
from shardwise.rules.letters import broadcast_letters, dim_letters
from shardwise.rules.notation import ANY_REDUCTION, groups_of, linear_text, op_names
from shardwise.rules.rule import Row, Rule

__all__ = ["ROWS", "pointwise"]

_MONOTONE: Mapping[str, Mapping[str, str]] = {
    "": {},
    "increasing": {"max": "max", "min": "min"},
    "decreasing": {"max": "min", "min": "max"},
    "passes any reduction": ANY_REDUCTION,
}


def pointwise(
    *,
    linear: Sequence[Sequence[int]] = (),
    monotone: str = "",
    jointly: Sequence[str] = (),
    singly: Sequence[str] = (),
    when: tuple[str, Callable[[Call], bool]] | None = None,
    runs: str = "",
) -> Row:
    """A pointwise row.

    `monotone` is a key of `_MONOTONE`; `jointly` are reductions that pass if all tensors have them, `singly` those that pass
    from one tensor beside others without. All of them hold only `when` a condition, given as text and function, is true.
    `runs` is the op that runs on the blocks in place of this one. A tensor of shape (0,) beside others is not used: on
    some devices an op has no buffer.
    """
    local = Local(((runs, (Slot(0),), {}),)) if runs else None

    def build(call: Call) -> Rule | None:
        passes = when is None or when[1](call)
        ndim = max(map(len, call.outputs), default=0)
        if any(len(s) > ndim for s in call.shapes):
            return None
        unused = [
            s == (0,) and not any(0 in o for o in call.outputs[:1]) for s in (*call.shapes, *call.outputs)
        ]
        shapes = [() if skip else s for s, skip in zip((*call.shapes, *call.outputs), unused, strict=True)]
        letters = broadcast_letters(shapes)
        letters = [(None,) if skip else x for x, skip in zip(letters, unused, strict=True)]
        count = len(call.shapes)
        return Rule(
            inputs=tuple(letters[:count]),
            outputs=tuple(
                (None,) if skip else dim_letters(ndim)[ndim - len(s) :]
                for s, skip in zip(call.outputs, unused[count:], strict=True)
            ),
            linear=groups_of(call, linear) if passes else (),
            monotone=_MONOTONE[monotone] if passes and _has_order(call, monotone) else {},
            jointly=frozenset(jointly) if passes else frozenset(),
            singly=frozenset(singly) if passes else frozenset(),
            local=(lambda call, place: local) if runs else None,
            alike=frozenset(i for i, skip in enumerate(unused[count:]) if skip),
        )

    text = "pointwise" + ("" if monotone == "passes any reduction" else linear_text(linear))
    text += f"; {monotone}" if monotone else ""
    text += f"; {', '.join(jointly)} of all" if jointly else ""
    text += f"; {', '.join(singly)} of one" if singly else ""
    return Row(text + (f" if {when[0]}" if when else ""), build, reads=when is not None)


def _has_order(call: Call, monotone: str) -> bool:
    """Whether the pending tensor is the only one; negated integers wrap around at the lowest value."""
    return len(call.shapes) == 1 and (monotone != "decreasing" or "float" in call.dtypes[0])


def _is_lossless_cast(call: Call) -> bool:
    """Whether the sum of casts is the cast of the sum."""
    before, after = call.dtypes[0], str(call.args.get("dtype") or call.dtypes[0]).removeprefix("torch.")
    bytes_of = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}
    same_kind = before.startswith("complex") == after.startswith("complex")
    return before == after or (bytes_of.get(before, 99) < bytes_of.get(after, 0) and same_kind)


def _bounds_are_ordered(call: Call) -> bool:
    low, high = call.args.get("min"), call.args.get("max")
    return low is None or high is None or bool(low <= high)


_POLYNOMIALS = " ".join(
    f"special_{kind}.{form}"
    for kind in "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w "
    "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p "
    "shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v "
    "shifted_chebyshev_polynomial_w".split()
    for form in ("default", "x_scalar", "n_scalar")
)

ROWS: dict[str, Row] = {
    **dict.fromkeys(
        op_names("add.Tensor sub.Tensor lerp.Scalar lerp.Tensor addcdiv"), pointwise(linear=[[0, 1]])
    ),
    "aten.copy.default": pointwise(linear=[[0, 1]], jointly=("max", "min", "product")),
    # max(min(a, b), c) is min(max(a, c), max(b, c)), and NaN passes through both
    "aten.maximum.default": pointwise(jointly=("max",), singly=("max", "min")),
    "aten.minimum.default": pointwise(jointly=("min",), singly=("max", "min")),
    "aten.mul.Tensor": pointwise(linear=[[0], [1]]),
    "aten.addcmul.default": pointwise(linear=[[0, 1], [0, 2]]),
    "aten.where.self": pointwise(linear=[[1, 2]]),
    **dict.fromkeys(
        op_names(
            "div.Tensor div.Scalar mul.Scalar true_divide.Tensor _conj_physical conj_physical deg2rad rad2deg "
            "gelu_backward sigmoid_backward tanh_backward threshold_backward silu_backward logit_backward "
            "native_dropout_backward elu_backward leaky_relu_backward hardtanh_backward hardswish_backward "
            "hardsigmoid_backward softplus_backward softshrink_backward hardshrink_backward mish_backward "
            "log_sigmoid_backward _prelu_kernel_backward"
        ),
        pointwise(linear=[[0]]),
    ),
    # torch sets a flag on the tensor and computes nothing; the global tensor would not have the flag of its blocks
    "aten._conj.default": pointwise(linear=[[0]], runs="aten.conj_physical.default"),
    "aten._conj_copy.default": pointwise(linear=[[0]], runs="aten.conj_physical.default"),
    "aten._neg_view.default": pointwise(linear=[[0]], runs="aten.neg.default"),
    "aten._neg_view_copy.default": pointwise(linear=[[0]], runs="aten.neg.default"),
    "aten.zero.default": pointwise(linear=[[0]]),
    "aten.neg.default": pointwise(linear=[[0]], monotone="decreasing"),
    **dict.fromkeys(op_names("clone positive"), pointwise(linear=[[0]], monotone="passes any reduction")),
    "aten._to_copy.default": pointwise(
        linear=[[0]],
        monotone="passes any reduction",
        when=("the cast is to a wider dtype of the same kind", _is_lossless_cast),
    ),
    **dict.fromkeys(
        op_names(
            "relu relu6 exp expm1 exp2 sigmoid tanh sinh asinh atan erf floor ceil trunc clamp_max clamp_min"
        ),
        pointwise(monotone="increasing"),
    ),
    # the sign of NaN is 0, so that of a max would be lost
    **dict.fromkeys(
        op_names("sign sgn"),
        pointwise(monotone="increasing", when=("it is of integers", lambda call: "int" in call.dtypes[0])),
    ),
    "aten.masked_fill.Scalar": pointwise(
        linear=[[0]], when=("value is 0", lambda call: bool(call.args["value"] == 0))
    ),
    "aten.threshold.default": pointwise(
        monotone="increasing",
        when=("value <= threshold", lambda call: bool(call.args["value"] <= call.args["threshold"])),
    ),
    **dict.fromkeys(
        op_names("clamp clip"), pointwise(monotone="increasing", when=("min <= max", _bounds_are_ordered))
    ),
    **dict.fromkeys(
        op_names(
            "__lshift__.Tensor __lshift__.Scalar __rshift__.Tensor __rshift__.Scalar __xor__.Tensor __xor__.Scalar "
            "__and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar abs acos acosh add.Scalar angle asin atan2 atanh "
            "bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_left_shift.Tensor "
            "bitwise_left_shift.Tensor_Scalar bitwise_left_shift.Scalar_Tensor bitwise_not bitwise_or.Tensor "
            "bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar "
            "bitwise_right_shift.Scalar_Tensor bitwise_xor.Tensor bitwise_xor.Scalar bitwise_xor.Scalar_Tensor celu "
            "clamp.Tensor clamp_max.Tensor clamp_min.Tensor clip.Tensor complex copysign.Tensor copysign.Scalar cos cosh "
            "digamma div.Tensor_mode div.Scalar_mode elu eq.Tensor eq.Scalar erfc erfinv float_power.Tensor_Tensor "
            "float_power.Tensor_Scalar float_power.Scalar floor_divide floor_divide.Scalar fmax fmin fmod.Tensor "
            "fmod.Scalar frac frexp.Tensor gcd ge.Tensor ge.Scalar gelu gt.Tensor gt.Scalar hardshrink hardsigmoid "
            "hardswish hardtanh heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp.Tensor "
            "le.Tensor le.Scalar leaky_relu lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not "
            "logical_or logical_xor logit lt.Tensor lt.Scalar masked_fill.Tensor mish "
            "nan_to_num ne.Tensor ne.Scalar nextafter polar polygamma pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar "
            "reciprocal remainder.Tensor remainder.Scalar remainder.Scalar_Tensor round round.decimals rsqrt rsub.Scalar "
            "rsub.Tensor selu signbit silu sin sinc softplus softshrink special_airy_ai special_bessel_j0 "
            "special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx special_i0e special_i1 "
            "special_i1e special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 "
            "special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 "
            "special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_xlog1py special_xlog1py.other_scalar "
            "special_xlog1py.self_scalar special_zeta special_zeta.other_scalar special_zeta.self_scalar sqrt square "
            "sub.Scalar tan xlogy.Tensor xlogy.Scalar_Other xlogy.Scalar_Self "
            "fill.Scalar _prelu_kernel log_sigmoid_forward " + _POLYNOMIALS
        ),
        pointwise(),
    ),
}
