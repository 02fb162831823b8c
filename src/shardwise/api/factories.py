"""Tensors made in place, block by block: the whole is never made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import Placement
from shardwise.tensor.construct import from_function, layout_for, size_of
from shardwise.tensor.dtensor import DTensor

__all__ = ["arange", "empty", "eye", "full", "linspace", "ones", "zeros"]

_Number = int | float


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A tensor of zeros.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     sw.zeros(3, 2, device_mesh=mesh, placements=[sw.Shard(0)]).to_local().ranks[1]
    tensor([[0., 0.]])
    """
    dtype = dtype or torch.get_default_dtype()
    target = layout_for("zeros", size_of(size), layout, device_mesh, placements)
    return from_function(
        target, lambda shape, *_: torch.zeros(shape, dtype=dtype), dtype, requires_grad, device_mesh
    )


def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A tensor of ones."""
    dtype = dtype or torch.get_default_dtype()
    target = layout_for("ones", size_of(size), layout, device_mesh, placements)
    return from_function(
        target, lambda shape, *_: torch.ones(shape, dtype=dtype), dtype, requires_grad, device_mesh
    )


def empty(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A tensor whose values nobody has set."""
    dtype = dtype or torch.get_default_dtype()
    target = layout_for("empty", size_of(size), layout, device_mesh, placements)
    return from_function(
        target, lambda shape, *_: torch.empty(shape, dtype=dtype), dtype, requires_grad, device_mesh
    )


def full(
    size: Sequence[int] | int,
    fill_value: _Number,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A tensor that has one value everywhere."""
    dtype = dtype or torch.full((), fill_value).dtype
    target = layout_for("full", size_of((size,)), layout, device_mesh, placements)
    return from_function(
        target,
        lambda shape, *_: torch.full(shape, fill_value, dtype=dtype),
        dtype,
        requires_grad,
        device_mesh,
    )


def arange(
    start: _Number,
    end: _Number | None = None,
    step: _Number = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """The values from `start` (0 if only one bound is given) up to `end`, by `step`.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     sw.arange(5, device_mesh=mesh, placements=[sw.Shard(0)]).to_local().ranks
    (tensor([0, 1, 2]), tensor([3, 4]))
    """
    if end is None:
        start, end = 0, start
    # torch knows the length, the dtype and the errors; on the meta device it makes nothing
    whole = torch.arange(start, end, step, dtype=dtype, device="meta")
    torch.arange(0, dtype=whole.dtype)  # dtypes it has no kernel for are an error only where values are made
    target = layout_for("arange", tuple(whole.shape), layout, device_mesh, placements)

    def values(shape: tuple[int, ...], indices: Sequence[Sequence[int]]) -> Tensor:
        at = _index_tensor(indices[0])
        if whole.dtype.is_floating_point:
            return torch.add(at.double() * step, start).to(whole.dtype)
        return torch.add(at * int(step), int(start)).to(whole.dtype)

    return from_function(target, values, whole.dtype, requires_grad, device_mesh)


def linspace(
    start: _Number,
    end: _Number,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`steps` values from `start` to `end`, both included."""
    whole = torch.linspace(start, end, steps, dtype=dtype, device="meta")
    torch.linspace(start, end, min(steps, 2), dtype=whole.dtype)  # raises for bounds the dtype cannot say
    target = layout_for("linspace", tuple(whole.shape), layout, device_mesh, placements)

    # As torch computes it, to the bit: the bounds as values of the dtype, then from both ends to the middle, in
    # that dtype (integers in doubles) with one rounding where the hardware has it.
    kind = whole.dtype if whole.dtype.is_floating_point or whole.dtype.is_complex else torch.float64
    first, last = (torch.full((), b, dtype=whole.dtype, device="cpu").to(kind) for b in (start, end))
    step = ((last - first) / max(steps - 1, 1)).item()
    fused = kind in (torch.float32, torch.float64)

    def values(shape: tuple[int, ...], indices: Sequence[Sequence[int]]) -> Tensor:
        if steps == 1:
            return torch.full(shape, start, dtype=whole.dtype)
        at = _index_tensor(indices[0])
        left = steps - 1 - at
        if fused:
            up, down = first.add(at.to(kind), alpha=step), last.add(left.to(kind), alpha=-step)
        else:
            up, down = first + at.to(kind) * step, last - left.to(kind) * step
        return torch.where(at < steps // 2, up, down).to(whole.dtype)

    return from_function(target, values, whole.dtype, requires_grad, device_mesh)


def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Ones on the diagonal, zeros elsewhere."""
    dtype = dtype or torch.get_default_dtype()
    target = layout_for("eye", (n, n if m is None else m), layout, device_mesh, placements)

    def values(shape: tuple[int, ...], indices: Sequence[Sequence[int]]) -> Tensor:
        rows, cols = (_index_tensor(i) for i in indices)
        return (rows[:, None] == cols[None, :]).to(dtype)

    return from_function(target, values, dtype, requires_grad, device_mesh)


def _index_tensor(indices: Sequence[int]) -> Tensor:
    if isinstance(indices, range):
        return torch.arange(indices.start, indices.stop)
    return torch.tensor(indices, dtype=torch.int64)
