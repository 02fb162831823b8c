"""Random calls of an op that fit its schema and its row, with uneven sizes, sizes 1 and 0, and values of both signs."""

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
from shardwise.torch_internals.dispatcher import Argument

__all__ = ["draw"]

_Sample = tuple[Sequence[Any], Mapping[str, Any]]
_SIZES = (5, 4, 3, 6, 2, 1)
_FLOAT = torch.float64
_DTYPES = (_FLOAT, torch.int64, _FLOAT, torch.bool, torch.complex128, torch.uint8, torch.float32)
_TRIES = 8


def draw(func: Any, text: str, examples: int, seed: int) -> list[_Sample]:
    """Random calls that the op accepts, determined by `seed`.

    >>> [[tuple(t.shape) for t in args] for args, _ in draw(torch.ops.aten.mm.default, "m k, k n -> m n", 3, 0)]
    [[(5, 3), (3, 4)], [(5, 5), (5, 2)], [(5, 1), (1, 4)]]
    """
    if why := _reason_against(func, text):
        raise _no_calls(func, why)
    rng = random.Random(f"{seed} {func}")
    torch_rng = torch.Generator().manual_seed(rng.randrange(2**31))
    out: list[_Sample] = []
    for number in range(examples * _TRIES):
        if len(out) == examples:
            break
        # the first call has dims, so that there is something to split
        least, empty = int(not out), number % 11 == 10
        call = _random_call(func, text, rng, torch_rng, _DTYPES[number % len(_DTYPES)], least, empty)
        if call is not None and _accepts(func, call):
            out.append(call)
    if not out:
        schema = ", ".join(f"{a.type} {a.name}" for a in op_info(func).arguments)
        raise _no_calls(
            func, f"It accepted none of those that fit its schema ({schema}) and its row ({text})."
        )
    return out


def _no_calls(func: Any, why: str) -> RuleError:
    return RuleError(
        f"No calls of {func} could be generated.",
        why=why,
        fix="verify(op, calls=[((x, y), {'alpha': 2}), ...])",
    )


_INDEX_NAMES = ("index", "indices", "pivots")


def _reason_against(func: Any, text: str) -> str:
    """Why an op should not be called with random arguments, on which unchecked kernels of torch crash; or ""."""
    info = op_info(func)
    namespace, _, name = info.qualified_name.partition("::")
    if namespace != "aten":
        return ""
    if name.startswith("_") and not name.startswith("__"):
        return "It is internal to torch, and its kernel checks little of its arguments."
    indices = [a.name for a in info.arguments if a.name.removeprefix("LU_") in _INDEX_NAMES]
    if indices:
        return f"Its {indices[0]} must be valid indices into another tensor."
    count = len(info.tensor_arguments)
    if count > 1 and not text.startswith("pointwise") and len(_words(text)) != count:
        return f"Its row ({text}) does not give the shapes of its {count} tensors."
    return ""


def _words(text: str) -> list[list[str]]:
    """The letters of each tensor argument, if the row has them."""
    before, arrow, _ = text.partition(";")[0].partition("->")
    return [w.split() for w in before.split(",")] if arrow else []


def _accepts(func: Any, call: _Sample) -> bool:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            func(*call[0], **call[1])
        except Exception:
            return False
    return True


def _random_call(
    func: Any,
    text: str,
    rng: random.Random,
    torch_rng: torch.Generator,
    dtype: torch.dtype,
    least: int,
    empty: bool,
) -> _Sample | None:
    info = op_info(func)
    shapes = _shapes(text, len(info.tensor_arguments), rng, least, empty)
    ndim = len(shapes[0]) if shapes else 0
    rest = iter(shapes)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for arg in info.arguments:
        if "Tensor" in arg.type:
            shape = next(rest)
            value: Any = _tensor(shape, dtype, torch_rng)
            if arg.type.startswith("Optional") and rng.random() < 0.3:
                value = None
            elif arg.type.startswith("List"):
                value = [_tensor(shape, dtype, torch_rng) for _ in range(rng.randint(1, 3))]
        else:
            value = _value(arg, ndim, dtype, rng)
            if value is _UNKNOWN:
                return None
        if arg.kwarg_only:
            kwargs[arg.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


_UNKNOWN = object()


def _value(arg: Argument, ndim: int, dtype: torch.dtype, rng: random.Random) -> Any:
    is_optional = arg.type.startswith("Optional")
    if arg.has_default and (arg.kwarg_only or rng.random() < 0.4):
        return arg.default
    inner = arg.type.removeprefix("Optional[").removesuffix("]") if is_optional else arg.type
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
    # valid sizes, strides and strings cannot be guessed, and some kernels crash on invalid ones
    return arg.default if arg.has_default else _UNKNOWN


def _tensor(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Random values, of both signs if the dtype has them."""
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=rng).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), generator=rng, dtype=dtype)
    return torch.randint(0 if dtype is torch.uint8 else -9, 10, tuple(shape), generator=rng).to(dtype)


def _shapes(text: str, count: int, rng: random.Random, least: int, empty: bool) -> list[tuple[int, ...]]:
    """The shape of each tensor argument by the letters of a row, or without letters shapes that broadcast."""
    lead = _shape(rng, max(rng.choice((1, 2, 2, 3, 0)), least), empty)
    words = _words(text)
    if len(words) != count:
        return [lead] + [_broadcast(lead, rng) for _ in range(count - 1)]
    sizes: dict[str, int] = {}
    out: list[tuple[int, ...]] = []
    for letters in words:
        shape: list[int] = []
        for word in letters:
            if word in ("…", "*"):
                shape += lead
            else:
                name = word.removeprefix("!")
                shape.append(sizes.setdefault(name, rng.choice(_SIZES)) if name else 1)
        out.append(tuple(shape))
    return out


def _shape(rng: random.Random, ndim: int, empty: bool) -> tuple[int, ...]:
    shape = [rng.choice(_SIZES) for _ in range(ndim)]
    if empty and shape:
        shape[rng.randrange(ndim)] = 0
    return tuple(shape) if math.prod(shape) <= 120 else tuple(shape[:2])


def _broadcast(shape: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    if rng.random() < 0.4:
        return shape
    first = rng.randint(0, len(shape))
    return tuple(1 if rng.random() < 0.3 else n for n in shape[first:])
