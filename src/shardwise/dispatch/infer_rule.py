"""Rules found by running: an op on the pieces of small tensors, held against the op on the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.rules import Call, Row, Rule, Slot

__all__ = ["discovered"]

_Cut = tuple[int | None, ...]  # per tensor the dim that is cut, or None
_Where = tuple[int | str, ...]  # per output the dim along which pieces are put together, or "sum"
_MOST = 1 << 12  # elements of a tensor that is run as large as it is
_TRIES = 256  # ways to cut the other tensors along with one


def discovered(op: Any) -> Row:
    """A row that asks the op itself, for each form of call once.

    A dim may be split if the op on the pieces, along with some dim of the other tensors or without, gives pieces of the
    result, or addends of it: for two draws and two cuts each, one of them uneven. Values are drawn, so an op whose
    result depends on particular ones (a threshold at 1000, an index past 1) may deceive it: an op is to be declared.
    """
    return Row("as found by running it on pieces", lambda call: _rule(op, call))


def _rule(op: Any, call: Call) -> Rule | None:
    shapes = _smaller(call.shapes)
    try:
        draws = [_Trial(op, call, shapes, seed) for seed in (1, 2)]
    except Exception:  # not an op for tensors so small; then it has no rule
        return None
    if draws[0].shapes != draws[1].shapes:
        return None  # what comes out depends on values
    ins = [[None] * len(s) for s in shapes]  # type: list[list[str | None]]
    outs = [[None] * len(s) for s in draws[0].shapes]  # type: list[list[str | None]]
    reduced: dict[str, str] = {}
    for number, (cut, where) in enumerate(_splits(draws, shapes)):
        dims = [(i, d) for i, d in enumerate(cut) if d is not None]
        taken = any(ins[i][d] for i, d in dims) or any(
            o != "sum" and outs[k][int(o)] for k, o in enumerate(where)
        )
        if taken:
            continue
        letter = f"x{number}"
        for i, d in dims:
            ins[i][d] = letter
        for k, o in enumerate(where):
            if o == "sum":
                reduced[letter] = "sum"
            else:
                outs[k][int(o)] = letter
    linear = tuple(frozenset({i}) for i in range(len(shapes)) if all(t.is_linear_in(i) for t in draws))
    return Rule(tuple(map(tuple, ins)), tuple(map(tuple, outs)), reduced, linear, empty=False)


def _smaller(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes with the same sizes equal and different ones different, but small."""
    if all(torch.Size(s).numel() <= _MOST for s in shapes):
        return list(shapes)
    sizes = sorted({n for s in shapes for n in s if n > 1})
    small = {n: 4 + 2 * i for i, n in enumerate(sizes)}
    return [tuple(small.get(n, n) for n in s) for s in shapes]


class _Trial:
    """An op on drawn tensors, and on pieces of them."""

    def __init__(self, op: Any, call: Call, shapes: Sequence[tuple[int, ...]], seed: int) -> None:
        self.op, self.call = op, call
        draw = torch.Generator().manual_seed(seed)
        self.tensors = [_drawn(s, d, draw) for s, d in zip(shapes, call.dtypes, strict=True)]
        self.results = self.run(self.tensors)
        self.shapes = [tuple(r.shape) for r in self.results]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        def filled(value: Any) -> Any:
            if isinstance(value, Slot):
                return tensors[value.number].clone()
            return type(value)(filled(v) for v in value) if isinstance(value, list | tuple) else value

        given = {name: filled(value) for name, value in self.call.args.items()}
        names = [a.name for a in self.op._schema.arguments if not a.kwarg_only]
        keyed = {name: value for name, value in given.items() if name not in names}
        found = self.op(*(given[name] for name in names), **keyed)
        return [t for t in (found if isinstance(found, list | tuple) else [found]) if t is not None]

    def where(self, cut: _Cut) -> _Where | None:
        """How the results on the pieces of a cut make up the whole's, or None if they do not."""
        n = next(t.shape[d] for t, d in zip(self.tensors, cut, strict=True) if d is not None)
        found: set[_Where] | None = None
        for at in {n // 2, 1}:
            sizes = [at, n - at]
            pieces = [
                [t, t] if d is None else list(t.split(sizes, d))
                for t, d in zip(self.tensors, cut, strict=True)
            ]
            try:
                halves = [self.run([p[side] for p in pieces]) for side in (0, 1)]
            except Exception:  # the op does not take them so
                return None
            if any(len(h) != len(self.results) for h in halves):
                return None
            ways = [_ways(whole, a, b, sizes) for whole, a, b in zip(self.results, *halves, strict=True)]
            here = set(itertools.product(*ways))
            found = here if found is None else found & here
        return min(found, key=str) if found else None

    def is_linear_in(self, i: int) -> bool:
        """Whether the results for a sum of two values of one tensor are the sums of theirs."""
        x = self.tensors[i]
        if not x.dtype.is_floating_point or any(not r.dtype.is_floating_point for r in self.results):
            return False
        part = _drawn(tuple(x.shape), str(x.dtype).removeprefix("torch."), torch.Generator().manual_seed(3))
        a, b = ([*self.tensors[:i], t, *self.tensors[i + 1 :]] for t in (part, x - part))
        return all(
            _close(whole, p + q) for whole, p, q in zip(self.results, self.run(a), self.run(b), strict=True)
        )


def _drawn(shape: tuple[int, ...], dtype: str, draw: torch.Generator) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(kind)
    return torch.randint(0, 2, shape, generator=draw).to(kind)  # so small that it may be an index


def _ways(whole: Tensor, a: Tensor, b: Tensor, sizes: list[int]) -> Iterator[int | str]:
    for d in range(whole.dim()):
        fits = a.dim() == b.dim() == whole.dim() and [a.shape[d], b.shape[d]] == sizes
        if fits and [*a.shape[:d], *a.shape[d + 1 :]] == [*b.shape[:d], *b.shape[d + 1 :]]:
            together = torch.cat([a, b], d)
            if together.shape == whole.shape and _close(whole, together):
                yield d
    if whole.dtype.is_floating_point and a.shape == b.shape == whole.shape and _close(whole, a + b):
        yield "sum"


def _close(a: Tensor, b: Tensor) -> bool:
    loose = 1e-3 if a.dtype.itemsize <= 4 or a.dtype is torch.complex64 else 1e-9
    return torch.allclose(a, b, rtol=loose, atol=loose, equal_nan=True)


def _splits(draws: Sequence[_Trial], shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[_Cut, _Where]]:
    """The cuts that hold in each draw: of one dim along with as many other tensors as go with it."""
    for i, shape in enumerate(shapes):
        for d, n in enumerate(shape):
            if n < 2:
                continue
            options: list[list[int | None]] = [
                [d] if j == i else [*(e for e, m in enumerate(s) if m == n and j > i), None]
                for j, s in enumerate(shapes)
            ]
            for cut in itertools.islice(itertools.product(*options), _TRIES):
                where = {trial.where(cut) for trial in draws}
                if len(where) == 1 and (only := where.pop()) is not None:
                    yield cut, only
                    break
