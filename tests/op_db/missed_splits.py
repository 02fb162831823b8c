"""Whether an op that ran as a fallback could have kept a split: found by running it on pieces of dense tensors."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tests.op_db.random_layouts import flat, map_tensors
from torch import Tensor

import shardwise as sw
from shardwise.call.trace import TracedCall

__all__ = ["find_missed_split"]

_PIECES = 2
_MAX_TRIED = 40  # calls of one op that are tried in one process
_MAX_OTHERS = 4  # other tensors that are tried with the same split


def find_missed_split(call: TracedCall) -> str:
    """A split that could have been kept, as text, or empty: the op on pieces gives pieces or terms of its result."""
    tensors: list[Any] = []
    args, kwargs = map_tensors((call.args, dict(call.kwargs)), lambda t: tensors.append(t) or t)
    cuts = [
        (i, d)
        for i, t in enumerate(tensors)
        if isinstance(t, sw.DTensor)
        for d, dim in enumerate(t._spec.layout.dims)
        if any(f.axes for f in dim) and t.shape[d] >= _PIECES
    ]
    shown = map_tensors((args, kwargs), lambda t: (t.dtype, tuple(t.shape)))
    key = (str(call.op), tuple(cuts), str(shown))
    if not cuts or torch.Tag.dynamic_output_shape in call.op.tags:
        return ""  # outputs of unknown size may fit by chance: `unique` of pieces without duplicates
    if key not in _known:
        tried = _tried[key[0]] = _tried.get(key[0], 0) + 1
        dense = [
            t.full_tensor().ranks[0].detach() if isinstance(t, sw.DTensor) else t.detach() for t in tensors
        ]
        _known[key] = (
            _in_subprocess(lambda: _find(call.op, args, kwargs, dense, cuts)) if tried <= _MAX_TRIED else ""
        )
    return _known[key]


_known: dict[Any, str] = {}
_tried: dict[str, int] = {}


def _in_subprocess(answer: Callable[[], str]) -> str:
    """Compute an answer in a forked process: kernels that do not check their indices may corrupt memory on pieces."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # discard messages about a corrupted heap
            signal.alarm(10)
            os.write(write, answer().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def _find(op: Any, args: Any, kwargs: Any, dense: list[Tensor], cuts: list[tuple[int, int]]) -> str:
    try:
        full = _run(op, args, kwargs, dense, {})
    except Exception:
        return ""
    for i, d in cuts:
        for split in _splits(dense, i, d):
            if how := _composes(op, args, kwargs, dense, split, full):
                return f"tensors {_text(split)} -> {how}"
    return ""


def _text(split: dict[int, int]) -> str:
    return ", ".join(f"{i} along dim {d}" for i, d in sorted(split.items()))


def _splits(dense: Sequence[Tensor], i: int, d: int) -> Iterator[dict[int, int]]:
    """Ways to split a tensor along a dim, together with other tensors that have a dim of the same size."""
    size = dense[i].shape[d]
    others: list[list[tuple[int, int] | None]] = []
    for j, t in enumerate(dense):
        dims = [e for e, n in enumerate(t.shape) if n == size]
        if j != i and dims and len(others) < _MAX_OTHERS:
            others.append([(j, e) for e in dims] + [None])
    for chosen in itertools.product(*others):
        yield {i: d, **dict(c for c in chosen if c is not None)}


def _run(op: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], sizes: dict[int, int]) -> list[Any]:
    """Run the op on some tensors, with sizes in its arguments replaced by those of the pieces."""
    rest = iter([t.clone() for t in tensors])
    args, kwargs = map_tensors((args, kwargs), lambda _: next(rest))
    if sizes:
        args = [
            [sizes.get(n, n) if type(n) is int else n for n in a] if isinstance(a, list) else a for a in args
        ]
    with torch.no_grad():
        return [r for r in flat(op(*args, **kwargs)) if r is not None]


def _composes(
    op: Any, args: Any, kwargs: Any, dense: Sequence[Tensor], split: dict[int, int], full: list[Any]
) -> str:
    """How the results of the pieces combine to the full results, or empty."""
    size = next(dense[i].shape[d] for i, d in split.items())
    for local_sizes in (False, True):
        results = []
        try:
            for p in range(_PIECES):
                pieces = [t.chunk(_PIECES, split[i])[p] if i in split else t for i, t in enumerate(dense)]
                local_size = next(pieces[i].shape[d] for i, d in split.items())
                results.append(_run(op, args, kwargs, pieces, {size: local_size} if local_sizes else {}))
        except Exception:
            continue
        if any(len(r) != len(full) for r in results):
            continue
        ways = [_combination([r[k] for r in results], want) for k, want in enumerate(full)]
        if ways and all(ways) and any(w != "same" for w in ways):
            return ", ".join(ways)
    return ""


def _combination(parts: list[Any], want: Any) -> str:
    """How pieces combine to a result: `dim d` (concatenated), `sum` or `same`; empty if not at all."""
    if not isinstance(want, Tensor) or want.numel() == 0 or want.layout is not torch.strided:
        return ""
    for d in range(want.dim()):
        if all(p.dim() == want.dim() for p in parts) and sum(p.shape[d] for p in parts) == want.shape[d]:
            try:
                if _equal(torch.cat(parts, d), want):
                    return f"dim {d}"
            except RuntimeError:
                continue
    if any(p.shape != want.shape for p in parts):
        return ""
    if all(_equal(p, want) for p in parts):
        return "same"
    return "sum" if want.dtype != torch.bool and _equal(sum(parts), want) else ""


def _equal(a: Any, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
    )
