"""Errors about tensors: different meshes, communication that the policy forbids, and plain tensors beside DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.layout import LayoutError, Spec

__all__ = ["CommunicationError", "MeshError", "PlainTensorError", "mixed_tensors_error"]


# NotImplementedError is what torch raises here, and what programs written for it catch.
class MeshError(LayoutError, NotImplementedError):
    """The tensors of one op are on different meshes, or a redistribution names another mesh than the tensor's."""


class CommunicationError(LayoutError):
    """An op would have communicated where `policy(implicit="error")` forbids it."""


class PlainTensorError(LayoutError):
    """The layout of a plain tensor beside a DTensor is unknown, or the plain tensor differs between ranks."""


def mixed_tensors_error(func: Any, plain: Tensor, spec: Spec) -> PlainTensorError:
    """The error for a plain tensor beside a DTensor with this spec."""
    return PlainTensorError(
        f"{func}: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor: "
        f"a plain tensor of shape {tuple(plain.shape)} beside {spec}.",
        why="It is unknown whether the plain tensor is replicated, a block, or a partial value.",
        fix="Wrap it: distribute_tensor(t, mesh, [Replicate()]) or DTensor.from_local(t, mesh, placements); or declare all "
        'plain tensors replicated: with policy(plain="replicate"): ...',
    )
