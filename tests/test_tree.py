"""Properties of the source tree: private torch in one room, no dependence on frames or callers, small functions."""

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "shardwise"
FILES = sorted(SRC.rglob("*.py"))
TREES = {p: ast.parse(p.read_text()) for p in FILES}
OUTSIDE = [p for p in FILES if p.relative_to(SRC).parts[0] != "torch_internals"]
PRIVATE_TORCH = re.compile(r"\btorch\.(?:(?!ops\.aten\b)\w+\.)*_[A-Za-z]\w*")
READS_FRAMES = {"frames.py"}  # for the line of the program in messages, on which nothing else depends
# documented methods of named tuples, of os, of sys and of pickle
DOCUMENTED = {
    "_replace",
    "_fields",
    "_asdict",
    "_exit",
    "_xoptions",
    "_current_frames",
    "_current_exceptions",
}


def _defined() -> set[str]:
    """Every private name that our own code defines: functions, classes, attributes, slots, parameters."""
    names: set[str] = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value
                if isinstance(owner, ast.Name) and owner.id in ("self", "new", "out", "view", "x"):
                    names.add(node.attr)
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"_\w+", node.value)
            ):
                names.add(node.value)  # in __slots__
    return names


DEFINED = _defined()


def _is_op(node: ast.Attribute) -> bool:
    """Whether an attribute is the name of an op: `aten._softmax`."""
    owner = node.value
    return (isinstance(owner, ast.Name) and owner.id == "aten") or (
        isinstance(owner, ast.Attribute) and owner.attr == "aten"
    )


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: str(p.relative_to(SRC)))
def test_private_torch_is_in_its_room_only(path):
    found = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute) and re.match(r"_[A-Za-z]", node.attr):
            if not _is_op(node) and node.attr not in DEFINED | DOCUMENTED:
                found.append(f"line {node.lineno}: .{node.attr}")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [module, *(f"{module}.{a.name}" if module else a.name for a in node.names)]
            found += [
                f"line {node.lineno}: {n}"
                for n in names
                if n.startswith("torch") and re.search(r"\._[a-zA-Z]", n)
            ]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and PRIVATE_TORCH.search(node.value)
        ):
            found.append(f"line {node.lineno}: {node.value[:60]!r}")
    assert not found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_nothing_depends_on_reference_counts_frames_or_the_caller(path):
    if path.name in READS_FRAMES:
        return
    found = re.findall(
        r"getrefcount|_getframe|inspect\.stack|currentframe|f_globals|gc\.get_referrers", path.read_text()
    )
    assert not found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_are_at_the_top_and_nothing_swallows_every_exception(path):
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not inner, f"line {inner[0].lineno}: an import inside {node.name}"
        if isinstance(node, ast.ExceptHandler) and _is_broad(node):
            ends = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            assert ends or path.name in SERVERS, f"line {node.lineno}: it swallows every exception"


# A worker sends what a task raised to its parent; the prover reports what a user's op or rule raised.
SERVERS = {"worker_handle.py", "worker_process.py", "prove.py", "sampling.py"}


def _is_broad(node: ast.ExceptHandler) -> bool:
    return node.type is None or (
        isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
    )


def test_functions_and_files_are_small():
    long = [
        f"{p.relative_to(SRC)}:{n.lineno} {n.name}"
        for p, tree in TREES.items()
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef) and (n.end_lineno or 0) - n.lineno + 1 - _docstring_lines(n) > 60
    ]
    assert not long
    assert [str(p.relative_to(SRC)) for p in FILES if p.read_text().count("\n") > 400] == []


def _docstring_lines(node: ast.FunctionDef) -> int:
    text = ast.get_docstring(node)
    return 0 if text is None else text.count("\n") + 1
