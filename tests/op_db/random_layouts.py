"""Dense tensors in random layouts, with partial values that reduce to the value exactly, in any order."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm import members_of

__all__ = ["distribute_randomly", "flat", "map_tensors"]


def distribute_randomly(t: Tensor, mesh: sw.DeviceMesh, draw: random.Random, pending: bool = True) -> Any:
    """A DTensor in a random layout, with pending reductions unless `pending` is False; a sparse one is replicated."""
    if t.layout is not torch.strided:
        return sw.distribute_tensor(t.detach(), mesh, [sw.Replicate()] * mesh.ndim)
    placements = [_placement(t, n, draw) for n in mesh.shape]
    kinds = {p.reduce_op for p in placements if isinstance(p, sw.Partial)}
    if len(kinds) > 1 or not pending:  # different reductions on one tensor do not mix
        placements = [sw.Replicate() if isinstance(p, sw.Partial) else p for p in placements]
    without_partial = [sw.Replicate() if isinstance(p, sw.Partial) else p for p in placements]
    x = sw.distribute_tensor(t.detach(), mesh, without_partial)
    if without_partial == placements:
        return x
    seed = draw.random()
    axes = [a for a, p in enumerate(placements) if isinstance(p, sw.Partial)]
    blocks = {}
    for rank, coord in members_of(mesh).items():
        block = x.to_local().of_rank(rank)
        # the same seed for all: ranks that share a block compute the same terms of it, and each takes its own
        terms = _terms(block, mesh.shape[axes[0]], *kinds, random.Random(seed))
        term = terms[coord[axes[0]]]
        if any(coord[a] for a in axes[1:]) and kinds == {"sum"}:
            term = torch.zeros_like(term)
        blocks[rank] = term
    local = sw.PerRank(blocks)
    return sw.DTensor.from_local(local, mesh, placements, shape=t.shape, stride=t.stride()).detach()


def _placement(t: Tensor, size: int, draw: random.Random) -> sw.Placement:
    options: list[sw.Placement] = [sw.Replicate()] + [sw.Shard(d) for d in range(t.dim())] * 2
    if t.dtype != torch.bool:
        options.append(sw.Partial())
    if not t.dtype.is_complex and draw.random() < 0.25:
        options.append(sw.Partial(draw.choice(["max", "min"])))
    if (t.dtype.is_floating_point or t.dtype.is_complex) and size == 2 and draw.random() < 0.25:
        options.append(sw.Partial("avg"))
    return draw.choice(options)


def _terms(v: Tensor, n: int, op: str, draw: random.Random) -> list[Tensor]:
    """A term per rank; they reduce to the value without rounding, in any order.

    The terms of a sum are like (2v, -v, 0) or (v, v, -v), permuted for each element: their partial sums are 0 or small
    powers of two times v. Values that cannot be doubled (inf, NaN, the largest numbers) are on one rank alone.
    """
    rng = torch.Generator().manual_seed(draw.randrange(2**31))
    owner = torch.randint(0, n, v.shape, generator=rng)
    kind = torch.randint(0, 3, v.shape, generator=rng)
    if op in ("max", "min"):
        smaller = _losing(v, op)
        return [torch.where((owner == r) | (kind == 0), v, smaller) for r in range(n)]
    if op == "avg":
        return [torch.where(owner == r, v * 2, torch.zeros_like(v)) for r in range(n)]
    if not (v.dtype.is_floating_point or v.dtype.is_complex):
        noise = [torch.randint(0, 100, v.shape, generator=rng).to(v.dtype) for _ in range(n - 1)]
        return [v + noise[0], *(b - a for a, b in itertools.pairwise(noise)), -noise[-1]]
    plain = ~(v.abs() < torch.finfo(v.dtype).max / 4) | (kind == 0)
    zero = torch.zeros_like(v)
    out = []
    for r in range(n):
        position = (owner + r) % n
        term = torch.where(position == 0, v * 2, torch.where(position == 1, -v, zero))
        if n > 2:
            term = torch.where(kind == 1, torch.where(position == 1, -v, v), term)
        out.append(torch.where(plain, torch.where(position == 0, v, zero), term))
    return out


def _losing(v: Tensor, op: str) -> Tensor:
    """Values that a max or min with `v` discards, without overflow."""
    if v.dtype == torch.bool:
        return torch.zeros_like(v) if op == "max" else torch.ones_like(v)
    if v.dtype.is_floating_point:
        beyond = v - v.abs() - 1 if op == "max" else v + v.abs() + 1
        return torch.where(beyond.isnan(), v, beyond)  # infinity has no value beyond it
    info = torch.iinfo(v.dtype)
    return torch.full_like(v, info.min if op == "max" else info.max)


def map_tensors(value: Any, fn: Any) -> Any:
    """A nested structure with `fn` applied to each tensor."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(v, fn) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {k: map_tensors(v, fn) for k, v in value.items()}
    return value


def flat(value: Any) -> list[Any]:
    """The leaves of a nested structure, in order."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [x for v in value for x in flat(v)]
    return [x for v in value.values() for x in flat(v)] if isinstance(value, dict) else [value]
