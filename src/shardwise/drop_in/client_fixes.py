"""What no tensor can make up for: objects of clients and of torch that are replaced when they are imported under `install()`.

A row names a module, an object in it and what replaces the object; the reason is the docstring of the replacement. A name
that a release of the client does not have is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.tensor.policy import policy
from shardwise.torch_internals.dtensor_class import DYNAMO_BUILDER, without_dtensor
from shardwise.torch_internals.fsdp_division import FSDP_COLLECTIVES, divide_once

__all__ = ["FIXES", "ClientFixer"]


def _with_global_sizes(add_hooks: Callable[..., None]) -> Callable[..., None]:
    """Give the adapter of a rowwise layer the global `in_features`; peft leaves it at the size of the block.

    transformers takes `in_features` for the global width of the input, so training fails, on torch's DTensor as well.
    """

    @wraps(add_hooks)
    def add_hooks_and_sizes(tp_module: Any, *args: Any, **kwargs: Any) -> None:
        add_hooks(tp_module, *args, **kwargs)
        tp_module.out_features, tp_module.in_features = tp_module.weight.shape

    return add_hooks_and_sizes


def _with_equal_plain_tensors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let plain tensors be replicated: peft multiplies one factor of an adapter, a DTensor, with the other, a plain one.

    It is compared between ranks, and an error on all of them if it differs.
    """

    @wraps(method)
    def merged(*args: Any, **kwargs: Any) -> Any:
        with policy(plain="check"):
            return method(*args, **kwargs)

    return merged


def _reduce_new_gradients(install_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Sum the gradient of each backward pass over the mesh; transformers sums the accumulated one, earlier passes again."""

    @wraps(install_forward)
    def install(style: object, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        forward = module.forward
        hooked: dict[
            str, nn.Parameter
        ] = {}  # loading replaces parameters, so they are found in the forward pass

        def reduce(grad: Tensor) -> Tensor:
            total = grad.clone()
            dist.all_reduce(total, group=mesh.get_group())
            return total

        def forward_with_hooks(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                for name, p in module.named_parameters(recurse=False):
                    if p.requires_grad and hooked.get(name) is not p:
                        p.register_hook(reduce)  # runs before the gradient is added to that of earlier passes
                        hooked[name] = p
            return forward(*args, **kwargs)

        module.forward = forward_with_hooks
        return module

    return install


FIXES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "peft.tuners.lora.model": {"add_lora_tp_hooks_dtensor": _with_global_sizes},
    "peft.tuners.lora.layer": {
        f"{layer}.{method}": _with_equal_plain_tensors
        for layer in ("Linear", "Embedding")
        for method in ("merge", "unmerge", "get_delta_weight")
    },
    "transformers.distributed.tensor_parallel": {
        "ReplicatedWithGradAllReduce.install_forward": _reduce_new_gradients
    },
    DYNAMO_BUILDER: {"torch": without_dtensor},
    FSDP_COLLECTIVES: {"_get_gradient_divide_factors": divide_once},
}
"""By module, the objects that are replaced and the functions that make their replacements."""


def _apply(module: ModuleType) -> None:
    """Replace what the table names."""
    for path, fix in FIXES[module.__name__].items():
        *owners, name = path.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        if owner is not None and hasattr(owner, name):
            setattr(owner, name, fix(getattr(owner, name)))


class ClientFixer(MetaPathFinder):
    """Finds the modules of the table as they would be found without it, and puts them right after they are loaded."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table; None for all others."""
        if fullname not in FIXES or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _FixingLoader(spec.loader)
        return spec


class _FixingLoader(Loader):
    """Loads a module with the loader that it has, then applies the table."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _apply(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
