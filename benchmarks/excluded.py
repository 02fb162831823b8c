"""What of torch's op_db is not compared with the dense result by value, and why."""

from __future__ import annotations

from typing import Any

__all__ = ["NAN_GRADIENTS", "excluded", "is_random", "is_unset"]

_DRAWN = "its values are drawn at random: shape and dtype are compared"
_UNSET = "its values are whatever the memory held: shape and dtype are compared"

# Ops whose values are no function of their inputs, by name and variant. Shapes and dtypes of these are compared.
_RANDOM: dict[str, str] = {
    **dict.fromkeys(
        (
            "bernoulli",
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "multinomial",
            "nn.functional.alpha_dropout",
            "nn.functional.dropout",
            "nn.functional.dropout2d",
            "nn.functional.dropout3d",
            "nn.functional.feature_alpha_dropout",
            "nn.functional.fractional_max_pool2d",
            "nn.functional.fractional_max_pool3d",
            "nn.functional.rrelu",
            "normal",
            "pca_lowrank",
            "rand_like",
            "randint",
            "randint_like",
            "randn",
            "randn_like",
            "svd_lowrank",
            "uniform",
        ),
        _DRAWN,
    ),
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), _UNSET
    ),
}

# Where an element is NaN, torch's gradient of a product divides by it, on plain tensors only: NaN. For any subclass
# torch multiplies the others instead, which is the derivative. Such elements of the gradient are not compared.
NAN_GRADIENTS = frozenset({"prod", "masked.prod"})


def excluded(op: Any) -> str:
    """Why the values of an op's results are not compared; empty if they are."""
    return _RANDOM.get(op.name, "")


# Those that draw only in training, and whether they are by default.
_IN_TRAINING = {
    "nn.functional.rrelu": False,
    **dict.fromkeys(
        (
            "nn.functional.alpha_dropout",
            "nn.functional.dropout",
            "nn.functional.dropout2d",
            "nn.functional.dropout3d",
            "nn.functional.feature_alpha_dropout",
            "nn.functional.multi_head_attention_forward",
        ),
        True,
    ),
}


def is_random(op: Any, sample: Any) -> str:
    """Why the values of this one sample are not compared; empty if they are."""
    training = _IN_TRAINING.get(op.name)
    if training is not None and not sample.kwargs.get("training", training):
        return ""
    if "attention" in op.name:  # its only float without a name is the probability to drop out
        chances = [sample.kwargs.get("dropout_p"), *(a for a in sample.args if isinstance(a, float))]
        return _DRAWN if any(chances) else ""
    return excluded(op)


def is_unset(op: Any) -> bool:
    """Whether an op's values are whatever the memory held, which is another thing on each rank."""
    return excluded(op) == _UNSET
