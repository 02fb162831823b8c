"""What an op makes of tensors of the global shapes: torch's meta kernel says, or this file where that is missing or wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["made_by", "statistic_dtype"]

aten = torch.ops.aten
_log = logging.getLogger("shardwise")
_Made = list[Any]


def made_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, told: bool = False) -> _Made | None:
    """What comes out, on the meta device, numbers as they are; None where nobody can say.

    That is said in the log if the op was `told` a rule, which is then not used.
    """
    say = _SAID.get(func, func)
    try:
        result = say(*_on_meta(args), **_on_meta(kwargs))
    except Exception as error:  # what is wrong with the call is said by the op itself, on the whole
        if told:
            _say_unused(func, error)
        return None
    if result is None and not func._schema.returns:
        return []  # it only writes
    out: _Made
    out = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, list | tuple) else []
    if any(isinstance(t, Tensor) and t.layout is not torch.strided for t in out):
        return None  # a sparse one lies whole, which no row says
    # what an output mask leaves out is None, and has no layout
    if not any(isinstance(t, Tensor) for t in out):
        return None
    if any(t is not None and not isinstance(t, Tensor | int | torch.SymInt) for t in out):
        return None
    if func in _MASKED:
        name, place = _MASKED[func]
        said = kwargs[name] if name in kwargs else args[place]
        wanted = said if isinstance(said, list | tuple) else [*[True] * (len(out) - 1), said]
        out = [t if want else None for t, want in zip(out, wanted, strict=True)]
    if func in _STATISTICS:
        out[1:] = [t.to(statistic_dtype(args)) for t in out[1:]]
    return out


_unused: set[Any] = set()


def _say_unused(func: Any, error: Exception) -> None:
    if func not in _unused:
        _unused.add(func)
        _log.warning(
            "%s has a registered rule that is not used, and runs on the whole: what it returns is not known "
            "before it runs (%s). Register that with torch.library.register_fake.",
            func,
            str(error).partition(". ")[0],
        )


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_on_meta(v) for v in value)
    if isinstance(value, dict):
        return {k: _on_meta(v) for k, v in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


# On the CPU their means have the weights' dtype if the input's is narrower; the meta kernels say otherwise.
_STATISTICS = {
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.no_stats,
}


# Which argument says what is wanted, of all outputs or of the last: their meta kernels give the rest too, and the
# kernels do not.
_MASKED = {
    aten.native_batch_norm_backward.default: ("output_mask", 9),
    aten.batch_norm_backward.default: ("output_mask", 9),
    aten._efficient_attention_backward.default: ("bias_requires_grad", 15),
}


def statistic_dtype(args: tuple[Any, ...]) -> torch.dtype:
    """The dtype of the means of a norm of `args`: the input, then its weights and running statistics, if any."""
    if args[0].device.type != "cpu":
        return torch.promote_types(args[0].dtype, torch.float32)
    weights = [t for t in args[1:5] if isinstance(t, Tensor)]
    dtype: torch.dtype = (weights or args)[0].dtype
    return dtype


def _like(number: int) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: torch.empty_like(args[number])


def _reflectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `geqrf` makes: matrices by columns, and a factor for each reflector."""
    *batch, m, n = x.shape
    return x.new_empty((*batch, n, m)).mT, x.new_empty((*batch, min(m, n)))


# Ops without a meta kernel.
_SAID: dict[Any, Callable[..., Any]] = {
    aten.multi_margin_loss_backward.default: _like(1),
    aten.multilabel_margin_loss_backward.default: _like(1),
    aten.geqrf.default: _reflectors,
    aten._aminmax.default: lambda x: (x.new_empty(()), x.new_empty(())),
    aten._aminmax.dim: lambda x, dim, keepdim=False: aten.aminmax.default(x, dim=dim, keepdim=keepdim),
}
