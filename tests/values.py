"""Reference conversions between dense tensors and blocks in any layout.

They use neither plans nor collectives, so that tests can compare these with them. Partial values differ between ranks and
in sign. All values are small integers, or those times small powers of two, so that every order of reduction gives the
same bits in every dtype.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from tests.strategies import coords, divisors
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor
from shardwise.comm import Coord, PerRank, members_of, per_rank
from shardwise.layout import Axes, Factor, Layout, block_shape, owned

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128, torch.complex32)

DTYPES = (*_REAL, torch.bool, *_SIGNED, *_UNSIGNED, *_COMPLEX, *_EIGHT_BITS, torch.float8_e8m0fnu)
"""All dtypes that a block may have."""

_ORDERED = frozenset({"max", "min"})
_WHOLE = _ORDERED | {"sum", "product"}

REDUCTIONS: dict[torch.dtype, frozenset[str]] = {
    **dict.fromkeys(_REAL, _WHOLE | {"avg"}),
    **dict.fromkeys((*_SIGNED, *_UNSIGNED, torch.bool), _WHOLE),
    **dict.fromkeys(_COMPLEX, frozenset({"sum", "avg"})),
    # the other 8-bit dtypes are too coarse for sums of a dozen integers
    **dict.fromkeys(_EIGHT_BITS, _ORDERED),
    torch.float8_e4m3fn: _WHOLE,
}
"""The dtypes that support pending reductions, each with the reductions that are exact on the values used here."""


def dtypes_for(*layouts: Layout) -> list[torch.dtype]:
    """The dtypes that support the pending reductions of all these layouts."""
    ops = {op for layout in layouts for _, op in layout.partial}
    return [dtype for dtype in DTYPES if not ops or ops <= REDUCTIONS.get(dtype, frozenset())]


def wide(t: Tensor) -> Tensor:
    """The same values in the widest dtype of the kind, which supports all ops."""
    if t.dtype is torch.bool:
        return t
    if t.dtype.is_complex:
        return t.to(torch.complex128)
    return t.to(torch.float64 if t.dtype.is_floating_point else torch.int64)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype and shape, and are bitwise equal."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    flat = [t.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


def dense_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """A dense tensor of small integers, of both signs if the dtype has them."""
    rng = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, tuple(shape), generator=rng)

    if dtype is torch.bool:
        return numbers(0, 2).bool()
    if dtype is torch.float8_e8m0fnu:
        return (2.0 ** numbers(-3, 4)).to(dtype)
    if dtype.is_complex:
        return torch.complex(numbers(-4, 5).double(), numbers(-4, 5).double()).to(dtype)
    return (numbers(0, 9) if dtype in _UNSIGNED else numbers(-4, 5)).to(dtype)


def take(whole: Tensor, indices: Iterable[Sequence[int]]) -> Tensor:
    """A copy of the block of a dense tensor at the given indices of each dim."""
    bits = _as_integers(whole)  # not every dtype can be indexed
    for d, selected in enumerate(indices):
        bits = bits.index_select(d, torch.tensor(list(selected), dtype=torch.int64))
    return bits.view(whole.dtype).clone()


def _as_integers(t: Tensor) -> Tensor:
    if t.dtype.is_complex and t.dtype is not torch.complex32:
        return t
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def parts(whole: Tensor, layout: Layout, seed: int = 0) -> dict[Coord, Tensor]:
    """A block for each coord: of the dense tensor, or of partial values that reduce to it."""
    on, pending = layout.axes, [a for a, _ in layout.partial]
    terms = _partial_values(whole, [op for _, op in layout.partial], on.sizes_of(pending), seed)
    return {c: take(terms[tuple(c[a] for a in pending)], owned(layout, c)) for c in coords(on)}


def _partial_values(whole: Tensor, ops: list[str], sizes: tuple[int, ...], seed: int) -> dict[Coord, Tensor]:
    """For each coord on the pending axes, a dense tensor; reducing them all gives `whole`."""
    at = list(itertools.product(*map(range, sizes)))
    if not ops:
        return {(): whole}
    rng = torch.Generator().manual_seed(seed + 1)
    full, dtype = wide(whole), whole.dtype
    last = torch.randint(
        0, len(at), whole.shape, generator=rng
    )  # for each element, the coord whose term makes the result right
    exact = dtype.is_floating_point and dtype.itemsize > 1

    def noise(low: int, high: int) -> Tensor:
        n = torch.randint(low, high, whole.shape, generator=rng)
        return n.to(full.dtype)

    def other() -> Tensor:
        """A random term."""
        match ops[0], dtype is torch.bool:
            case ("sum" | "max", True):
                return full & noise(0, 2)
            case (_, True):
                return full | noise(0, 2)
            case ("sum" | "avg", _):
                return noise(-1, 2) if dtype in _EIGHT_BITS else noise(-3, 4)
            case ("max", _):
                return (full - noise(0, 6)).clamp(min=0) if dtype in _UNSIGNED else full - noise(0, 6)
            case ("min", _):
                return full + noise(0, 6)
            case _:
                sign = 1 if dtype in _UNSIGNED else 2 * noise(0, 2) - 1
                return sign * 2.0 ** noise(-1, 2) if exact else sign * torch.ones_like(full)

    out = [other() for _ in at]
    mean = math.prod(n for n, op in zip(sizes, ops, strict=True) if op == "avg")
    for i, part in enumerate(out):
        rest = [p for j, p in enumerate(out) if j != i]
        match ops[0], dtype is torch.bool:
            case ("max" | "min", _) | (_, True):
                mine = full
            case ("sum" | "avg", _):
                mine = full * mean - sum(rest)
            case _:
                mine = full / math.prod(rest) if exact else full * math.prod(rest)  # all terms are 1 or -1
        out[i] = torch.where(last == i, mine, part)
    return {c: part.to(dtype) for c, part in zip(at, out, strict=True)}


def value(blocks: Mapping[Coord, Tensor], layout: Layout) -> Tensor:
    """The dense tensor that blocks represent, in a wide dtype; replicated blocks must be bitwise equal."""
    on, pending = layout.axes, dict(layout.partial)
    free = [a for a in range(len(on)) if a not in layout.sharded and a not in pending]
    for c, block in blocks.items():
        assert tuple(block.shape) == block_shape(layout, c)
        first = tuple(0 if a in free else i for a, i in enumerate(c))
        assert same_bits(block, blocks[first]), f"the replicated blocks at {first} and {c} differ"
    dense, first = {}, next(iter(blocks.values()))
    for at in itertools.product(*(range(on.sizes[a]) for a in pending)):
        here = dict(zip(pending, at, strict=True))
        whole = torch.zeros(layout.shape, dtype=wide(first).dtype)
        for c, block in blocks.items():
            if all(c[a] == i for a, i in here.items()) and all(c[a] == 0 for a in free) and block.numel():
                whole[np.ix_(*(list(i) for i in owned(layout, c)))] = wide(block)
        dense[at] = whole
    if first.dtype is torch.uint64 and set(pending.values()) & {"max", "min"}:
        dense = {at: whole.where(whole >= 0, torch.iinfo(torch.int64).max) for at, whole in dense.items()}
    out = _reduced(list(dense.values()), pending, on)
    return wide(out.to(first.dtype))  # integers wrap around


def _reduced(dense: list[Tensor], pending: Mapping[int, str], on: Axes) -> Tensor:
    if not pending:
        return dense[0]
    stack, op = torch.stack(dense), next(iter(pending.values()))
    if stack.dtype is torch.bool:
        return stack.any(0) if op in ("sum", "max") else stack.all(0)
    match op:
        case "max":
            return stack.amax(0)
        case "min":
            return stack.amin(0)
        case "product":
            return stack.prod(0)
    mean = math.prod(on.sizes[a] for a, op in pending.items() if op == "avg")
    return stack.sum(0) / mean if mean > 1 else stack.sum(0)


def tensor(whole: Tensor, layout: Layout, mesh: DeviceMesh, seed: int = 0) -> DTensor:
    """A DTensor of this value in this layout, on real processes or in a simulation."""
    blocks, members = parts(whole, layout, seed), members_of(mesh)

    def block(rank: int) -> Tensor:
        return blocks[members[rank]] if rank in members else whole.new_empty(0)

    return DTensor.from_local(per_rank(block), mesh, layout.placements, shape=layout.shape)


def blocks_of(x: DTensor | Tensor, mesh: DeviceMesh) -> dict[Coord, Tensor]:
    """The blocks of a simulated tensor by coord."""
    local = x.to_local() if isinstance(x, DTensor) else x
    assert isinstance(local, PerRank)
    return {c: local.of_rank(r) for r, c in members_of(mesh).items()}


def random_layout(rng: random.Random, axes: Axes, shape: Sequence[int], ops: Sequence[str] = ()) -> Layout:
    """A random layout of any kind, like `strategies.layouts`; pending reductions use one of `ops`."""
    dims = [[(size, []) for size in _random_factors(rng, n)] for n in shape]
    factors = [factor for dim in dims for factor in dim]
    op = rng.choice(list(ops)) if ops else ""
    pending = {}
    for axis in rng.sample(range(len(axes)), len(axes)):
        kind = rng.random()
        if kind < 0.55 and factors:
            rng.choice(factors)[1].append(axis)
        elif kind < 0.8 and op:
            pending[axis] = rng.choice(["sum", "avg"]) if op == "avg" else op
    return Layout(axes, [[Factor(n, tuple(splitting)) for n, splitting in dim] for dim in dims], pending)


def _random_factors(rng: random.Random, n: int) -> list[int]:
    out = []
    while n > 1 and rng.random() < 0.4:
        out.append(rng.choice(divisors(n)))
        n //= out[-1]
    return [*out, n]
