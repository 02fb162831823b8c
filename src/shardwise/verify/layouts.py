"""Distributing a full tensor in any layout, with partial values that differ between ranks, and the way back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import Coord, PerRank, block_of, check_reducible, members_of
from shardwise.layout import Layout, Spec, block_shape, global_stride, owned
from shardwise.tensor.dtensor import DTensor

__all__ = ["BlockError", "assemble", "distribute"]


class BlockError(Exception):
    """Blocks that do not fit the layout of their tensor."""


def distribute(full: Tensor, layout: Layout, mesh: DeviceMesh, rng: torch.Generator) -> DTensor:
    """The simulated DTensor of this value in this layout."""
    pending = [a for a, _ in layout.partial]
    settled = layout.with_partial({})
    parts = _partial_values(full, [op for _, op in layout.partial], layout.axes.sizes_of(pending), rng)
    blocks = {
        rank: block_of(parts[tuple(coord[a] for a in pending)], settled, coord)
        for rank, coord in members_of(mesh).items()
    }
    stride = global_stride(full.shape, range(full.dim(), 0, -1))
    return DTensor(PerRank(blocks), Spec(mesh, layout, full.dtype, full.shape, stride))


def assemble(x: DTensor, *, check_copies: bool = True) -> Tensor:
    """The full tensor, assembled from the blocks without a plan or a collective.

    With `check_copies`, blocks that hold the same elements must be equal.
    """
    layout, members = x._spec.layout, members_of(x.device_mesh)
    pending = [a for a, _ in layout.partial]
    blocks = cast("PerRank", x._local_tensor)
    for op in {op for _, op in layout.partial}:
        check_reducible(x.dtype, op)
    parts: dict[Coord, Tensor] = {}
    copies: dict[Coord, Tensor] = {}
    for rank, coord in members.items():
        block, shape = blocks.of_rank(rank).detach().resolve_conj().resolve_neg(), block_shape(layout, coord)
        if tuple(block.shape) != shape or block.dtype is not x.dtype:
            raise BlockError(
                f"the block of rank {rank} is {block.dtype} of shape {tuple(block.shape)}, not {x.dtype} of {shape}"
            )
        key = tuple(c if a in layout.sharded or a in pending else 0 for a, c in enumerate(coord))
        if check_copies and not _equal(copies.setdefault(key, block), block):
            raise BlockError(f"the block of rank {rank} differs from another copy of it")
        key = tuple(coord[a] for a in pending)
        if key not in parts:
            parts[key] = torch.zeros(layout.shape, dtype=x.dtype)
        _put(parts[key], owned(layout, coord), block)
    return _reduce(list(parts.values()), [op for _, op in layout.partial], layout)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _put(full: Tensor, indices: Sequence[Sequence[int]], block: Tensor) -> None:
    if all(isinstance(i, range) for i in indices):
        full[tuple(slice(i[0], i[-1] + 1) if len(i) else slice(0, 0) for i in indices)] = block
    else:
        per_dim = [torch.tensor(list(i), dtype=torch.int64) for i in indices]
        full[torch.meshgrid(*per_dim, indexing="ij")] = block


def _reduction(op: str, dtype: torch.dtype) -> str:
    """The reduction of a dtype: the sum of bools is "or", their product is "and"."""
    return {"sum": "max", "product": "min"}.get(op, op) if dtype is torch.bool else op


def _reduce(parts: Sequence[Tensor], ops: Sequence[str], layout: Layout) -> Tensor:
    if not ops:
        return parts[0]
    stack = torch.stack(list(parts))
    op = _reduction(ops[0], stack.dtype)
    if op in ("max", "min"):
        return stack.amax(0) if op == "max" else stack.amin(0)
    if op == "product":
        return stack.prod(0, dtype=stack.dtype)
    count = math.prod(layout.axes.sizes[a] for a, o in layout.partial if o == "avg")
    total = stack.sum(0, dtype=stack.dtype)
    return total / count if count > 1 else total


def _partial_values(
    full: Tensor, ops: Sequence[str], sizes: Sequence[int], rng: torch.Generator
) -> dict[Coord, Tensor]:
    """Partial values by coord on the pending axes, which reduce to `full`.

    All are random but one per element, on a random rank, which compensates for the others.
    """
    coords = list(itertools.product(*map(range, sizes)))
    if not ops:
        return {(): full}
    dtype, op = full.dtype, _reduction(ops[0], full.dtype)
    wide = full if dtype.is_floating_point or dtype.is_complex else full.to(torch.int64)
    compensates = torch.randint(0, len(coords), full.shape, generator=rng)
    parts = [_random_part(wide, op, dtype, rng) for _ in coords]
    scale = math.prod(n for n, o in zip(sizes, ops, strict=True) if o == "avg")
    for i, part in enumerate(parts):
        others = torch.stack([p for j, p in enumerate(parts) if j != i])
        mine = wide
        if op in ("sum", "avg"):
            mine = wide * scale - others.sum(0)
        elif op == "product":
            # random factors of integers are signs, which are their own inverse
            factor = others.prod(0)
            mine = wide / factor if dtype.is_floating_point else wide * factor
        parts[i] = torch.where(compensates == i, mine, part)
    return {c: part.to(dtype) for c, part in zip(coords, parts, strict=True)}


def _random_part(full: Tensor, op: str, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """A partial value that the others can compensate for."""

    def noise(low: int, high: int) -> Tensor:
        return torch.randint(low, high, full.shape, generator=rng).to(full.dtype)

    if op in ("sum", "avg"):
        real = noise(-12, 13) / 4 if dtype.is_floating_point or dtype.is_complex else noise(-3, 4)
        return real + 1j * noise(-3, 4) if dtype.is_complex else real
    if op == "product":
        sign = noise(0, 2) * 2 - 1 if dtype.is_signed else torch.ones_like(full)
        return sign * 2.0 ** noise(-1, 2) if dtype.is_floating_point else sign
    least, most = _range(dtype)
    return (full - noise(0, 6)).clamp(min=least) if op == "max" else (full + noise(0, 6)).clamp(max=most)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        return -math.inf, math.inf
    info = torch.iinfo(dtype)
    return info.min, info.max
