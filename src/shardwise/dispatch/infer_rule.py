"""Inferring a rule by running an op on pieces of small tensors, and comparing with the op on the full tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_leaves
from shardwise.call.meta import REFUSALS
from shardwise.call.schema import op_info
from shardwise.rules import Call, Row, Rule, Slot

__all__ = ["inferred_row"]

_SplitDims = tuple[int | None, ...]  # per tensor the dim that is split, or None
_Joined = tuple[int | str, ...]  # per output the dim along which pieces are concatenated, or "sum"
_MAX_ELEMENTS = 1 << 12  # of a tensor that is run in its own size
_MAX_TRIES = 256  # ways to split the other tensors along with one


def inferred_row(op: Any) -> Row:
    """A row that is inferred from the op itself, once for each form of call.

    A dim may be split if the op on the pieces, with some dim of the other tensors split along or not, returns pieces of the
    result or summands of it: for two random draws and two splits each, one of them uneven. An op whose result depends on
    particular values (a threshold at 1000, an index past 1) can mislead this, so it is used only for ops that were declared.
    """
    return Row("inferred by running it on pieces", lambda call: _rule(op, call))


def _rule(op: Any, call: Call) -> Rule | None:
    shapes = _smaller(call.shapes)
    try:
        draws = [_Trial(op, call, shapes, seed) for seed in (1, 2)]
    except REFUSALS:  # the op does not accept tensors this small
        return None
    if draws[0].shapes != draws[1].shapes:
        return None  # the shapes of the results depend on values
    ins = [[None] * len(s) for s in shapes]  # type: list[list[str | None]]
    outs = [[None] * len(s) for s in draws[0].shapes]  # type: list[list[str | None]]
    reduced: dict[str, str] = {}
    for number, (split, joined) in enumerate(_splits(draws, shapes)):
        dims = [(i, d) for i, d in enumerate(split) if d is not None]
        taken = any(ins[i][d] for i, d in dims) or any(
            o != "sum" and outs[k][int(o)] for k, o in enumerate(joined)
        )
        if taken:
            continue
        letter = f"x{number}"
        for i, d in dims:
            ins[i][d] = letter
        for k, o in enumerate(joined):
            if o == "sum":
                reduced[letter] = "sum"
            else:
                outs[k][int(o)] = letter
    linear = tuple(frozenset({i}) for i in range(len(shapes)) if all(t.is_linear_in(i) for t in draws))
    return Rule(tuple(map(tuple, ins)), tuple(map(tuple, outs)), reduced, linear, empty=False)


def _smaller(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Small shapes in which the same sizes are equal and different ones different."""
    if all(torch.Size(s).numel() <= _MAX_ELEMENTS for s in shapes):
        return list(shapes)
    sizes = sorted({n for s in shapes for n in s if n > 1})
    small = {n: 4 + 2 * i for i, n in enumerate(sizes)}
    return [tuple(small.get(n, n) for n in s) for s in shapes]


class _Trial:
    """An op on random tensors, and on pieces of them."""

    def __init__(self, op: Any, call: Call, shapes: Sequence[tuple[int, ...]], seed: int) -> None:
        self.op, self.call = op, call
        draw = torch.Generator().manual_seed(seed)
        self.tensors = [_random(s, d, draw) for s, d in zip(shapes, call.dtypes, strict=True)]
        self.results = self.run(self.tensors)
        self.shapes = [tuple(r.shape) for r in self.results]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        given = {
            name: map_leaves(lambda v: tensors[v.number].clone() if isinstance(v, Slot) else v, value)
            for name, value in self.call.args.items()
        }
        names = [a.name for a in op_info(self.op).arguments if not a.kwarg_only]
        keyed = {name: value for name, value in given.items() if name not in names}
        found = self.op(*(given[name] for name in names), **keyed)
        return [t for t in (found if isinstance(found, list | tuple) else [found]) if t is not None]

    def joined(self, split: _SplitDims) -> _Joined | None:
        """How the results on the pieces make up the full results, or None if they do not."""
        n = next(t.shape[d] for t, d in zip(self.tensors, split, strict=True) if d is not None)
        found: set[_Joined] | None = None
        for at in {n // 2, 1}:
            sizes = [at, n - at]
            pieces = [
                [t, t] if d is None else list(t.split(sizes, d))
                for t, d in zip(self.tensors, split, strict=True)
            ]
            try:
                halves = [self.run([p[side] for p in pieces]) for side in (0, 1)]
            except REFUSALS:  # the op does not accept the pieces
                return None
            if any(len(h) != len(self.results) for h in halves):
                return None
            ways = [_ways(full, a, b, sizes) for full, a, b in zip(self.results, *halves, strict=True)]
            here = set(itertools.product(*ways))
            found = here if found is None else found & here
        return min(found, key=str) if found else None

    def is_linear_in(self, i: int) -> bool:
        """Whether the results for the sum of two values of a tensor are the sums of the results for each."""
        x = self.tensors[i]
        if not x.dtype.is_floating_point or any(not r.dtype.is_floating_point for r in self.results):
            return False
        part = _random(tuple(x.shape), str(x.dtype).removeprefix("torch."), torch.Generator().manual_seed(3))
        a, b = ([*self.tensors[:i], t, *self.tensors[i + 1 :]] for t in (part, x - part))
        return all(
            _close(full, p + q) for full, p, q in zip(self.results, self.run(a), self.run(b), strict=True)
        )


def _random(shape: tuple[int, ...], dtype: str, draw: torch.Generator) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(kind)
    return torch.randint(0, 2, shape, generator=draw).to(kind)  # small, because it may be an index


def _ways(full: Tensor, a: Tensor, b: Tensor, sizes: list[int]) -> Iterator[int | str]:
    for d in range(full.dim()):
        fits = a.dim() == b.dim() == full.dim() and [a.shape[d], b.shape[d]] == sizes
        if fits and [*a.shape[:d], *a.shape[d + 1 :]] == [*b.shape[:d], *b.shape[d + 1 :]]:
            together = torch.cat([a, b], d)
            if together.shape == full.shape and _close(full, together):
                yield d
    if full.dtype.is_floating_point and a.shape == b.shape == full.shape and _close(full, a + b):
        yield "sum"


def _close(a: Tensor, b: Tensor) -> bool:
    loose = 1e-3 if a.dtype.itemsize <= 4 or a.dtype is torch.complex64 else 1e-9
    return torch.allclose(a, b, rtol=loose, atol=loose, equal_nan=True)


def _splits(
    draws: Sequence[_Trial], shapes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[_SplitDims, _Joined]]:
    """The splits that hold in every draw: of one dim, along with as many other tensors as possible."""
    for i, shape in enumerate(shapes):
        for d, n in enumerate(shape):
            if n < 2:
                continue
            options: list[list[int | None]] = [
                [d] if j == i else [*(e for e, m in enumerate(s) if m == n and j > i), None]
                for j, s in enumerate(shapes)
            ]
            for split in itertools.islice(itertools.product(*options), _MAX_TRIES):
                joined = {trial.joined(split) for trial in draws}
                if len(joined) == 1 and (only := joined.pop()) is not None:
                    yield split, only
                    break
