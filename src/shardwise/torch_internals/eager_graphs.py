"""Graphs of `torch.compile` that run op by op, as backend "eager" runs them: what a compiler would have taken care of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from shardwise.torch_internals.graph_calls import changes_state, save_states
from shardwise.torch_internals.module_fixer import after_import
from shardwise.torch_internals.tracing import is_recording, is_tracing

__all__ = ["support_eager_graphs"]


def support_eager_graphs() -> None:
    """Have such graphs restore random state in checkpoints, and the state of this library after an error."""
    after_import("torch._higher_order_ops.wrap", _preserve_random_state)
    after_import("torch._dynamo.output_graph", _restore_state)


def _preserve_random_state(wrap: Any) -> None:
    """Let a checkpoint draw the same numbers again: torch leaves that to compilers, which replace random ops."""
    original = wrap.tag_activation_checkpoint_impl

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        if is_tracing() or is_recording():
            return original(module, *args, **kwargs)
        options = {k: v for k, v in kwargs.items() if k != "use_reentrant"}
        if "_checkpoint_context_fn" in module.meta:
            options["context_fn"] = module.meta["_checkpoint_context_fn"]
        return checkpoint(module, *args, use_reentrant=False, **options)

    wrap.tag_activation_checkpoint_impl = run


def _restore_state(output_graph: Any) -> None:
    """Have a graph that changes state leave it as it was where an op fails: the calls that would reset it are not reached."""
    holder = output_graph.OutputGraph
    original = holder.call_user_compiler

    def compile_graph(self: Any, module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        compiled = original(self, module, *args, **kwargs)
        return _restoring(compiled) if any(map(changes_state, module.graph.nodes)) else compiled

    holder.call_user_compiler = compile_graph


def _restoring(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        restore = save_states()
        try:
            return compiled(*args, **kwargs)
        except BaseException:
            restore()
            raise

    return run
