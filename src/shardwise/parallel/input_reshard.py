"""Keeping the replicated tensors that autograd saves in a module split over the ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import Replicate, Shard
from shardwise.tensor.dtensor import DTensor

__all__ = ["input_reshard"]


def input_reshard(
    module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Split the replicated DTensors that autograd saves in calls of a module, and gather them in the backward pass.

    Args:
        module: the module.
        tp_device_mesh: a mesh of one axis; DTensors on other meshes and plain tensors are saved as they are.
        input_reshard_dim: the dim to split; with None nothing changes.

    Returns:
        The module, with hooks.

    It sends an all-gather for each of these tensors in the backward pass.
    """
    if input_reshard_dim is None:
        return module
    dim = input_reshard_dim
    entered: list[saved_tensors_hooks] = []

    def pack(x: Tensor) -> Any:
        if not isinstance(x, DTensor) or x.device_mesh != tp_device_mesh or x.is_leaf:
            return x
        if (
            not all(p.is_replicate() for p in x.placements)
            or x.dim() <= dim
            or x.size(dim) < tp_device_mesh.size()
        ):
            return x
        whole: Any = x.detach()
        return (whole.redistribute(placements=[Shard(dim)]),)

    def unpack(packed: Any) -> Any:
        return packed[0].redistribute(placements=[Replicate()]) if isinstance(packed, tuple) else packed

    def enter(_: nn.Module, args: Any) -> None:
        entered.append(saved_tensors_hooks(pack, unpack))
        entered[-1].__enter__()

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        if entered:
            entered.pop().__exit__()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
    return module
