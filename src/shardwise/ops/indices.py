"""`one_hot` and `embedding`, where torch creates plain tensors of indices on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.call.operands import has_dtensor
from shardwise.tensor.construct import replicate
from shardwise.tensor.dtensor import DTensor, is_simulated_tensor
from shardwise.torch_internals.patches import KernelPatch, TransformPatch, is_batched, unwrap_transforms
from shardwise.torch_internals.tracing import is_tracing

__all__ = ["index_patches"]

aten = torch.ops.aten


def _one_hot(x: DTensor, num_classes: int = -1) -> Tensor:
    """`one_hot` with the checks of a plain tensor, which torch omits for subclasses."""
    if x.dtype is not torch.int64:
        raise RuntimeError(
            f"one_hot is only applicable to index tensor of type LongTensor, but got {x.dtype}.\n"
            "  why: Classes are counted by int64 numbers.\n"
            "  fix: x.long()"
        )
    if not x.numel():
        if num_classes <= 0:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
    elif (
        num_classes == -1 or not is_tracing()
    ):  # compiled code does not read the values, as that of torch does not
        if int(x.min()) < 0:
            raise RuntimeError("Class values must be non-negative.")
        most = int(x.max())
        num_classes = most + 1 if num_classes == -1 else num_classes
        if most >= num_classes:
            raise RuntimeError("Class values must be smaller than num_classes.")
    return _compare_with_classes(x, x, num_classes).contiguous()


def _compare_with_classes(x: Tensor, inner: DTensor, num_classes: int) -> Tensor:
    classes = torch.arange(num_classes, device=x.device)
    replicated = replicate(classes, inner.device_mesh, simulated=is_simulated_tensor(inner))
    return (x.unsqueeze(-1) == replicated).to(torch.int64)


def _batched_one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """`one_hot` of a tensor that `vmap` maps over; torch compares no values there."""
    if num_classes <= 0:
        raise RuntimeError(
            "When vmap-ing torch.nn.functional.one_hot, please provide an explicit positive num_classes argument."
        )
    inner: Any = unwrap_transforms(x)
    return _compare_with_classes(x, inner, num_classes)


def _embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, *options: Any) -> Tensor:
    """A lookup in tables that `vmap` maps over; torch would add the offset of each table to the indices."""
    rows = weight.index_select(0, indices.reshape(-1)).reshape(*indices.shape, weight.shape[-1])
    if padding_idx < 0:
        return rows
    return torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)


def _maps_over_dtensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return is_batched(args[0]) and isinstance(unwrap_transforms(args[0]), DTensor)


def index_patches() -> list[KernelPatch | TransformPatch]:
    """The patches of these functions."""
    return [
        KernelPatch(
            aten.one_hot.default, _one_hot, "torch creates the classes as a plain tensor", has_dtensor
        ),
        TransformPatch(
            aten.one_hot.default,
            _batched_one_hot,
            "torch creates the classes as a plain tensor",
            _maps_over_dtensor,
        ),
        TransformPatch(
            aten.embedding.default, _embedding, "torch creates offsets as a plain tensor", _maps_over_dtensor
        ),
    ]
