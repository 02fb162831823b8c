"""The ops under which torch's CommDebugMode counts collectives."""

from __future__ import annotations

from typing import Any

import torch

# registers torch.ops.c10d_functional; the public modules that do so import the package that we replace as well
import torch.distributed._functional_collectives

__all__ = ["collective_ops"]


def collective_ops() -> dict[str, Any]:
    """By the name of a collective, the op that programs written for torch look it up by."""
    return {
        "all_gather": torch.ops.c10d_functional.all_gather_into_tensor,
        "all_reduce": torch.ops.c10d_functional.all_reduce,
        "reduce_scatter": torch.ops.c10d_functional.reduce_scatter_tensor,
        "all_to_all": torch.ops.c10d_functional.all_to_all_single,
        "broadcast": torch.ops.c10d.broadcast_,
        "scatter": torch.ops.c10d.scatter_,
    }
