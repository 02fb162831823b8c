"""Checking the operands of a call: all on one mesh, and plain tensors only where they count as replicated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import tensors_in
from shardwise.call.op_call import OpCall
from shardwise.comm import PerRank
from shardwise.plan.settings import current_settings
from shardwise.tensor.consistency import check_equal, digest_bytes
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.errors import MeshError, mixed_tensors_error
from shardwise.tensor.implicit import announce
from shardwise.torch_internals.autograd import in_backward

__all__ = [
    "check_operands",
    "compare_plain",
    "has_dtensor",
    "has_one_value",
    "plain_counts",
    "plain_key",
    "plain_tensors_to_compare",
]

aten = torch.ops.aten

# Operands that torch creates as plain tensors in functions that do not reach us: from lists of indices, or where the caller
# gives none. They are compared between ranks before they count as replicated. (`x[[0, 3]]` needs no comparison.)
_CREATED_BY_TORCH: dict[Any, str] = {
    **dict.fromkeys(
        (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor),
        "indices",
    ),
    aten._embedding_bag.default: "offsets",
    aten._embedding_bag_forward_only.default: "offsets",
    aten.fractional_max_pool2d.default: "random_samples",
    aten.fractional_max_pool3d.default: "random_samples",
}


def _created_by_torch(call: OpCall) -> list[Tensor]:
    return tensors_in([call.named.get(_CREATED_BY_TORCH.get(call.func, ""))])


def has_dtensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is a DTensor among some arguments."""
    return any(isinstance(t, DTensor) for t in tensors_in([*args, *kwargs.values()]))


def plain_key(t: Tensor) -> Any:
    """What decides how a plain operand is treated; part of the key under which a call's route is cached."""
    form = (t.shape, t.layout if t.layout is not torch.strided else t.stride(), t.dtype, t.device)
    return form if has_one_value(t) else (current_settings().plain, in_backward(), form)


def plain_counts(func: Any) -> bool:
    """Whether the policy has plain operands of an op count as replicated."""
    policy = current_settings().plain
    return policy in ("replicate", "check") or (policy == "losses" and _is_loss(func))


def _is_loss(func: Any) -> bool:
    name = str(func)
    return "loss" in name or "cross_entropy" in name


def has_one_value(t: Tensor) -> bool:
    """Whether a tensor has one element, or is such a tensor expanded, as the zero tangents of forward-mode autograd are."""
    if t.numel() == 1 or t.layout is not torch.strided:
        return t.numel() == 1
    return not any(stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1)


def check_operands(call: OpCall) -> None:
    """Raise if the operands of a call are on several meshes, or a plain one does not count as replicated."""
    for t in call.tensors:
        if isinstance(t, DTensor):
            if t.device_mesh != call.mesh:
                raise MeshError(
                    f"Sharding propagation failed: {call.func} got tensors on {call.mesh} and on {t.device_mesh}.",
                    why="An op runs on one mesh. An operand that is not written to and needs no gradient joins a sub-mesh if it is "
                    "replicated along the other axes, and a larger mesh where plain tensors count as replicated.",
                    fix="Distribute both over one mesh.",
                )
        elif not _counts_as_replicated(call, t):
            raise mixed_tensors_error(call.func, t, call.first._spec)


def _counts_as_replicated(call: OpCall, t: Tensor) -> bool:
    """Whether a plain tensor counts as replicated: by its size, because torch or autograd created it, or by the policy."""
    return (
        has_one_value(t)
        or in_backward()
        or plain_counts(call.func)
        or any(t is created for created in _created_by_torch(call))
        # an in-place op on a plain tensor may read numbers, such as a norm, from DTensors
        or (t is call.returned and all(d.numel() == 1 for d in call.tensors if isinstance(d, DTensor)))
    )


def plain_tensors_to_compare(call: OpCall) -> list[int]:
    """The plain operands, by position among the tensors, that must be compared between ranks on every call."""
    if in_backward():
        return []
    policy = current_settings().plain
    everything = policy == "check" or (policy == "losses" and call.simulated)
    created = [id(t) for t in _created_by_torch(call)]
    return [
        i
        for i, t in enumerate(call.tensors)
        if not isinstance(t, DTensor)
        and not has_one_value(t)
        and (everything or id(t) in created)
        # a simulation has one plain tensor for all ranks, unless it is a PerRank
        and (isinstance(t, PerRank) or not call.simulated)
    ]


def compare_plain(func: Any, tensors: list[Tensor], positions: list[int], mesh: Any) -> None:
    """Compare plain operands between ranks, and raise on all of them if they differ."""
    for i in positions:
        if current_settings().plain != "check":
            announce(
                func,
                digest_bytes(mesh),
                "torch created one of its operands as a plain tensor, which is compared between ranks.",
                "Pass that operand as a DTensor",
            )
        check_equal(tensors[i], mesh, str(func))
