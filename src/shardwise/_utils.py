"""Where torch keeps the geometry of blocks, and the context that refuses implicit communication."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise._reexports import reexports
from shardwise.api.geometry import compute_local_shape_and_global_offset
from shardwise.layout import (
    Axes,
    Layout,
    LayoutError,
    Placement,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    block_offset,
    block_shape,
    global_shape,
    global_stride,
)
from shardwise.layout import global_stride as _strides_in_order_of
from shardwise.tensor.construct import size_of
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import policy
from shardwise.torch_internals.pytree import flatten

__all__ = [
    "ExplicitRedistributionContext",
    "assert_no_mixed_partial_types",
    "compute_global_tensor_info",
    "compute_global_tensor_shape",
    "compute_local_shape_and_global_offset",
    "compute_local_stride",
    "compute_local_tensor_info",
    "normalize_to_torch_size",
    "try_find_mesh_from_args",
]


def ExplicitRedistributionContext(  # noqa: N802
    enable: bool = True, strict: bool = False, mode: str = "raise"
) -> AbstractContextManager[None]:
    """Refuse communication that the program did not ask for: `policy(implicit="error")`, under torch's name.

    Args:
        enable: False allows it, for a block inside another one.
        strict: also refuse moves without communication, such as taking a slice; it does not warn of them.
        mode: "raise", or "warn" for a warning.
    """
    if mode not in ("raise", "warn"):
        raise LayoutError(
            f"ExplicitRedistributionContext: Invalid mode {mode}.",
            why="It raises an error or warns.",
            fix='mode="raise" or mode="warn"',
        )
    if not enable:
        return policy(implicit="allow")
    if mode == "warn":
        return policy(implicit="warn")
    return policy(implicit="strict" if strict else "error")


def _compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    my_coordinate: Sequence[int] | None,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`compute_local_shape_and_global_offset` of any coord of a mesh of any shape.

    Split factors that no layout has are read as torch reads them: an axis splits what the axes before it have left.
    """
    if my_coordinate is None:
        return (0,), ()
    try:
        layout = Layout.of(tuple(global_shape), Axes(tuple(mesh_shape)), placements)
    except LayoutError:
        if not any(isinstance(p, StridedShard) for p in placements):
            raise
        shape, offset = _split_in_turn(global_shape, mesh_shape, my_coordinate, placements)
        return shape, () if skip_offset else offset
    return block_shape(layout, my_coordinate), () if skip_offset else block_offset(layout, my_coordinate)


def _split_in_turn(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coord: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    owned = [torch.arange(n) for n in global_shape]
    for p, size, i in zip(placements, mesh_shape, coord, strict=True):
        if isinstance(p, Shard | StridedShard):
            along = Shard(0) if isinstance(p, Shard) else StridedShard(0, split_factor=p.split_factor)
            owned[p.dim] = along._split_tensor(owned[p.dim], size, with_padding=False)[0][i]
    begins = (int(o[0]) if len(o) else n for o, n in zip(owned, global_shape, strict=True))
    return tuple(len(o) for o in owned), tuple(begins)


def compute_global_tensor_info(
    tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """The shape and the strides of the full tensor whose blocks all have the shape of this one."""
    # of a mesh only the sizes count, as in torch: its tests pass other objects that have them
    axes = Axes(tuple(mesh.size(axis) for axis in range(len(placements))))
    shape = global_shape(Layout.of(tuple(tensor.shape), axes, placements), tuple(tensor.shape))
    return list(shape), list(global_stride(shape, tensor.stride()))


def compute_local_tensor_info(
    global_tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """The shape and the strides of this rank's block of a full tensor."""
    shape, _ = compute_local_shape_and_global_offset(global_tensor.shape, mesh, placements, skip_offset=True)
    return list(shape), list(global_stride(shape, global_tensor.stride()))


def compute_global_tensor_shape(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Size:
    """The shape of the full tensor whose block on this rank has this shape, on a mesh of one axis.

    Blocks may have any length along the dim that is split. It sends one small all-gather if one is.

    Raises:
        NotImplementedError: there is more than one placement, or it is not `Shard` or `Replicate`.
        LayoutError: the mesh has more axes, or the ranks have different sizes along dims that are not split.
    """
    if len(placements) != 1 or placements[0].is_partial():
        raise NotImplementedError(
            "compute_global_tensor_shape only supports 1 placement for now, Shard or Replicate.\n"
            f"  why: It got {tuple(placements)}.\n"
            "  fix: DTensor.from_local(local, mesh, placements, run_check=True).shape"
        )
    if mesh.ndim != 1:
        raise LayoutError(
            f"compute_global_tensor_shape: Expected one placement per mesh dim, got 1 for {mesh.ndim}.",
            why="Each axis of a mesh has a placement.",
            fix="Pass a mesh of one axis: mesh[name]",
        )
    if placements[0].is_replicate():
        return shape
    dim = placements[0].dim  # type: ignore[attr-defined]
    sizes = torch.tensor(shape, device=mesh.device_type)
    found = [torch.empty_like(sizes) for _ in range(mesh.size())]
    dist.all_gather(found, sizes, group=mesh.get_group())
    shapes = [tuple(t.tolist()) for t in found]
    if len({(*s[:dim], *s[dim + 1 :]) for s in shapes}) > 1:
        raise LayoutError(
            f"compute_global_tensor_shape got blocks of shapes {', '.join(map(str, shapes))}.",
            why="Non-sharded dimensions should have identical size across ranks.",
            fix="Pass blocks that differ only along the dim that is split.",
        )
    return torch.Size((*shape[:dim], sum(s[dim] for s in shapes), *shape[dim + 1 :]))


def normalize_to_torch_size(size: Any) -> torch.Size:
    """A size given as a number, a sequence, or a tuple with one sequence, as `torch.Size`.

    >>> normalize_to_torch_size(3), normalize_to_torch_size(((2, 3),))
    (torch.Size([3]), torch.Size([2, 3]))
    """
    return torch.Size(size_of((size,) if isinstance(size, int) else tuple(size)))


def assert_no_mixed_partial_types(placements: Sequence[Placement]) -> None:
    """Raise a `LayoutError` if some placements are reductions that cannot be mixed."""
    Layout.of((), Axes((2,) * len(placements)), [p if p.is_partial() else Replicate() for p in placements])


def try_find_mesh_from_args(op_call: object, args: Sequence[object]) -> DeviceMesh:
    """The mesh of the first DTensor, or of the first spec, among the arguments of an op."""
    for arg in flatten(tuple(args))[0]:
        if isinstance(arg, DTensor):
            return arg.device_mesh
        if isinstance(arg, Spec):
            return arg.mesh  # type: ignore[no-any-return]
    raise LayoutError(
        f"Cannot find device mesh from args of {op_call}.",
        why="None of them is a DTensor.",
        fix="Pass a DTensor: distribute_tensor(t, mesh, placements)",
    )


def compute_local_stride(global_stride: Sequence[int], local_shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense block whose dims have the memory order of the whole tensor.

    >>> compute_local_stride((1, 8), (2, 6))
    (1, 2)
    """
    return _strides_in_order_of(local_shape, global_stride)


__getattr__ = reexports("_utils")
