"""Gradients that compiled code receives: torch refuses a plain tensor where it expects a tensor of a subclass."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from shardwise.torch_internals.module_fixer import after_import

__all__ = ["accept_plain_tangents"]

_WRAPPERS = "torch._functorch._aot_autograd.runtime_wrappers"


def accept_plain_tangents(cls: type[Tensor], convert: Callable[[Tensor, Any], Tensor]) -> None:
    """Have compiled code take plain gradients of its outputs that are tensors of a class.

    Autograd itself passes plain zeros for an output that gets no gradient.

    Args:
        cls: the class.
        convert: from a plain tensor and the context of `__tensor_flatten__`, to a tensor of the class.
    """

    def fix(module: ModuleType) -> None:
        holder: Any = module.AOTDispatchAutograd
        original = holder.process_runtime_tangent

        def process(x: Any, meta: Any, *args: Any, **kwargs: Any) -> Any:
            expected = getattr(meta, "original_subclass_type", None)
            if (
                isinstance(x, Tensor)
                and not hasattr(type(x), "__tensor_unflatten__")
                and isinstance(expected, type)
                and issubclass(expected, cls)
            ):
                x = convert(x, meta.meta)
            return original(x, meta, *args, **kwargs)

        holder.process_runtime_tangent = staticmethod(process)

    after_import(_WRAPPERS, fix)
