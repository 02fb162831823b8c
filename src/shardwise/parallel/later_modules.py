"""Modules that are put into a parallelized module afterwards, such as adapters."""

from __future__ import annotations

from functools import cache

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from shardwise.parallel.boundary import Boundary
from shardwise.parallel.forward import wrap_method

__all__ = ["watch_for_modules"]

_AROUND = "_shardwise_boundary_around"

_COMBINING = ("merge", "unmerge")
"""Methods, by peft's names, that add plain parameters of adapters to distributed ones outside of a forward pass."""


def watch_for_modules(module: nn.Module, boundary: Boundary) -> None:
    """Prepare the modules in a module, and those that will be put into it later.

    The `forward` of later modules needs nothing: it runs inside the one of the parallelized module. Methods that combine their
    parameters with those of the parallelized module get its scope as well, where plain tensors count as replicated.

    Args:
        module: the parallelized module.
        boundary: of its parameters; kept instead of the mesh, which cannot be copied with the module.
    """
    _install_hook()
    _prepare(module, boundary)


@cache
def _install_hook() -> None:
    register_module_module_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
    boundary = vars(parent).get(_AROUND)
    if boundary is not None and child is not None:
        _prepare(child, boundary)


def _prepare(module: nn.Module, boundary: Boundary) -> None:
    for child in module.modules():
        if _AROUND in vars(child):
            continue
        vars(child)[_AROUND] = boundary
        for name in _COMBINING:
            if callable(getattr(type(child), name, None)):
                wrap_method(child, name, mesh=boundary.mesh)
