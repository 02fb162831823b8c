"""Drawn layouts of dense tensors, with pending parts that add up to the value exactly, in any order."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm import members_of

__all__ = ["distributed", "flat", "swap"]


def distributed(t: Tensor, mesh: sw.DeviceMesh, draw: random.Random, pending: bool = True) -> Any:
    """A tensor on a mesh in a drawn layout, with `pending` parts or without; a sparse one lies whole on every rank."""
    if t.layout is not torch.strided:
        return sw.distribute_tensor(t.detach(), mesh, [sw.Replicate()] * mesh.ndim)
    placements = [_placement(t, n, draw) for n in mesh.shape]
    kinds = {p.reduce_op for p in placements if isinstance(p, sw.Partial)}
    if len(kinds) > 1 or not pending:  # one kind of reduction per tensor: others do not mix
        placements = [sw.Replicate() if isinstance(p, sw.Partial) else p for p in placements]
    cut = [sw.Replicate() if isinstance(p, sw.Partial) else p for p in placements]
    x = sw.distribute_tensor(t.detach(), mesh, cut)
    if cut == placements:
        return x
    seed = draw.random()
    axes = [a for a, p in enumerate(placements) if isinstance(p, sw.Partial)]
    blocks = {}
    for rank, coord in members_of(mesh).items():
        block = x.to_local().of_rank(rank)
        # all draw alike: ranks that share a block have the same parts of it, and each takes its own
        parts = _parts(block, mesh.shape[axes[0]], *kinds, random.Random(seed))
        mine = parts[coord[axes[0]]]
        if any(coord[a] for a in axes[1:]):
            mine = torch.zeros_like(mine) if kinds == {"sum"} else mine
        blocks[rank] = mine
    made = sw.DTensor.from_local(sw.PerRank(blocks), mesh, placements, shape=t.shape, stride=t.stride())
    return made.detach()


def _placement(t: Tensor, size: int, draw: random.Random) -> sw.Placement:
    options: list[sw.Placement] = [sw.Replicate()] + [sw.Shard(d) for d in range(t.dim())] * 2
    if t.dtype != torch.bool:
        options.append(sw.Partial())
    if not t.dtype.is_complex and draw.random() < 0.25:
        options.append(sw.Partial(draw.choice(["max", "min"])))
    if (t.dtype.is_floating_point or t.dtype.is_complex) and size == 2 and draw.random() < 0.25:
        options.append(sw.Partial("avg"))
    return draw.choice(options)


def _parts(v: Tensor, n: int, op: str, draw: random.Random) -> list[Tensor]:
    """One part per rank whose reduction is the value, with no rounding whatever the order.

    A sum has parts like (2v, -v, 0) and (v, v, -v), by element and in any order: their partial sums are 0 or
    small powers of two of v. What has no double (inf, NaN, the largest numbers) lies whole on one rank.
    """
    made = torch.Generator().manual_seed(draw.randrange(2**31))
    turn = torch.randint(0, n, v.shape, generator=made)
    kind = torch.randint(0, 3, v.shape, generator=made)
    if op in ("max", "min"):
        far = _beaten(v, op)
        return [torch.where((turn == r) | (kind == 0), v, far) for r in range(n)]
    if op == "avg":
        return [torch.where(turn == r, v * 2, torch.zeros_like(v)) for r in range(n)]
    if not (v.dtype.is_floating_point or v.dtype.is_complex):
        noise = [torch.randint(0, 100, v.shape, generator=made).to(v.dtype) for _ in range(n - 1)]
        return [v + noise[0], *(b - a for a, b in itertools.pairwise(noise)), -noise[-1]]
    plain = ~(v.abs() < torch.finfo(v.dtype).max / 4) | (kind == 0)
    nothing = torch.zeros_like(v)
    out = []
    for r in range(n):
        place = (turn + r) % n
        swing = torch.where(place == 0, v * 2, torch.where(place == 1, -v, nothing))
        if n > 2:
            swing = torch.where(kind == 1, torch.where(place == 1, -v, v), swing)
        out.append(torch.where(plain, torch.where(place == 0, v, nothing), swing))
    return out


def _beaten(v: Tensor, op: str) -> Tensor:
    """Values that lose against `v` in a reduction, without wrapping around."""
    if v.dtype == torch.bool:
        return torch.zeros_like(v) if op == "max" else torch.ones_like(v)
    if v.dtype.is_floating_point:
        far = v - v.abs() - 1 if op == "max" else v + v.abs() + 1
        return torch.where(far.isnan(), v, far)  # nothing is beyond infinity
    info = torch.iinfo(v.dtype)
    return torch.full_like(v, info.min if op == "max" else info.max)


def swap(value: Any, fn: Any) -> Any:
    """A structure with each tensor in it replaced."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, list | tuple):
        inner = [swap(v, fn) for v in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    if isinstance(value, dict):
        return {k: swap(v, fn) for k, v in value.items()}
    return value


def flat(value: Any) -> list[Any]:
    """What a structure holds, in order."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [x for v in value for x in flat(v)]
    return [x for v in value.values() for x in flat(v)] if isinstance(value, dict) else [value]
