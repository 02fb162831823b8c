"""Symbolic sizes that become numbers too late, while the backward pass of a program is traced.

AOTAutograd first runs the forward pass to see what is a tensor of a subclass and which of its sizes are symbols; these become
inputs and outputs of the graph. If the code of the backward pass then needs the number, as an exchange along a dim of that size
does, what was seen no longer holds. So the program is traced again, with numbers for those sizes from the start.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch._guards import CompileContext

from shardwise.torch_internals.module_fixer import after_import

__all__ = ["becomes_number", "restart_for_late_numbers"]

_wanted: dict[Any, frozenset[str]] = {}  # of one compilation: the names of symbols that are to be numbers


def becomes_number(expression: Any) -> bool:
    """Whether an expression has a symbol that the backward pass of the program needs as a number."""
    if not _wanted:
        return False
    names = _wanted.get(CompileContext.current_compile_id(), frozenset())
    return any(symbol.name in names for symbol in expression.free_symbols)


def restart_for_late_numbers() -> None:
    """Have AOTAutograd trace a program again if a size became a number while its backward pass was traced."""
    after_import("torch._functorch._aot_autograd.graph_compile", _fix)


def _fix(module: ModuleType) -> None:
    original = module.aot_dispatch_autograd_graph

    def trace(*args: Any, fw_metadata: Any, **kwargs: Any) -> Any:
        out = original(*args, fw_metadata=fw_metadata, **kwargs)
        current = CompileContext.current_compile_id()
        late = _late_symbols(fw_metadata)
        if current is not None and late - _wanted.get(current, frozenset()):
            known = _wanted.get(current, frozenset())
            _wanted.clear()
            _wanted[current] = known | late
            raise torch._dynamo.exc.TensorifyScalarRestartAnalysis  # the one that passes through backends
        return out

    module.aot_dispatch_autograd_graph = trace  # type: ignore[attr-defined]


def _late_symbols(metadata: Any) -> frozenset[str]:
    """The names of the symbols in sizes of subclasses that have become numbers."""
    found: set[str] = set()
    for meta in (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta):
        for n in (*getattr(meta, "outer_size", ()), *getattr(meta, "outer_stride", ())):
            if isinstance(n, torch.SymInt) and n.node.maybe_as_int() is not None:
                found |= {symbol.name for symbol in n.node._expr.free_symbols}
    return frozenset(found)
