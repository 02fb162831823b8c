"""Context parallelism as a style of attention modules."""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.experimental._context_parallel.sequences import attention_over
from shardwise.parallel.parallel_style import ParallelStyle

__all__ = ["ContextParallelStyle"]


class ContextParallelStyle(ParallelStyle):
    """A module that calls `F.scaled_dot_product_attention` on this rank's tokens attends to the whole sequence.

    Args:
        seq_dim: the sequence dim of queries, keys and values: 2.
        attention_type: SDPA.

    Raises:
        NotImplementedError: another dim, or flex attention.
    """

    class AttentionType(Enum):
        """What a module calls."""

        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"

    def __init__(self, seq_dim: int, attention_type: AttentionType) -> None:
        if seq_dim not in (2, -2) or attention_type is not self.AttentionType.SDPA:
            raise NotImplementedError(
                f"_ContextParallel got seq_dim={seq_dim} and {attention_type}.\n"
                "  why: scaled_dot_product_attention takes (batch, heads, sequence, features); flex attention is not split.\n"
                "  fix: _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.SDPA)"
            )
        self.seq_dim, self.attention_type = seq_dim, attention_type

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with attention_over(device_mesh):
                return original(*args, **kwargs)

        module.forward = forward
        return module
