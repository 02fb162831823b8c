"""Specs with symbolic sizes, in programs that a compiler traces for all sizes of a dim."""

from __future__ import annotations

import math

from torch import Tensor

from shardwise.layout import Spec
from shardwise.layout.sizes import as_sizes

__all__ = ["refreshed", "related_spec"]


def refreshed(spec: Spec) -> Spec:
    """A spec by what the compiler knows of its symbols now: some may have become numbers, others equal."""
    if not spec.is_symbolic:
        return spec
    new = spec.layout.refreshed()
    stride = None if spec.stride is None else as_sizes(spec.stride)
    return Spec(spec.mesh, new, spec.dtype, Spec.shape_type(new.shape), stride, spec.units)


def related_spec(block: Tensor, spec: Spec) -> Spec:
    """The spec of an input of a traced program, after its sizes and those of its block were related to each other.

    To the compiler they are independent symbols. A dim that is split evenly has so many times the size of its block. Where it
    is not, the sizes become numbers: the compiled program is for them alone.
    """
    layout = spec.layout
    on_mesh = block.dim() == layout.ndim  # a rank that is not on the mesh has an empty block
    for d, dim in enumerate(layout.dims):
        size = layout.shape[d]
        parts = math.prod(layout.axes.sizes_of([a for f in dim for a in f.axes]))
        inner_even = all(f.size % math.prod(layout.axes.sizes_of(f.axes)) == 0 for f in dim[1:])
        if not (on_mesh and inner_even and block.shape[d] * parts == size):
            int(size)
            if on_mesh:
                int(block.shape[d])
    return refreshed(spec)
