"""Copies of modules whose `forward` a client has replaced by a function that names the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

__all__ = ["forward_of_copies"]

Install = Callable[..., Any]


def forward_of_copies(install_forward: Install) -> Install:
    """Let the copy of a placed module compute with its own parameters; in transformers it calls the original.

    Copies are the reference models and averaged models of programs, and what peft trains of `modules_to_save`. Torch's
    DTensor cannot be copied there.
    """

    @wraps(install_forward)
    def install(style: object, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def again(owner: nn.Module) -> None:
            install_forward(style, owner, *args, **kwargs)

        inner = module.forward
        out = install_forward(style, module, *args, **kwargs)
        module.forward = _InstalledForward(again, module, inner, module.forward)
        return out

    return install


class _InstalledForward:
    """A function that was installed as the `forward` of a module; a copy installs another one, at its first call."""

    def __init__(
        self, install: Install, module: nn.Module, inner: Callable[..., Any], outer: Callable[..., Any] | None
    ) -> None:
        self._install = install
        self._module = module
        self._inner = inner
        self._outer = outer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._outer or self._install_again())(*args, **kwargs)

    def _install_again(self) -> Callable[..., Any]:
        module, current = self._module, self._module.forward
        module.forward = self._inner
        try:
            self._install(module)
            outer: Callable[..., Any] = module.forward
        finally:
            module.forward = current  # others may have wrapped this one
        self._outer = outer
        return outer

    def __deepcopy__(self, memo: dict[int, Any]) -> _InstalledForward:
        module, inner = copy.deepcopy((self._module, self._inner), memo)
        return _InstalledForward(self._install, module, inner, None)
