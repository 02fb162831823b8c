"""Changing modules of others when they are imported: an import hook with a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["ModuleFixer", "after_import"]


class ModuleFixer(MetaPathFinder):
    """Finds the modules of a table as they would be found without it, and calls their functions after they are loaded."""

    def __init__(self, fixes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._fixes = fixes
        self._searching = False

    def fix_loaded(self) -> None:
        """Call the functions of the modules that are already loaded."""
        for name, fix in self._fixes.items():
            module = sys.modules.get(name)
            # a module that is being imported has no such names yet, and is put right by its loader
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                fix(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table; None for all others."""
        if fullname not in self._fixes or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _FixingLoader(spec.loader, self._fixes[fullname])
        return spec


class _FixingLoader(Loader):
    """Loads a module with the loader that it has, then calls a function with it."""

    def __init__(self, loader: Loader, fix: Callable[[ModuleType], None]) -> None:
        self._loader, self._fix = loader, fix

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._fix(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def after_import(name: str, fix: Callable[[ModuleType], None]) -> None:
    """Call a function with a module after it is loaded, or now if it is.

    >>> seen = []
    >>> after_import("sys", lambda module: seen.append(module.__name__))
    >>> seen
    ['sys']
    """
    fixer = ModuleFixer({name: fix})
    sys.meta_path.insert(0, fixer)
    fixer.fix_loaded()
