"""Names of torch's internal design. A program that imports them runs; one that uses them is told what there is instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shardwise._reexports import reexported

__all__ = ["absent"]


class _Absent(type):
    """The type of such names: classes, so that they may stand in annotations and in `isinstance`, where nothing is one."""

    _explanation: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(cls._explanation)


def absent(module: str, names: str, *, why: str, fix: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module with these names, which raise `NotImplementedError` when they are called.

    It also has the names that its counterpart in torch imports from other modules of the package.

    Args:
        module: the module, without the name of the package.
        names: the names, separated by blanks.
        why: why there is no such thing.
        fix: what to use.

    >>> absent("_op_schema", "OpSchema", why="Layouts follow from rules.", fix="register_sharding")("OpSchema")
    <class 'shardwise._op_schema.OpSchema'>
    """
    known = frozenset(names.split())

    def get(name: str) -> Any:
        if name not in known:
            return reexported(module, name)
        text = f"shardwise.{module}.{name} was used.\n  why: {why}\n  fix: {fix}"
        return _Absent(name, (), {"__module__": f"shardwise.{module}", "_explanation": text})

    return get
