"""DTensors that a function uses without being an argument of `make_fx`, as `torch.func.linearize` calls it."""

from __future__ import annotations

from typing import Any

from shardwise.call.arguments import tensors_in
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.patches import PythonPatch, python_functions
from shardwise.torch_internals.tracing import TRACED_CALL, is_recorded_block, is_tracing, record_constants

__all__ = ["tracing_patches"]


def _traced_call(original: Any, mode: Any, func: Any, pre_dispatch: Any, args: Any, kwargs: Any) -> Any:
    if not is_tracing():  # a compiler records the ops on blocks, and has fake ones
        captured = [
            t
            for t in tensors_in([*args, *(kwargs or {}).values()])
            if isinstance(t, DTensor) and not is_recorded_block(mode, t._local_tensor)
        ]
        record_constants(mode, captured)
    return original(mode, func, pre_dispatch, args, kwargs)


def tracing_patches() -> list[PythonPatch]:
    """The patches of what records graphs."""
    reason = "make_fx records the ops on the blocks of a DTensor that is not an argument, and takes their result for a constant"
    return [PythonPatch(target, _traced_call, reason) for target in python_functions([TRACED_CALL])]
