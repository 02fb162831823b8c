"""From a captured graph to a function: run node by node, or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from shardwise.compile.compiled import compiled_by_inductor
from shardwise.compile.errors import CaptureError
from shardwise.compile.targets import FILL
from shardwise.ops.random_fill import fill_block
from shardwise.torch_internals.dispatcher import python_binding

__all__ = ["as_python", "compile_graph"]


def compile_graph(graph: fx.Graph, backend: str) -> Callable[..., Any]:
    """A function of the graph's inputs that returns a tuple of its outputs."""
    if backend == "fx":
        return as_python(graph)
    if backend == "inductor":
        return compiled_by_inductor(graph)
    raise CaptureError(
        f"There is no backend {backend!r}.",
        why='Programs run as "fx", node by node, or compiled with "inductor".',
        fix='program.compile("inductor")',
    )


def as_python(graph: fx.Graph, yields: Callable[[Any], bool] | None = None) -> Callable[..., Any]:
    """The graph as one Python function that calls torch's quickest bindings, and frees each value after its last use.

    Args:
        graph: the graph.
        yields: nodes with these targets are yielded instead, with their arguments, by what is a generator then: it is sent the
            results, and its last item is the outputs.
    """
    names: dict[fx.Node, str] = {}
    constants: dict[str, Any] = {}
    functions: dict[int, str] = {}
    lines: list[str] = []
    arguments: list[str] = []
    last = _last_uses(graph)

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if isinstance(value, list | tuple):  # of classes of torch.fx
            inner = ", ".join(map(text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    for node in graph.nodes:
        names[node] = f"v{len(names)}"
        if node.op == "placeholder":
            arguments.append(names[node])
        elif node.op == "output":
            lines.append(f"{'yield None,' if yields else 'return'} {text(tuple(node.args[0]))}")
        else:
            function = functions.setdefault(id(node.target), f"f{len(functions)}")
            constants[function] = _binding(node.target)
            given = [*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())]
            result = f"{names[node]} = " if node.users else ""
            call = f"{function}({', '.join(given)})"
            is_yielded = yields is not None and yields(node.target)
            lines.append(result + (f"yield {function}, {text(tuple(node.args))}" if is_yielded else call))
            if node in last:
                lines.append(f"del {', '.join(names[n] for n in last[node])}")
    body = "\n    ".join(lines)
    source = f"def program({', '.join(arguments)}):\n    {body}\n"
    # a name of a file that is skipped where a line of the user is shown
    exec(compile(source, "<shardwise program>", "exec"), constants)
    return constants["program"]  # type: ignore[no-any-return]


def _binding(target: Any) -> Callable[..., Any]:
    if target is FILL:
        return fill_block
    return python_binding(target) if hasattr(target, "_schema") else target


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node, the values that no later node uses."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for value in node.all_input_nodes:
            if value not in seen:
                seen.add(value)
                if node.op != "output" and value.op != "placeholder":
                    found.setdefault(node, []).append(value)
    return found
