"""Running compiled functions eagerly, where their tensors cannot be traced."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from shardwise.torch_internals.module_fixer import after_import

__all__ = ["compiled_functions_run_eagerly"]

_EVAL_FRAME = "torch._dynamo.eval_frame"
_reasons: list[str] = []
_before: list[Any] = []


@contextmanager
def compiled_functions_run_eagerly(reason: str) -> Iterator[None]:
    """Inside the block, functions of `torch.compile` run as they are; the first of them warns, for the reason given."""
    _reasons.append(reason)
    if _EVAL_FRAME in sys.modules:
        _force_eager(sys.modules[_EVAL_FRAME])
    try:
        yield
    finally:
        _reasons.clear()
        if _before:
            sys.modules[_EVAL_FRAME]._stance = _before.pop()  # type: ignore[attr-defined]


def _force_eager(eval_frame: Any) -> None:
    if not _before:
        _before.append(eval_frame._stance)
        eval_frame._stance = eval_frame.DynamoStance("force_eager")


def _fix(eval_frame: ModuleType) -> None:
    original = eval_frame._callback_from_stance

    def callback_from_stance(callback: Any) -> Any:
        if _reasons and callback not in (None, False):
            message, _reasons[-1] = _reasons[-1], ""
            if message:
                warnings.warn(message, stacklevel=3)
        return original(callback)

    eval_frame._callback_from_stance = callback_from_stance  # type: ignore[attr-defined]
    if _reasons:
        _force_eager(eval_frame)


after_import(_EVAL_FRAME, _fix)
