"""Policies of the data-parallel engine: dtypes of compute and reduction, offloading, and the mesh axes of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a module's computation, under parameters that keep their own.

    Attributes:
        param_dtype: the dtype that parameters are gathered and computed with; None for their own.
        reduce_dtype: the dtype that gradients are reduced in; None for that of the gradients.
        output_dtype: the dtype that floating-point outputs are cast to; None to leave them.
        cast_forward_inputs: whether to cast floating-point inputs to `param_dtype`.
        param_dtype_override_fn: returns the dtype to compute with for a parameter, `param_dtype` or the parameter's own; None
            for `param_dtype`. It must return the same on all ranks.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).output_dtype is None
    True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not getattr(dtype, "is_floating_point", False):
                raise ValueError(
                    f"MixedPrecisionPolicy got {name}={dtype!r}.\n"
                    "  why: Only floating-point parameters, gradients and outputs are cast.\n"
                    f"  fix: MixedPrecisionPolicy({name}=torch.bfloat16)"
                )

    def dtype_of(self, param: nn.Parameter) -> torch.dtype | None:
        """The dtype that the override gives a parameter; None if it gives none."""
        found = None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(param)
        if found is not None and found not in (self.param_dtype, param.dtype):
            raise ValueError(
                f"param_dtype_override_fn returned {found} for a parameter of {param.dtype}.\n"
                f"  why: A parameter is computed with in param_dtype, which is {self.param_dtype}, or in its own dtype.\n"
                "  fix: Return one of them, or None for param_dtype."
            )
        return found


@dataclass
class OffloadPolicy:
    """No offloading."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and with them optimizer state are on the CPU; compute is on the mesh's device.

    Attributes:
        pin_memory: whether to pin the memory of parameters, which lets copies overlap with compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The axes of a mesh that data parallelism uses, by name.

    Attributes:
        shard: the axes that split parameters.
        replicate: the axes that replicate them.

    >>> DataParallelMeshDims(shard=("dp", "cp"), replicate="pod").shard_names
    ('dp', 'cp')
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ValueError(
                "At least one of shard or replicate must be set in DataParallelMeshDims, and neither is.\n"
                "  why: It names the mesh axes over which the data differ.\n"
                '  fix: DataParallelMeshDims(shard="dp")'
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes that split parameters."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes that replicate them."""
        return _names(self.replicate)


class ShardPlacementResult(NamedTuple):
    """What `shard_placement_fn` may return: how a parameter is split, and on which mesh.

    Attributes:
        placement: `Shard(dim)`; None for the first dim.
        mesh_info: a mesh of data axes for this parameter, as `fully_shard` takes it: one axis, or two of which the first
            replicates. Or an object with a `mesh`, a `shard_mesh_dim` and a `replicate_mesh_dim`, as torch has it.
    """

    placement: Any
    mesh_info: Any


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)
