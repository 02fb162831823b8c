"""The mode that a view is created in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from shardwise.tensor.dtensor import DTensor

__all__ = ["mode_of_view"]

aten = torch.ops.aten


def mode_of_view(func: Any, base: Any) -> AbstractContextManager[Any] | None:
    """The mode to create a view in, if it is not the current one: a view is an inference tensor exactly if its base is.

    Except that a view in another dtype is one if it is created in inference mode.
    """
    if not isinstance(base, DTensor) or func is aten.view.dtype:
        return None
    is_inference = torch.Tensor.is_inference(base)  # not what `x.data` says of itself
    if is_inference == torch.is_inference_mode_enabled():
        return None
    return torch.inference_mode() if is_inference else _outside_inference()


@contextmanager
def _outside_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
