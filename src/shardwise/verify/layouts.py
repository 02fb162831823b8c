"""Tensors of a known value in any layout; parts that are pending differ from rank to rank and change sign."""

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

__all__ = ["BlockError", "laid_out", "value_of"]


class BlockError(Exception):
    """Blocks that do not make up the tensor that their layout says."""


def laid_out(whole: Tensor, layout: Layout, mesh: DeviceMesh, rng: torch.Generator) -> DTensor:
    """A DTensor of this value in this layout, on the ranks of a simulation."""
    pending = [a for a, _ in layout.partial]
    held = layout.with_partial({})
    parts = _parts(whole, [op for _, op in layout.partial], layout.axes.sizes_of(pending), rng)
    blocks = {
        rank: block_of(parts[tuple(coord[a] for a in pending)], held, coord)
        for rank, coord in members_of(mesh).items()
    }
    stride = global_stride(whole.shape, range(whole.dim(), 0, -1))
    return DTensor(PerRank(blocks), Spec(mesh, layout, whole.dtype, whole.shape, stride))


def value_of(x: DTensor, *, copies: bool = True) -> Tensor:
    """The tensor that blocks stand for, put together by hand: no plan and no collective has a part in it.

    With `copies` they must be alike where they are of the same elements.
    """
    layout, members = x._spec.layout, members_of(x.device_mesh)
    pending = [a for a, _ in layout.partial]
    blocks = cast("PerRank", x._local_tensor)
    for op in {op for _, op in layout.partial}:
        check_reducible(x.dtype, op)
    dense: dict[Coord, Tensor] = {}
    first: dict[Coord, Tensor] = {}
    for rank, coord in members.items():
        block, shape = blocks.of_rank(rank).detach().resolve_conj().resolve_neg(), block_shape(layout, coord)
        if tuple(block.shape) != shape or block.dtype is not x.dtype:
            raise BlockError(
                f"the block of rank {rank} is {block.dtype} of shape {tuple(block.shape)}, not {x.dtype} of {shape}"
            )
        mine = tuple(c if a in layout.sharded or a in pending else 0 for a, c in enumerate(coord))
        if copies and not _same(first.setdefault(mine, block), block):
            raise BlockError(f"the block of rank {rank} differs from another that should be the same")
        at = tuple(coord[a] for a in pending)
        if at not in dense:
            dense[at] = torch.zeros(layout.shape, dtype=x.dtype)
        _put(dense[at], owned(layout, coord), block)
    return _reduced(list(dense.values()), [op for _, op in layout.partial], layout)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _put(whole: Tensor, indices: Sequence[Sequence[int]], block: Tensor) -> None:
    if all(isinstance(i, range) for i in indices):
        whole[tuple(slice(i[0], i[-1] + 1) if len(i) else slice(0, 0) for i in indices)] = block
    else:
        n = len(indices)
        at = [
            torch.tensor(list(i), dtype=torch.int64).view([-1 if d == e else 1 for e in range(n)])
            for d, i in enumerate(indices)
        ]
        whole[tuple(at)] = block


def _reduced(parts: Sequence[Tensor], ops: Sequence[str], layout: Layout) -> Tensor:
    if not ops:
        return parts[0]
    every = torch.stack(list(parts))
    op = {"sum": "max", "product": "min"}.get(ops[0], ops[0]) if every.dtype is torch.bool else ops[0]
    if op in ("max", "min"):
        return every.amax(0) if op == "max" else every.amin(0)
    if op == "product":
        return every.prod(0, dtype=every.dtype)
    count = math.prod(layout.axes.sizes[a] for a, o in layout.partial if o == "avg")
    total = every.sum(0, dtype=every.dtype)
    return total / count if count > 1 else total


def _parts(
    whole: Tensor, ops: Sequence[str], sizes: Sequence[int], rng: torch.Generator
) -> dict[Coord, Tensor]:
    """For each coord on the pending axes a part, which reduce to the whole; who makes up for others is drawn."""
    at = list(itertools.product(*map(range, sizes)))
    if not ops:
        return {(): whole}
    dtype = whole.dtype
    full = whole if dtype.is_floating_point or dtype.is_complex else whole.to(torch.int64)
    # a pending sum of truth values is their "or", a product their "and"
    op = {"sum": "max", "product": "min"}.get(ops[0], ops[0]) if dtype is torch.bool else ops[0]
    last = torch.randint(0, len(at), whole.shape, generator=rng)
    parts = [_other(full, op, dtype, rng) for _ in at]
    scale = math.prod(n for n, o in zip(sizes, ops, strict=True) if o == "avg")
    for i, part in enumerate(parts):
        rest = [p for j, p in enumerate(parts) if j != i]
        mine = full
        if op in ("sum", "avg"):
            mine = full * scale - torch.stack(rest).sum(0)
        elif op == "product":
            # of integers the others are signs, which are their own inverse
            signs = torch.stack(rest).prod(0)
            mine = full / signs if dtype.is_floating_point else full * signs
        parts[i] = torch.where(last == i, mine, part)
    return {c: part.to(dtype) for c, part in zip(at, parts, strict=True)}


def _other(full: Tensor, op: str, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """What a part may be that does not make up for the others."""

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
