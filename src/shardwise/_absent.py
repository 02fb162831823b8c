"""Names of torch's internal design. A program that imports them runs; one that uses them is told what there is instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["absent"]


class _Absent(type):
    """The type of such names: classes, so that they may stand in annotations and in `isinstance`, where nothing is one."""

    _explanation: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(cls._explanation)


def absent(module: str, names: str, *, why: str, fix: str) -> Callable[[str], type]:
    """The `__getattr__` of a module with these names, which raise `NotImplementedError` when they are called.

    Args:
        module: the module, without the name of the package.
        names: the names, separated by blanks.
        why: why there is no such thing.
        fix: what to use.

    >>> absent("_op_schema", "OpSchema", why="Layouts follow from rules.", fix="register_sharding")("OpSchema")
    <class 'shardwise._op_schema.OpSchema'>
    """
    known = frozenset(names.split())

    def get(name: str) -> type:
        if name not in known:
            raise AttributeError(f"module 'shardwise.{module}' has no attribute {name!r}")
        text = f"shardwise.{module}.{name} was used.\n  why: {why}\n  fix: {fix}"
        return _Absent(name, (), {"__module__": f"shardwise.{module}", "_explanation": text})

    return get
