"""Import of torch's package as ours: `torch.distributed.tensor.parallel` is `shardwise.parallel`, the same module."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from shardwise.torch_internals.dtensor_class import PACKAGE

__all__ = ["AliasFinder", "alias_of"]

_OURS = "shardwise"


def alias_of(name: str) -> str | None:
    """Our name of a module of torch's package; None for other modules.

    >>> alias_of("torch.distributed.tensor.parallel.ddp"), alias_of("torch.distributed.tensors")
    ('shardwise.parallel.ddp', None)
    """
    if name != PACKAGE and not name.startswith(PACKAGE + "."):
        return None
    return _OURS + name[len(PACKAGE) :]


class AliasFinder(MetaPathFinder):
    """Finds modules of torch's package, and nothing else; torch's own files are never read."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of our module under torch's name."""
        ours = alias_of(fullname)
        if ours is None:
            return None
        if ours not in sys.modules and find_spec(ours) is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: shardwise is installed in its place and has no {ours!r}.\n"
                "  why: shardwise has the modules of torch's package that known clients import.\n"
                "  fix: run the program without shardwise.install(), and report the import.",
                name=fullname,
            )
        return ModuleSpec(fullname, _AliasLoader(ours), is_package=True)


class _AliasLoader(Loader):
    """Loads a module of ours under another name; it stays the one module that it is."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has just replaced it by that of the alias
        module.__spec__ = self._spec
