"""Pointwise ops: each element of the result is made of the elements at its place, so any layout will do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardwise.rules.call import Call, Local, Slot
from shardwise.rules.notation import groups_of, linear_text, sizes_of, without_broadcast
from shardwise.rules.rule import Letters, Row, Rule

__all__ = ["ROWS", "pointwise"]

_UP: Mapping[str, str] = {"max": "max", "min": "min"}
_KEPT: Mapping[str, str] = {"max": "max", "min": "min", "product": "product"}
_DOWN: Mapping[str, str] = {"max": "min", "min": "max"}


def pointwise(
    *,
    linear: Sequence[Sequence[int]] = (),
    monotone: Mapping[str, str] | None = None,
    when: Callable[[Call], bool] | None = None,
    runs: str = "",
) -> Row:
    """A pointwise row; `linear` and `monotone` hold only `when` a call's arguments say so; `runs` is another op to run."""
    local = Local(((runs, (Slot(0),), {}),)) if runs else None

    def build(call: Call) -> Rule | None:
        passes = when is None or when(call)
        ndim = max((len(o) for o in call.outputs), default=0)
        shapes = [*call.shapes, *call.outputs]
        if any(len(s) > ndim for s in shapes):
            return None
        said: list[Letters] = [tuple(f"d{ndim - len(s) + i}" for i in range(len(s))) for s in shapes]
        sizes = sizes_of(said, shapes)
        return Rule(
            inputs=tuple(without_broadcast(x, s, sizes) for x, s in zip(said, call.shapes, strict=False)),
            outputs=tuple(said[len(call.shapes) :]),
            linear=groups_of(call, linear) if passes else (),
            monotone=(monotone or {}) if passes and _has_order(call, monotone) else {},
            local=(lambda call, place: local) if runs else None,
        )

    text = "pointwise" + linear_text(linear)
    if monotone:
        text += (
            "; decreasing"
            if monotone is _DOWN
            else "; increasing"
            if monotone is _UP
            else "; any reduction passes"
        )
    return Row(text + (" for some arguments" if when else ""), build, reads=when is not None)


def _has_order(call: Call, monotone: Mapping[str, str] | None) -> bool:
    """Whether what is pending is the op's only tensor; integers that are turned around wrap at the end of their range."""
    return len(call.shapes) == 1 and (monotone is not _DOWN or "float" in call.dtypes[0])


def _names(text: str) -> list[str]:
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in text.split()]


def _float_to_wider(call: Call) -> bool:
    """A pending value may be cast only where the sum of casts is the cast of the sum."""
    before, after = call.dtypes[0], str(call.args.get("dtype") or call.dtypes[0]).removeprefix("torch.")
    wide = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}
    same_kind = before.startswith("complex") == after.startswith("complex")
    return before == after or (wide.get(before, 99) < wide.get(after, 0) and same_kind)


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
        _names("add.Tensor sub.Tensor lerp.Scalar lerp.Tensor addcdiv copy"), pointwise(linear=[[0, 1]])
    ),
    "aten.mul.Tensor": pointwise(linear=[[0], [1]]),
    "aten.addcmul.default": pointwise(linear=[[0, 1], [0, 2]]),
    "aten.where.self": pointwise(linear=[[1, 2]]),
    **dict.fromkeys(
        _names(
            "div.Tensor div.Scalar mul.Scalar true_divide.Tensor _conj_physical conj_physical deg2rad rad2deg "
            "gelu_backward sigmoid_backward tanh_backward threshold_backward silu_backward logit_backward "
            "native_dropout_backward elu_backward leaky_relu_backward hardtanh_backward hardswish_backward "
            "hardsigmoid_backward softplus_backward softshrink_backward hardshrink_backward mish_backward "
            "log_sigmoid_backward _prelu_kernel_backward"
        ),
        pointwise(linear=[[0]]),
    ),
    # lazy in torch, by a flag on the tensor; a block's flag would not show on the whole
    "aten._conj.default": pointwise(linear=[[0]], runs="aten.conj_physical.default"),
    "aten._conj_copy.default": pointwise(linear=[[0]], runs="aten.conj_physical.default"),
    "aten._neg_view.default": pointwise(linear=[[0]], runs="aten.neg.default"),
    "aten._neg_view_copy.default": pointwise(linear=[[0]], runs="aten.neg.default"),
    "aten.zero.default": pointwise(linear=[[0]]),
    "aten.neg.default": pointwise(linear=[[0]], monotone=_DOWN),
    **dict.fromkeys(_names("clone positive"), pointwise(linear=[[0]], monotone=_KEPT)),
    "aten._to_copy.default": pointwise(linear=[[0]], monotone=_KEPT, when=_float_to_wider),
    **dict.fromkeys(
        _names(
            "relu relu6 exp expm1 exp2 sigmoid tanh sinh asinh atan erf floor ceil trunc sign sgn clamp_max clamp_min"
        ),
        pointwise(monotone=_UP),
    ),
    "aten.masked_fill.Scalar": pointwise(linear=[[0]], when=lambda call: bool(call.args["value"] == 0)),
    "aten.threshold.default": pointwise(
        monotone=_UP, when=lambda call: bool(call.args["value"] <= call.args["threshold"])
    ),
    **dict.fromkeys(
        _names("clamp clip"),
        pointwise(
            monotone=_UP,
            when=lambda c: (
                c.args.get("min") is None or c.args.get("max") is None or c.args["min"] <= c.args["max"]
            ),
        ),
    ),
    **dict.fromkeys(
        _names(
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
            "logical_or logical_xor logit lt.Tensor lt.Scalar masked_fill.Tensor maximum minimum mish "
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
