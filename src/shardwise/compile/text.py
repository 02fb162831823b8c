"""Programs as text."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from shardwise.compile.targets import Begin, Finish, Move, MoveMany
from shardwise.layout import dtype_text

__all__ = ["graph_text"]


def graph_text(graph: fx.Graph) -> str:
    """One line per node: its name, shape, op and arguments; for steps of plans the layouts and the source line."""
    return "\n".join(_line(node) for node in graph.nodes)


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    head = f"{node.name}{_shape(node.meta.get('val'))}"
    if node.op == "placeholder":
        return f"{head} = input {node.meta.get('name', '')}".rstrip()
    given = [*map(_text, node.args), *(f"{k}={_text(v)}" for k, v in node.kwargs.items())]
    return f"{head} = {_name(node.target)}({', '.join(given)}){_comment(node)}"


def _name(target: Any) -> str:
    return str(getattr(target, "label", None) or getattr(target, "__name__", target)).lstrip("_")


def _comment(node: fx.Node) -> str:
    match node.target:
        case Move(step=step) | Begin(move=Move(step=step)) | Finish(move=Move(step=step)):
            said = str(step)
        case (
            MoveMany(step=grouped) | Begin(move=MoveMany(step=grouped)) | Finish(move=MoveMany(step=grouped))
        ):
            said = str(grouped)
        case _:
            return ""
    line = node.meta.get("line", "")
    return f"   # {said}" + (f"   {line}" if line else "")


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f": {dtype_text(value.dtype)}{list(value.shape)}"
    return ""


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
