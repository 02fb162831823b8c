"""Which import loaded a module, found when it is too late: for error messages."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["first_import"]


def first_import(name: str) -> str:
    """A sentence that says which import of the program loaded a module, and which module asked for it.

    Modules stand in `sys.modules` in the order in which their imports ended, so whoever asked for a module comes after it.
    """
    order = list(sys.modules)
    later = order[order.index(name) + 1 :]
    users = [m for m in later if not m.startswith(name) and _uses(sys.modules[m], name)]
    statement = _statement(set(later), name)
    if statement is not None:
        where, text = statement
        asked = f", through {users[0]}" if users and users[0] not in text else ""
        return f"It was loaded by `{text}` ({where}){asked}."
    used = f" (the first module that uses it is {users[0]})" if users else ""
    return f"It was loaded by the first op on a tensor subclass, or by an import outside the main file{used}."


def _uses(module: ModuleType | None, name: str) -> bool:
    """Whether a module has an object that was defined in another one."""
    if module is None or module.__name__ == "__main__":
        return False
    return any(
        isinstance(value, type) and str(getattr(value, "__module__", "")).startswith(name)
        for value in list(vars(module).values())
    )


def _statement(later: set[str], name: str) -> tuple[str, str] | None:
    """The first import statement of the program that ended after the module was loaded, as (file:line, text)."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return None
    nodes = [n for n in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))) if _imported(n)]
    for node in sorted(nodes, key=lambda n: n.lineno):  # type: ignore[attr-defined]
        names = _imported(node)
        if any(n in later or n == name or n.startswith(name + ".") for n in names):
            return f"{path}:{node.lineno}", ast.unparse(node)  # type: ignore[attr-defined]
    return None


def _imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return [module, *(f"{module}.{alias.name}" for alias in names)]
    return []
