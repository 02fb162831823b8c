"""New tensors of random numbers: the same on any mesh, and on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import current_mesh, has_current_mesh
from shardwise.layout import LayoutError, Placement
from shardwise.random import Cells, integers, normal, permutation, uniform
from shardwise.tensor.construct import from_function, layout_for, size_of
from shardwise.tensor.seeding import next_draw

__all__ = ["rand", "randint", "randn", "randperm"]

_Device = torch.device | str | int | None


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    device: _Device = None,
) -> Tensor:
    """Uniform numbers from 0 up to but not 1. Without a mesh, a plain tensor on `device`, of the same numbers.

    >>> import shardwise as sw
    >>> sw.manual_seed(0)
    >>> sw.rand(2, 2)
    tensor([[...]])
    """
    dtype = dtype or torch.get_default_dtype()
    _check("rand", dtype, dtype.is_floating_point or dtype.is_complex, "real or complex numbers")
    return _new("rand", uniform, size_of(size), dtype, layout, device_mesh, placements, device, requires_grad)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    device: _Device = None,
) -> Tensor:
    """Normal numbers of mean 0 and variance 1. Without a mesh, a plain tensor on `device`, of the same numbers."""
    dtype = dtype or torch.get_default_dtype()
    _check("randn", dtype, dtype.is_floating_point or dtype.is_complex, "real or complex numbers")
    return _new("randn", normal, size_of(size), dtype, layout, device_mesh, placements, device, requires_grad)


def randint(
    low: int,
    high: int | Sequence[int] | None = None,
    size: Sequence[int] | None = None,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    device: _Device = None,
) -> Tensor:
    """Whole numbers from `low` (0 if one bound is given) up to but not `high`.

    >>> import shardwise as sw
    >>> int(sw.randint(5, (3,)).max()) < 5, int(sw.randint(2, 5, (3,)).min()) >= 2
    (True, True)
    """
    if size is None:
        if not isinstance(high, Sequence):
            raise TypeError(
                "randint() has no size.\n"
                "  why: it was given bounds only\n"
                "  fix: randint(high, (3, 4)) or randint(low, high, (3, 4))"
            )
        size, high, low = high, low, 0
    elif high is None:
        low, high = 0, low
    dtype = dtype or torch.int64
    # for torch's own errors
    torch.randint(low, high, (1,), dtype=dtype, device="cpu", generator=torch.Generator())  # type: ignore[arg-type]
    make = partial(integers, low=low, high=int(high))  # type: ignore[arg-type]
    return _new(
        "randint", make, size_of((size,)), dtype, layout, device_mesh, placements, device, requires_grad
    )


def randperm(
    n: int,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    device: _Device = None,
) -> Tensor:
    """The numbers from 0 to n - 1 in an order drawn at random.

    >>> import shardwise as sw
    >>> sorted(sw.randperm(5).tolist())
    [0, 1, 2, 3, 4]
    """
    dtype = dtype or torch.int64
    torch.randperm(n, dtype=dtype, device="meta")  # for torch's own errors
    return _new("randperm", permutation, (n,), dtype, layout, device_mesh, placements, device, requires_grad)


def _check(name: str, dtype: torch.dtype, fits: bool, what: str) -> None:
    if not fits:
        raise LayoutError(
            f"{name} got dtype={dtype}.", why=f"it makes {what}", fix="use a dtype of such numbers"
        )


def _new(
    name: str,
    make: Callable[..., Tensor],
    size: tuple[int, ...],
    dtype: torch.dtype,
    layout: torch.layout,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    device: _Device,
    requires_grad: bool,
) -> Tensor:
    if mesh is None and not has_current_mesh() and placements is None:
        where = torch.empty(0, device=device).device  # what torch makes of a name, a number or nothing
        if where.type == "meta":
            next_draw()
            return torch.empty(size, dtype=dtype, device=where, requires_grad=requires_grad)
        return make(next_draw(), Cells(size), dtype, where).requires_grad_(requires_grad)
    target = layout_for(name, size, layout, mesh, placements)
    mesh = current_mesh(mesh, name)
    if device is not None and torch.device(device).type != mesh.device_type:
        raise LayoutError(
            f"{name} got device={device} and a mesh of {mesh.device_type} devices.",
            why="the tensor's blocks are on the mesh's devices",
            fix="leave device out",
        )
    draw = next_draw(mesh)

    def values(shape: tuple[int, ...], indices: Sequence[Sequence[int]]) -> Tensor:
        where = torch.empty(0).device  # the mesh's, by the factory
        return make(draw, Cells(size, indices), dtype, where)

    return from_function(target, values, dtype, requires_grad, mesh)
