"""Policies of the data-parallel engine: dtypes of compute and reduction, offloading, and the mesh axes of data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a module's computation, under parameters that keep their own.

    Attributes:
        param_dtype: the dtype that parameters are gathered and computed with; None for their own.
        reduce_dtype: the dtype that gradients are reduced in; None for that of the gradients.
        output_dtype: the dtype that floating-point outputs are cast to; None to leave them.
        cast_forward_inputs: whether to cast floating-point inputs to `param_dtype`.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).output_dtype is None
    True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


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
                "DataParallelMeshDims got neither shard nor replicate.\n"
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


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)
