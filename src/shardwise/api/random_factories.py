"""Factories of tensors of random numbers, which are the same on any mesh and on none.

The numbers are those of the current position in the random stream (`manual_seed`), which advances by one draw. Each rank
computes its own block and nothing is communicated, except that the ranks of a mesh without a common seed agree on one
first. All factories take the keyword arguments of `TensorOptions` and `device`: without a mesh the result is a plain
tensor on that device; on a mesh, `device` can only be the device type of the mesh. They raise LayoutError as the other
factories do, and what the torch function of the same name raises for its own arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from shardwise.api.options import TensorOptions, factory
from shardwise.comm import current_mesh
from shardwise.comm.mesh import has_current_mesh
from shardwise.layout import LayoutError
from shardwise.ops.random_fill import Numbers, describe_draw, traced_draw
from shardwise.ops.traced_draws import traced_numbers
from shardwise.random import BlockIndices, integers, normal, permutation, uniform
from shardwise.tensor.construct import from_function, layout_for, size_of
from shardwise.tensor.seeding import next_draw
from shardwise.torch_internals.tracing import is_tracing

__all__ = ["rand", "randint", "randn", "randperm"]

_Device = torch.device | str | int | None


@factory
def rand(*size: Any, device: _Device = None, **options: Unpack[TensorOptions]) -> Tensor:
    """Uniform random numbers from the half-open interval [0, 1); `size` is some integers or one sequence of them.

    >>> import shardwise as sw
    >>> sw.manual_seed(0)
    >>> sw.rand(2, 2)
    tensor([[...]])
    """
    return _new(
        "rand", Numbers("rand", (), uniform), size_of(size), _floating("rand", options), device, options
    )


@factory
def randn(*size: Any, device: _Device = None, **options: Unpack[TensorOptions]) -> Tensor:
    """Normal random numbers of mean 0 and variance 1; `size` is some integers or one sequence of them."""
    return _new(
        "randn", Numbers("randn", (), normal), size_of(size), _floating("randn", options), device, options
    )


@factory
def randint(
    low: int,
    high: int | Sequence[int] | None = None,
    size: Sequence[int] | None = None,
    *,
    device: _Device = None,
    **options: Unpack[TensorOptions],
) -> Tensor:
    """Uniform random integers from `low` (0 if only one bound is given) up to but excluding `high`.

    The default dtype is `torch.int64`.

    >>> import shardwise as sw
    >>> int(sw.randint(5, (3,)).max()) < 5, int(sw.randint(2, 5, (3,)).min()) >= 2
    (True, True)
    """
    if size is None:
        if not isinstance(high, Sequence):
            raise TypeError(
                f"randint() got no size, only the bounds {low} and {high}.\n"
                "  why: The size is the last positional argument.\n"
                "  fix: randint(high, (3, 4)) or randint(low, high, (3, 4))"
            )
        size, high, low = high, low, 0
    elif high is None:
        low, high = 0, low
    dtype = options["dtype"] or torch.int64
    # raises torch's own errors
    torch.randint(low, high, (1,), dtype=dtype, device="cpu", generator=torch.Generator())  # type: ignore[arg-type]
    generate = Numbers("randint", (low, int(high)), integers)  # type: ignore[arg-type]
    return _new("randint", generate, size_of((size,)), dtype, device, options)


@factory
def randperm(n: int, *, device: _Device = None, **options: Unpack[TensorOptions]) -> Tensor:
    """A random permutation of the integers from 0 to `n` - 1, by default of dtype `torch.int64`.

    >>> import shardwise as sw
    >>> sorted(sw.randperm(5).tolist())
    [0, 1, 2, 3, 4]
    """
    dtype = options["dtype"] or torch.int64
    torch.randperm(n, dtype=dtype, device="meta")  # raises torch's own errors
    return _new("randperm", Numbers("randperm", (), _permutation), (n,), dtype, device, options)


def _permutation(*where: Any, out: Tensor | None = None) -> Tensor:
    return permutation(*where)


def _floating(name: str, options: TensorOptions) -> torch.dtype:
    dtype = options["dtype"] or torch.get_default_dtype()
    if not (dtype.is_floating_point or dtype.is_complex):
        raise LayoutError(
            f"{name} got dtype={dtype}.",
            why="It draws real or complex numbers.",
            fix=f"{name}(..., dtype=torch.float32), or randint for integers.",
        )
    return dtype


def _new(
    name: str,
    generate: Numbers,
    size: tuple[int, ...],
    dtype: torch.dtype,
    device: _Device,
    options: TensorOptions,
) -> Tensor:
    requires_grad, placements = options["requires_grad"], options["placements"]
    if options["device_mesh"] is None and not has_current_mesh() and placements is None:
        where = torch.empty(0, device=device).device  # torch resolves names, numbers and the default device
        if where.type == "meta":
            next_draw()
            return torch.empty(size, dtype=dtype, device=where, requires_grad=requires_grad)
        if is_tracing():
            block = torch.empty(size, dtype=dtype, device=where)
            text = describe_draw(generate, size, [range(n) for n in size])
            return traced_numbers(None, text, block, ()).requires_grad_(requires_grad)
        return generate(next_draw(), BlockIndices(size), dtype, where).requires_grad_(requires_grad)
    layout = layout_for(name, size, options["layout"], options["device_mesh"], placements)
    mesh = current_mesh(options["device_mesh"], name)
    if device is not None and torch.device(device).type != mesh.device_type:
        raise LayoutError(
            f"{name} got device={device} and a mesh of {mesh.device_type} devices.",
            why="The blocks are on the devices of the mesh.",
            fix=f"{name}(..., device_mesh=mesh) without device=",
        )
    traced = is_tracing()
    draw = None if traced else next_draw(mesh)

    def values(shape: tuple[int, ...], indices: Sequence[Sequence[int]]) -> Tensor:
        if traced:
            return traced_draw(mesh, generate, layout, torch.empty(shape, dtype=dtype))
        # `from_function` makes the device of the mesh the default one
        return generate(draw, BlockIndices(size, indices), dtype, torch.empty(0).device)

    return from_function(layout, values, dtype, requires_grad, mesh, placements)
