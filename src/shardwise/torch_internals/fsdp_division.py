"""How torch's `fully_shard` divides gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.distributed import ReduceOp

__all__ = ["FSDP_COLLECTIVES", "FSDP_FUNCTIONS", "FSDP_PARAMETERS", "divide_once"]

FSDP_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
"""The module that reduces gradients. It reads the factors from its `_get_gradient_divide_factors`."""

FSDP_FUNCTIONS = "torch.distributed.fsdp._fully_shard._fully_shard"
"""The module that defines `fully_shard`."""

FSDP_PARAMETERS = "torch.distributed.fsdp._fully_shard._fsdp_param"
"""The module that splits a parameter (`FSDPParam`) into the block of the rank whose number it asks for."""


def divide_once(get_factors: Callable[..., Any]) -> Callable[..., Any]:
    """Return no factors for a group of one rank and a given factor; torch has divided by it where it copies the gradient.

    torch divides twice, so that expert gradients of transformers are too small where `ep_size` is `fsdp_size * tp_size`.
    """

    @wraps(get_factors)
    def factors(
        reduce_scatter_group: Any,
        all_reduce_group: Any,
        reduce_dtype: Any,
        device_type: str = "",
        factor: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        alone = reduce_scatter_group is None or reduce_scatter_group.size() == 1
        if alone and factor is not None:
            return None, None, ReduceOp.SUM, ReduceOp.SUM
        given = (reduce_scatter_group, all_reduce_group, reduce_dtype, device_type, factor)
        return get_factors(*given, *args, **kwargs)

    return factors
