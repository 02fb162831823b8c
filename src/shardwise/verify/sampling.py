"""Drawing calls of an op that fit its schema and its row: sizes that are uneven, 1 and 0, and numbers of both signs."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.call.schema import op_info
from shardwise.rules import RuleError

__all__ = ["draw"]

_Sample = tuple[Sequence[Any], Mapping[str, Any]]
_SIZES = (5, 4, 3, 6, 2, 1)
_FLOAT = torch.float64
_DTYPES = (_FLOAT, torch.int64, _FLOAT, torch.bool, torch.complex128, torch.uint8, torch.float32)
_TRIES = 8


def draw(func: Any, text: str, examples: int, seed: int) -> list[_Sample]:
    """Calls that the op takes; the same for the same seed.

    >>> [[tuple(t.shape) for t in args] for args, _ in draw(torch.ops.aten.mm.default, "m k, k n -> m n", 3, 0)]
    [[(5, 3), (3, 4)], [(5, 5), (5, 2)], [(5, 1), (1, 4)]]
    """
    if why := _refused(func, text):
        raise _cannot(func, why)
    rng = random.Random(f"{seed} {func}")
    torch_rng = torch.Generator().manual_seed(rng.randrange(2**31))
    out: list[_Sample] = []
    for number in range(examples * _TRIES):
        if len(out) == examples:
            break
        # the first one has dims, so that there is something to split
        least, empty = int(not out), number % 11 == 10
        call = _drawn(func, text, rng, torch_rng, _DTYPES[number % len(_DTYPES)], least, empty)
        if call is not None and _takes(func, call):
            out.append(call)
    if not out:
        raise _cannot(
            func, f"none of those that fit its schema ({op_info(func).arguments}) and row ({text}) did run"
        )
    return out


def _cannot(func: Any, why: str) -> RuleError:
    return RuleError(
        f"no call of {func} could be drawn.", why=why, fix="give some: calls=[((x, y), {'alpha': 2}), …]"
    )


_FOUND = ("index", "indices", "pivots")  # arguments that point into others


def _refused(func: Any, text: str) -> str:
    """Why calls are not drawn, if so: a kernel of torch that is not asked what it is for may crash on them."""
    info = op_info(func)
    space, _, name = info.qualified_name.partition("::")
    if space != "aten":
        return ""
    if name.startswith("_") and not name.startswith("__"):
        return "it is internal to torch, and checks little of what it is given"
    pointing = [a.name for a in info.arguments if a.name.removeprefix("LU_") in _FOUND]
    if pointing:
        return f"its {pointing[0]} points into another tensor"
    count = len(info.tensor_arguments)
    if count > 1 and not text.startswith("pointwise") and len(_words(text)) != count:
        return f"its row ({text}) does not say the shapes of its {count} tensors"
    return ""


def _words(text: str) -> list[list[str]]:
    """The letters of each tensor argument, where a row has them."""
    before, arrow, _ = text.partition(";")[0].partition("->")
    return [w.split() for w in before.split(",")] if arrow else []


def _takes(func: Any, call: _Sample) -> bool:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            func(*call[0], **call[1])
        except Exception:
            return False
    return True


def _drawn(
    func: Any,
    text: str,
    rng: random.Random,
    torch_rng: torch.Generator,
    dtype: torch.dtype,
    least: int,
    empty: bool,
) -> _Sample | None:
    schema = op_info(func).arguments
    count = len(op_info(func).tensor_arguments)
    shapes = _shapes(text, count, rng, least, empty)
    if shapes is None:
        return None
    ndim = len(shapes[0]) if shapes else 0
    rest = iter(shapes)
    given: list[Any] = []
    named: dict[str, Any] = {}
    for arg in schema:
        kind = arg.type
        if "Tensor" in kind:
            shape = next(rest)
            value: Any = _tensor(shape, dtype, torch_rng)
            if kind.startswith("Optional") and rng.random() < 0.3:
                value = None
            elif kind.startswith("List"):
                value = [_tensor(shape, dtype, torch_rng) for _ in range(rng.randint(1, 3))]
        else:
            value = _value(arg, kind, ndim, dtype, rng)
            if value is _CANNOT:
                return None
        if arg.kwarg_only:
            named[arg.name] = value
        else:
            given.append(value)
    return tuple(given), named


_CANNOT = object()


def _value(arg: Any, kind: str, ndim: int, dtype: torch.dtype, rng: random.Random) -> Any:
    if arg.has_default and (arg.kwarg_only or rng.random() < 0.4):
        return arg.default
    inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional") else kind
    if arg.name.startswith("dim") and inner in ("int", "List[int]"):
        dims = range(-ndim, ndim) if ndim else range(-1, 1)
        if inner == "int":
            return rng.choice(list(dims))
        return rng.sample(range(ndim), rng.randint(1, ndim)) if ndim else []
    if inner in ("number", "float") and (dtype.is_floating_point or dtype.is_complex):
        return rng.choice((0.5, 2.0, -1.5, 3))
    if inner in ("number", "float"):
        return rng.choice((1, 2, 3))
    if inner == "bool":
        return rng.random() < 0.5
    # sizes, strides and strings that mean something cannot be guessed, and some kernels do not survive wrong ones
    return arg.default if arg.has_default else _CANNOT


def _tensor(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Numbers of both signs, or near it: no two of them alike where the dtype has enough."""
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=rng).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), generator=rng, dtype=dtype)
    return torch.randint(0 if dtype is torch.uint8 else -9, 10, tuple(shape), generator=rng).to(dtype)


def _shapes(
    text: str, count: int, rng: random.Random, least: int, empty: bool
) -> list[tuple[int, ...]] | None:
    """The shape of each tensor argument, as the letters of a row say, or else all alike but for broadcasting."""
    lead = _some(rng, max(rng.choice((1, 2, 2, 3, 0)), least), empty)
    words = _words(text)
    if len(words) != count:
        return [lead] + [_broadcast(lead, rng) for _ in range(count - 1)]
    sizes: dict[str, int] = {}
    out: list[tuple[int, ...]] = []
    for one in words:
        shape: list[int] = []
        for word in one:
            if word in ("…", "*"):
                shape += lead
            else:
                name = word.removeprefix("!")
                shape.append(sizes.setdefault(name, rng.choice(_SIZES)) if name else 1)
        out.append(tuple(shape))
    return out


def _some(rng: random.Random, ndim: int, empty: bool) -> tuple[int, ...]:
    shape = [rng.choice(_SIZES) for _ in range(ndim)]
    if empty and shape:
        shape[rng.randrange(ndim)] = 0
    return tuple(shape) if math.prod(shape) <= 120 else tuple(shape[:2])


def _broadcast(shape: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    if rng.random() < 0.4:
        return shape
    gone = rng.randint(0, len(shape))
    return tuple(1 if rng.random() < 0.3 else n for n in shape[gone:])
