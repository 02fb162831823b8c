"""Factories of tensors with known values.

Each rank creates its own block; the full tensor never exists and nothing is communicated. All factories take the keyword
arguments of `TensorOptions` and raise

- LayoutError if there is no mesh, if the placements do not fit the shape or the mesh or contain `Partial` (except for
  `empty` and `zeros`), if a size is negative, or if `layout` is not `torch.strided`;
- what the torch function of the same name raises for its own arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from shardwise.api.options import TensorOptions, factory
from shardwise.tensor.construct import from_function, layout_for, size_of
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.releases import linspace_arithmetic

__all__ = ["arange", "empty", "eye", "full", "linspace", "logspace", "ones", "zeros"]

_Number = int | float
_Bound = int | float | complex | Tensor
_Make = Callable[..., Tensor]
_Shape = tuple[int, ...]


@factory
def zeros(*size: Any, **options: Unpack[TensorOptions]) -> DTensor:
    """A tensor of zeros; `size` is some integers or one sequence of them.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     sw.zeros(3, 2, device_mesh=mesh, placements=[sw.Shard(0)]).to_local().ranks[1]
    tensor([[0., 0.]])
    """
    return _constant(torch.zeros, size, (), options)


@factory
def ones(*size: Any, **options: Unpack[TensorOptions]) -> DTensor:
    """A tensor of ones; `size` is some integers or one sequence of them."""
    return _constant(torch.ones, size, (), options)


@factory
def empty(*size: Any, **options: Unpack[TensorOptions]) -> DTensor:
    """A tensor of uninitialized values; `size` is some integers or one sequence of them."""
    return _constant(torch.empty, size, (), options)


@factory
def full(size: Sequence[int] | int, fill_value: _Number, **options: Unpack[TensorOptions]) -> DTensor:
    """A tensor of shape `size` whose elements are all `fill_value`, which also determines the default dtype."""
    options["dtype"] = options["dtype"] or torch.full((), fill_value).dtype
    return _constant(torch.full, (size,), (fill_value,), options)


@factory
def arange(
    start: _Number, end: _Number | None = None, step: _Number = 1, **options: Unpack[TensorOptions]
) -> DTensor:
    """The values from `start` (0 if only one bound is given) up to but excluding `end`, in steps of `step`.

    Integers are equal to those of `torch.arange`; floating-point values may differ in the last bit.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     sw.arange(5, device_mesh=mesh, placements=[sw.Shard(0)]).to_local().ranks
    (tensor([0, 1, 2]), tensor([3, 4]))
    """
    if end is None:
        start, end = 0, start
    # the meta device gives the length, the dtype and the errors without allocating anything
    meta = torch.arange(start, end, step, dtype=options["dtype"], device="meta")
    torch.arange(0, dtype=meta.dtype, device="cpu")  # raises for dtypes without a kernel, which meta accepts

    def values(index: Tensor) -> Tensor:
        if meta.dtype.is_floating_point:
            return torch.add(index.double() * step, start).to(meta.dtype)
        return torch.add(index * int(step), int(start)).to(meta.dtype)

    return _from_indices("arange", tuple(meta.shape), meta.dtype, values, options)


@factory
def linspace(start: _Bound, end: _Bound, steps: int, **options: Unpack[TensorOptions]) -> DTensor:
    """`steps` evenly spaced values from `start` to `end`, both included; on a CPU, real values are bit-equal to torch's.

    The bounds are numbers or tensors of one element. A DTensor is read by `item()`, which communicates if it is not
    replicated.
    """
    low, high = _number(start), _number(end)
    dtype = torch.linspace(low, high, steps, dtype=options["dtype"], device="meta").dtype
    # raises for bounds that the dtype cannot represent
    torch.linspace(low, high, min(steps, 2), dtype=dtype, device="cpu")
    kind, fused = linspace_arithmetic(dtype)
    interpolate = _interpolation(_bounds(low, high, dtype, kind), steps, kind, fused)

    def values(index: Tensor) -> Tensor:
        return torch.full_like(index, low, dtype=dtype) if steps == 1 else interpolate(index).to(dtype)

    return _from_indices("linspace", (steps,), dtype, values, options)


@factory
def logspace(
    start: _Bound, end: _Bound, steps: int, base: float = 10.0, **options: Unpack[TensorOptions]
) -> DTensor:
    """`steps` powers of `base` with evenly spaced exponents from `start` to `end`.

    On a CPU they are bit-equal to torch's, but for the sign of zeros in complex numbers. The bounds are as for `linspace`.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     sw.logspace(0, 4, 5, base=2, device_mesh=mesh, placements=[sw.Shard(0)]).to_local().ranks
    (tensor([1., 2., 4.]), tensor([ 8., 16.]))
    """
    low, high = _number(start), _number(end)
    dtype = torch.logspace(low, high, steps, base, dtype=options["dtype"], device="meta").dtype
    # raises as for linspace
    probe = torch.logspace(low, high, min(steps, 2), base, dtype=dtype, device="cpu")
    kind = dtype if dtype.is_complex else torch.float64
    exact = dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
    interpolate = _interpolation(_bounds(low, high, dtype, exact), steps, kind, fused=False)

    def values(index: Tensor) -> Tensor:
        if steps == 1:
            return torch.full_like(index, probe.item(), dtype=dtype)
        exponents = interpolate(index)
        # torch calls the C library's pow. torch.pow does so too for strided arguments; for contiguous ones it has a
        # vectorized function, whose last bit may differ.
        strided = exponents.new_empty((*index.shape, 2))[:, 0].copy_(exponents)
        return torch.pow(torch.tensor(base, dtype=kind), strided).to(dtype)

    return _from_indices("logspace", (steps,), dtype, values, options)


@factory
def eye(n: int, m: int | None = None, **options: Unpack[TensorOptions]) -> DTensor:
    """A matrix of `n` rows and `m` (by default `n`) columns with ones on the diagonal and zeros elsewhere."""
    dtype = options["dtype"] or torch.get_default_dtype()
    shape = (n, n if m is None else m)
    return _from_indices("eye", shape, dtype, lambda i, j: (i[:, None] == j[None, :]).to(dtype), options)


def _constant(make: _Make, size: tuple[Any, ...], fill: tuple[Any, ...], options: TensorOptions) -> DTensor:
    """The tensor whose blocks a torch function creates, given their shape."""
    dtype = options["dtype"] or torch.get_default_dtype()
    return _new(make.__name__, size_of(size), dtype, lambda s, _: make(s, *fill, dtype=dtype), options)


def _from_indices(
    name: str, shape: _Shape, dtype: torch.dtype, values: _Make, options: TensorOptions
) -> DTensor:
    """The tensor whose block is a function of the global indices that it owns, one index tensor per dim."""
    return _new(name, shape, dtype, lambda _, owned: values(*map(_index_tensor, owned)), options)


def _new(name: str, shape: _Shape, dtype: torch.dtype, block: _Make, options: TensorOptions) -> DTensor:
    mesh = options["device_mesh"]
    layout = layout_for(name, shape, options["layout"], mesh, options["placements"])
    return from_function(layout, block, dtype, options["requires_grad"], mesh, options["placements"])


def _index_tensor(indices: Sequence[int]) -> Tensor:
    if isinstance(indices, range):
        return torch.arange(indices.start, indices.stop)
    return torch.tensor(indices, dtype=torch.int64)


def _number(bound: Any) -> Any:
    return bound.item() if isinstance(bound, Tensor) else bound


def _bounds(start: Any, end: Any, dtype: torch.dtype, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both bounds, rounded to the dtype of the result, in the dtype in which they are subtracted."""
    first, last = (torch.full((), bound, dtype=dtype, device="cpu").to(kind) for bound in (start, end))
    return first, last


def _interpolation(
    bounds: tuple[Tensor, Tensor], steps: int, kind: torch.dtype, fused: bool
) -> Callable[[Tensor], Tensor]:
    """The evenly spaced value at each index, in the dtype `kind`; with `fused`, `first + index * step` is rounded once."""
    first, last = bounds
    difference, gaps = (last - first).to(kind), max(steps - 1, 1)
    # c10::complex divides by a real number by multiplying with its reciprocal
    step = difference * (1 / gaps) if kind.is_complex else difference / gaps
    first, last = first.to(kind), last.to(kind)

    def interpolate(index: Tensor) -> Tensor:
        up, down = index.to(kind), (steps - 1 - index).to(kind)
        if fused:
            low, high = first.add(up, alpha=step.item()), last.add(down, alpha=-step.item())
        else:
            low, high = first + up * step, last - down * step
        return torch.where(index < steps // 2, low, high)

    return interpolate
