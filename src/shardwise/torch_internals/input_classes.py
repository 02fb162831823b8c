"""Inputs of compiled programs whose class is derived from that of the tensors without values which the program was traced with."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from shardwise.torch_internals.module_fixer import after_import

__all__ = ["accept_derived_inputs"]

_EXACT = re.compile(r"assert type\((\w+)\) is (\w+), ")


def accept_derived_inputs(cls: type) -> None:
    """Have compiled code for tensors of a class take those of derived classes.

    An input that autograd has computed is a result of an op while the program is traced, and the class of a result is the usual
    one. Guards compare the classes of inputs at each call.
    """

    def fix(module: ModuleType) -> None:
        holder: Any = module
        original = holder._emit_input_unwrapping

        def emit_unwrapping(state: Any, *args: Any, **kwargs: Any) -> None:
            emit = state.emit

            def emit_relaxed(line: str, *rest: Any, **named: Any) -> None:
                found = _EXACT.match(line)
                if found and state.globals.get(found[2]) is cls:
                    line = line.replace(found[0], f"assert isinstance({found[1]}, {found[2]}), ", 1)
                emit(line, *rest, **named)

            state.emit = emit_relaxed
            try:
                original(state, *args, **kwargs)
            finally:
                del state.emit

        holder._emit_input_unwrapping = emit_unwrapping

    after_import("torch._functorch._aot_autograd.subclass_codegen", fix)
