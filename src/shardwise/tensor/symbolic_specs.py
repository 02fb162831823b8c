"""Specs with symbolic sizes, in programs that a compiler traces for all sizes of a dim."""

from __future__ import annotations

from torch import Tensor

from shardwise.comm import coord_of
from shardwise.layout import Spec, block_shape
from shardwise.layout.sizes import as_sizes
from shardwise.torch_internals.symbolic_inputs import as_block_of, is_new_input

__all__ = ["refreshed", "related"]


def refreshed(spec: Spec) -> Spec:
    """A spec by what the compiler knows of its symbols now: some may have become numbers, others equal."""
    if not spec.is_symbolic:
        return spec
    new = spec.layout.refreshed()
    stride = None if spec.stride is None else as_sizes(spec.stride)
    return Spec(spec.mesh, new, spec.dtype, Spec.shape_type(new.shape), stride, spec.units)


def related(block: Tensor, spec: Spec) -> tuple[Tensor, Spec]:
    """A block and the spec of a traced program, after the sizes of the block were related to those of the spec.

    To the compiler the sizes of an input and of its block are independent symbols. Those of the block become expressions of the
    others, by which axes split the dims and by where this rank is.
    """
    coord = coord_of(spec.mesh)
    if coord is None or block.dim() != spec.ndim:  # a rank that is not on the mesh has an empty block
        for n in spec.shape:
            int(n)
        return block, refreshed(spec)
    shape = block_shape(spec.layout, coord)
    if is_new_input(block) and any(n is not m for n, m in zip(as_sizes(block.shape), shape, strict=True)):
        replaced = as_block_of(block, shape)
        if replaced is not None:
            return replaced, spec
    for n, m in zip(block.shape, shape, strict=True):
        if n != m:
            int(m), int(n)
    return block, refreshed(spec)
