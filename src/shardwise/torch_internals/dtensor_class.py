"""The class that torch's C++ takes for its own DTensor: it imports it at the first op on any tensor subclass, and keeps it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

__all__ = [
    "DYNAMO_BUILDER",
    "DYNAMO_RULES",
    "PACKAGE",
    "inline_from_local",
    "occupy_dtensor_class",
    "without_dtensor",
]

PACKAGE = "torch.distributed.tensor"
"""The package of torch that has the class."""
DYNAMO_BUILDER = "torch._dynamo.variables.builder"
"""The module of `torch.compile` that tells torch's DTensor from other subclasses, as `torch.distributed.tensor.DTensor`."""

DYNAMO_RULES = "torch._dynamo.trace_rules"
"""The module of `torch.compile` that lists functions that are not traced into, `DTensor.from_local` among them."""


class _Nobody(torch.Tensor):
    """The class that C++ takes for torch's DTensor; no tensor has it."""


class _Probe(torch.Tensor):
    """A tensor whose only op makes C++ look for the class."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return None


def occupy_dtensor_class() -> None:
    """Let C++ take a class that no tensor has for torch's DTensor, so that torch's package is not imported for it.

    To be called before the package is imported, once per process; C++ keeps the class as long as the process lives.
    """
    stand_in: Any = ModuleType(PACKAGE)
    stand_in.DTensor = _Nobody
    had = vars(torch.distributed).get("tensor")
    sys.modules[PACKAGE] = stand_in
    try:
        torch.neg(torch.Tensor._make_wrapper_subclass(_Probe, (1,)))
    finally:
        del sys.modules[PACKAGE]
        if had is None:
            vars(torch.distributed).pop("tensor", None)


class _Instead(ModuleType):
    """A module in which some names are others."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def without_dtensor(torch_module: ModuleType) -> ModuleType:
    """The module `torch`, but `distributed.tensor.DTensor` is a class that no tensor has.

    For `DYNAMO_BUILDER`: it expects of torch's DTensor that flattening gives a mesh and certain metadata. Any other subclass is
    traced by what it says of itself, as ours is without `install()`.
    """
    tensor = ModuleType(PACKAGE)
    tensor.DTensor = _Nobody  # type: ignore[attr-defined]
    return _Instead(torch_module, distributed=_Instead(torch_module.distributed, tensor=tensor))


def inline_from_local(rules: dict[str, Any]) -> dict[str, Any]:
    """The functions that `torch.compile` does not trace into, without `DTensor.from_local`: ours is traced, as without `install()`."""
    rules.pop(f"{PACKAGE}._api.DTensor#from_local", None)  # in place: another list has the table
    return rules
