"""Unscaling the gradients of a `GradScaler`: on the blocks, with one small reduction per mesh to agree on overflows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, coord_of, first_rank, is_simulated, map_ranks
from shardwise.layout import Layout, Spec, contiguous_stride
from shardwise.plan import Plan, plan_redistribute
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import communication, to_layout
from shardwise.torch_internals.subclass import bump_versions

__all__ = ["UNSCALE", "run_unscale"]

aten = torch.ops.aten
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


def run_unscale(func: Any, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients in place, mesh by mesh, and set `found_inf` to 1 if one of them is not finite on any rank.

    Args:
        func: `UNSCALE`.
        grads: DTensors on any meshes, and plain tensors.
        found_inf: a plain tensor of one element.
        inv_scale: a plain tensor of one element.
    """
    by_mesh: dict[DeviceMesh | None, list[Any]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    if plain := by_mesh.pop(None, []):
        func(plain, found_inf, inv_scale)
    plans = [plan for mesh, some in by_mesh.items() if mesh for plan in _plans(mesh, some)]
    with communication(func, plans):
        for mesh, some in by_mesh.items():
            if mesh is not None and (is_simulated() or coord_of(mesh) is not None):
                flag = _unscale_on_mesh(func, mesh, some, inv_scale)
                found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf)))
    bump_versions([g for g in grads if isinstance(g, DTensor)])


def _settled(grad: DTensor) -> Layout:
    """The layout in which the values of a gradient can be checked: without pending sums."""
    return grad._spec.layout.with_partial({})


def _flag_layout(mesh: DeviceMesh, grads: list[DTensor]) -> Layout:
    """The layout of a number that ranks with different blocks have a part of: pending along the axes that split gradients."""
    split = frozenset[int]().union(*(g._spec.layout.sharded for g in grads))
    return Layout.replicated((), axes_of(mesh)).with_partial(dict.fromkeys(sorted(split), "max"))


def _plans(mesh: DeviceMesh, grads: list[DTensor]) -> list[Plan]:
    """What is sent for the gradients on a mesh."""
    flag = _flag_layout(mesh, grads)
    moves = [(flag, flag.with_partial({}), 4)]
    for g in grads:
        layout = g._spec.layout
        moves += [(layout, _settled(g), g.dtype.itemsize), (_settled(g), layout, g.dtype.itemsize)]
    return [plan_redistribute(a, b, size) for a, b, size in moves if a is not b]


def _unscale_on_mesh(func: Any, mesh: DeviceMesh, grads: list[DTensor], inv_scale: Tensor) -> Tensor:
    """Unscale the gradients on one mesh; 1 if one of them is not finite, else 0."""
    settled = [to_layout(func, g, _settled(g)) for g in grads]
    blocks = [s._local_tensor for s in settled]

    def unscale(*blocks: Tensor) -> Tensor:
        flag = torch.zeros((), dtype=torch.float32, device=inv_scale.device)  # whatever the default dtype
        func(list(blocks), flag, inv_scale)
        return flag

    flags = map_ranks(unscale, *blocks)
    for grad, done in zip(grads, settled, strict=True):
        if done is not grad:
            block = to_layout(func, done, grad._spec.layout)._local_tensor
            map_ranks(aten.copy_.default, grad._local_tensor, block)
    layout = _flag_layout(mesh, grads)
    found = DTensor(flags, Spec(mesh, layout, flags.dtype, torch.Size(()), contiguous_stride(())))
    return first_rank(to_layout(func, found, layout.with_partial({}))._local_tensor)
