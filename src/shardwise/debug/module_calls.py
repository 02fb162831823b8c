"""Which modules the program is inside of, in forward and backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwise.comm import PerRank
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import current_backward, in_backward
from shardwise.torch_internals.pytree import flatten

__all__ = ["GLOBAL", "ModuleCalls", "ModuleInfo"]

GLOBAL = "Global"
"""The name of the whole program."""


@dataclass
class ModuleInfo:
    """A module that was called: its type, its own parameters and the placements of those that are DTensors."""

    module_type: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    placements: dict[str, Any] = field(default_factory=dict)


class ModuleCalls:
    """Follow the calls of modules inside `with calls.following():`.

    A module is named after the class of the module that was called outermost and the path from there: `MLP.net1`.
    """

    def __init__(self) -> None:
        self.module_helper_dict: dict[str, ModuleInfo] = {GLOBAL: ModuleInfo()}
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._forward: list[str] = []
        self._backward: set[str] = set()
        self._pass = -1
        self._handles: list[Any] = []

    @property
    def current(self) -> tuple[str, set[str]]:
        """The direction, "forward" or "backward", and the names of the modules that the program is inside of."""
        if (
            in_backward() and not self._forward
        ):  # a forward pass inside a backward pass recomputes activations
            return "backward", {GLOBAL} | (self._backward if current_backward() == self._pass else set())
        return "forward", {GLOBAL, *self._forward}

    @property
    def innermost(self) -> str:
        """The module that the program is inside of, the innermost one."""
        direction, names = self.current
        if direction == "forward":
            return self._forward[-1] if self._forward else GLOBAL
        return max(names - {GLOBAL}, key=len, default=GLOBAL)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the calls inside the block; no hook is left on a module."""
        self._handles = [register_module_forward_pre_hook(self._enter)]
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _name(self, module: nn.Module) -> str:
        if module not in self._names:
            self._names[module] = type(module).__name__
        name = self._names[module]
        for child_name, child in module.named_children():
            if child not in self._names:
                # all of its parts: a container such as ModuleList is never called itself
                for path, part in child.named_modules(prefix=f"{name}.{child_name}"):
                    self._names.setdefault(part, path)
        return name

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        name = self._name(module)
        self._forward.append(name)
        if name not in self.module_helper_dict:
            own = dict(module.named_parameters(recurse=False))
            placements = {n: p.placements for n, p in own.items() if isinstance(p, DTensor)}
            kind = type(module)
            self.module_helper_dict[name] = ModuleInfo(
                f"{kind.__module__}.{kind.__qualname__}", own, placements
            )
        self._on_gradients(args, "all", lambda: self._backward.discard(name))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            handle.remove()
            self._leave(name, output)

        # a hook of this call on the module itself runs after the module's other hooks, which may communicate; global
        # hooks run before them
        handle = module.register_forward_hook(leave, always_call=True)
        self._handles.append(handle)

    def _leave(self, name: str, output: Any) -> None:
        if name not in self._forward:
            return
        while self._forward.pop() != name:  # modules that raised
            pass

        def begin() -> None:
            if current_backward() != self._pass:
                self._pass = current_backward()
                self._backward.clear()
            self._backward.add(name)

        self._on_gradients(output, "any", begin)

    def _on_gradients(self, values: Any, mode: Any, then: Any) -> None:
        """Call a function once any or all of the tensors among some values have their gradient."""
        if not torch.is_grad_enabled():
            return
        found = flatten((values,))[0]
        # the blocks of simulated ranks have a node of the graph for each rank, so the hook would wait for none of them
        tensors = [
            x for x in found if isinstance(x, Tensor) and not isinstance(x, PerRank) and x.requires_grad
        ]
        if tensors:
            self._handles.append(register_multi_grad_hook(tensors, lambda *_: then(), mode=mode))
