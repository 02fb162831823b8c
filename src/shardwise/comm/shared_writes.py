"""Writes of PerRank tensors to a plain tensor, which is one for all ranks: done if they are the same on each, else an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_internals.subclass import version

__all__ = ["run_with_shared_writes", "shared_writes", "watch_shared_tensors"]

_STATISTICS: Mapping[str, slice] = {
    "batch_norm": slice(3, 5),
    "instance_norm": slice(3, 5),
    "fused_moving_avg_obs_fake_quant": slice(3, 7),
}
"""Where functions of torch take statistics that they update; those of `torch.nn.functional` take them after the input."""
_FUNCTIONS = frozenset({torch.nn.functional.batch_norm, torch.nn.functional.instance_norm})
_OPERATORS = frozenset(
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
) | {"__setitem__"}


def shared_writes(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The plain tensors that a call with tensors of each rank writes to, as far as its name or schema tells."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        arguments = schema.arguments
        named = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)
        written = [named.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    elif name in _STATISTICS:
        place = slice(1, 3) if func in _FUNCTIONS else _STATISTICS[name]
        written = [*args[place], kwargs.get("running_mean"), kwargs.get("running_var")]
    else:
        written = [kwargs.get("out")]
        if args and (name in _OPERATORS or (name.endswith("_") and not name.endswith("__"))):
            written.append(args[0])
    return [t for t in _tensors(written) if _is_plain(t)]


def run_with_shared_writes(
    run: Callable[..., Any],
    at_rank: Callable[[Any, int], Any],
    ranks: Sequence[int],
    name: str,
    written: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[int, Any]:
    """The results of a call on each rank, whose writes to plain tensors are done once.

    Args:
        run: the function.
        at_rank: a value as one rank has it.
        ranks: the ranks.
        name: the name of the function.
        written: the plain tensors that it writes to.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        RuntimeError: the tensors would differ between ranks, or would be part of the graphs of all of them.
    """
    if torch.is_grad_enabled() and name not in _STATISTICS and _requires_grad([args, kwargs]):
        raise _error(name, "a part of the graph of each rank")
    results, copies = {}, []
    for rank in ranks:
        own = {id(t): t.detach().clone() for t in written}
        here = _replaced(at_rank([list(args), dict(kwargs)], rank), own)
        results[rank] = run(*here[0], **here[1])
        copies.append(list(own.values()))
    if any(not _same(a, b) for other in copies[1:] for a, b in zip(copies[0], other, strict=True)):
        raise _error(name, "different on each rank")
    if name in _STATISTICS:
        with torch.no_grad():
            for t, new in zip(written, copies[0], strict=True):
                t.copy_(new)
        return results
    once = run(*at_rank(tuple(args), ranks[0]), **at_rank(dict(kwargs), ranks[0]))
    return dict.fromkeys(ranks, once)


class watch_shared_tensors:  # noqa: N801  (used as a context)
    """Raise at the end of the block if a call wrote to a plain tensor among its arguments, once for each rank."""

    def __init__(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._name = name
        self._tensors = [t for t in _tensors([args, kwargs]) if _is_plain(t) and not t.is_inference()]
        self._before = [version(t) for t in self._tensors]

    def __enter__(self) -> None:
        """Nothing: the numbers of writes are those of the construction."""

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and [version(t) for t in self._tensors] != self._before:
            raise _error(self._name, "written to by each rank")


def _is_plain(t: Any) -> bool:
    return type(t) in (Tensor, torch.nn.Parameter)


def _requires_grad(values: Any) -> bool:
    return any(b.requires_grad for t in _tensors(values) for b in getattr(t, "ranks", (t,)))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [t for v in inner for t in _tensors(v)]


def _replaced(value: Any, own: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return own.get(id(value), value)
    if isinstance(value, dict):
        return {k: _replaced(v, own) for k, v in value.items()}
    if isinstance(value, list | tuple) and _tensors(value):
        return [_replaced(v, own) for v in value]
    return value


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN counts as equal to NaN


def _error(name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"{name} got tensors of each rank (PerRank), and writes to a plain tensor, which would be {what}.\n"
        "  why: On real processes each rank has its own copy; in a simulation this is one tensor for all ranks.\n"
        "  fix: Make it from one of theirs, t = x.new_zeros(shape); or give each rank its own before, with\n"
        "       t = shardwise.per_rank(lambda rank: t.clone())"
    )
