"""Patches of torch: functions replaced in its modules, and kernels registered for our tensors. `install` applies them all.

A patch changes nothing for plain tensors. Each says why it is needed, and installing one twice does nothing.
"""

from __future__ import annotations

import functools
import importlib
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.jit import _builtins

from shardwise.torch_internals.local_tensor import local_modes, without_local_mode

__all__ = [
    "AnyPatch",
    "KernelPatch",
    "OpPatch",
    "Patch",
    "PythonPatch",
    "TransformPatch",
    "beneath_patches",
    "install",
    "is_batched",
    "is_wrapped_by_transform",
    "outside_transforms",
    "python_functions",
    "unwrap_transforms",
]

_Predicate = Callable[[tuple[Any, ...], dict[str, Any]], bool]

# The first dispatch key of tensors with a `__torch_dispatch__`, above autograd; inside a `TorchDispatchMode` plain tensors
# have it, too.
_SUBCLASS_KEY = "PythonTLSSnapshot"
_subclass_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
_TRANSFORM_KEY = "FuncTorchDynamicLayerFrontMode"  # where a call enters the active torch.func transforms
_library = torch.library.Library("aten", "IMPL")
_installed: set[str] = set()


@dataclass(frozen=True)
class Patch:
    """Something of torch that is replaced for our tensors, and why."""

    target: Any
    run: Callable[..., Any]
    reason: str


@dataclass(frozen=True)
class KernelPatch(Patch):
    """A kernel of an op for our tensors, above autograd, used where `when(args, kwargs)` holds."""

    when: _Predicate

    @property
    def name(self) -> str:
        return _op_name(self.target)


@dataclass(frozen=True)
class TransformPatch(Patch):
    """A kernel of an op inside torch.func transforms; `run` takes the op's arguments and `when` sees them."""

    when: _Predicate

    @property
    def name(self) -> str:
        return f"{_op_name(self.target)} in torch.func transforms"


@dataclass(frozen=True)
class PythonPatch(Patch):
    """A Python function of torch: `target` is `(module, name)`, `run(original, *args, **kwargs)` replaces it."""

    @property
    def name(self) -> str:
        module, name = self.target
        return f"{module.__name__}.{name}"


@dataclass(frozen=True)
class OpPatch(Patch):
    """An op as Python code calls it, `torch.ops.aten.t_` or an overload of it; `run(original, *args, **kwargs)` replaces it.

    C++ code, and Python code beneath autograd, calls torch's own op.
    """

    @property
    def name(self) -> str:
        return f"torch.ops.{self.target}"


AnyPatch = KernelPatch | TransformPatch | PythonPatch | OpPatch


def install(patches: Sequence[AnyPatch]) -> None:
    """Apply patches that are not applied yet."""
    for patch in patches:
        if patch.name in _installed:
            continue
        _installed.add(patch.name)
        match patch:
            case KernelPatch():
                _install_kernel(patch)
            case TransformPatch():
                _install_transform(patch)
            case PythonPatch():
                _install_function(patch)
            case OpPatch():
                _install_op(patch)


def beneath_patches() -> AbstractContextManager[None]:
    """Inside, ops on our tensors run torch's own kernels where a `KernelPatch` replaces them."""
    return torch._C._ExcludeDispatchKeyGuard(_subclass_keys)


def is_batched(x: Any) -> bool:
    """Whether a tensor is one that `vmap` maps over, seen from inside.

    >>> torch.func.vmap(lambda x: x * float(is_batched(x)))(torch.ones(3))
    tensor([1., 1., 1.])
    """
    return isinstance(x, Tensor) and _functorch.is_batchedtensor(x)


def is_wrapped_by_transform(x: Any) -> bool:
    """Whether a tensor is one that a torch.func transform has wrapped.

    >>> torch.func.grad(lambda x: x * float(is_wrapped_by_transform(x)))(torch.tensor(2.0))
    tensor(1.)
    """
    return isinstance(x, Tensor) and _functorch.is_functorch_wrapped_tensor(x)


def unwrap_transforms(x: Any) -> Any:
    """The tensor inside the wrappers of torch.func transforms.

    >>> torch.func.vmap(lambda x: x * float(unwrap_transforms(x).shape[0]))(torch.ones(3))
    tensor([3., 3., 3.])
    """
    while isinstance(x, Tensor) and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, ops are not part of torch.func transforms: what they create is not wrapped.

    >>> def example(x):
    ...     with outside_transforms():
    ...         y = torch.ones(1) * 2
    ...     return x * float(is_wrapped_by_transform(y))
    >>> torch.func.grad(example)(torch.tensor(2.0))
    tensor(0.)
    """
    return _NOTHING if _functorch.maybe_current_level() is None else temporarily_clear_interpreter_stack()


def python_functions(names: Iterable[str]) -> list[tuple[Any, str]]:
    """The module or class, and the attribute, of each function that is given by its dotted name.

    >>> python_functions(["torch.nn.init.sparse_"])[0][1]
    'sparse_'
    """
    found = []
    for name in names:
        owner, _, attribute = name.rpartition(".")
        try:
            found.append((importlib.import_module(owner), attribute))
        except ModuleNotFoundError:  # a method
            module, _, cls = owner.rpartition(".")
            found.append((getattr(importlib.import_module(module), cls), attribute))
    return found


def _op_name(func: Any) -> str:
    return str(func._schema.name.removeprefix("aten::")) + f".{func._overloadname}".removesuffix(".default")


def _install_kernel(patch: KernelPatch) -> None:
    func, run, when = patch.target, patch.run, patch.when

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if when(args, kwargs):
            if local_modes:
                with without_local_mode():
                    return run(*args, **kwargs)
            return run(*args, **kwargs)
        with beneath_patches():
            return func(*args, **kwargs)

    _library.impl(_op_name(func), kernel, _SUBCLASS_KEY)


def _install_transform(patch: TransformPatch) -> None:
    name, run, when = _op_name(patch.target), patch.run, patch.when
    original = torch.library.get_kernel(f"aten::{name}", _TRANSFORM_KEY)

    def kernel(keys: Any, *args: Any) -> Any:
        return run(*args) if when(args, {}) else original.call_boxed(keys, *args)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        _library.impl(name, kernel, _TRANSFORM_KEY, with_keyset=True, allow_override=True)


def _install_function(patch: PythonPatch) -> None:
    module, name = patch.target
    original, run = getattr(module, name), patch.run

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return run(original, *args, **kwargs)

    setattr(module, name, replacement)
    if isinstance(original, types.BuiltinFunctionType) and (op := _builtins._find_builtin(original)):
        _builtins._register_builtin(
            replacement, op
        )  # so that torch.jit.script knows it, as torch.distributed.optim needs


def _install_op(patch: OpPatch) -> None:
    packet = patch.target
    for op in (packet, *(getattr(packet, overload) for overload in packet.overloads())):
        op._op = _Replacement(op._op, patch.run)
        torch.jit._builtins._register_builtin(op._op, packet._qualified_op_name)  # where scripts look it up


class _Replacement:
    """What an op calls instead of its function. Ops are hashed by it, and so tables of ops must find it under the same hash."""

    def __init__(self, original: Callable[..., Any], run: Callable[..., Any]) -> None:
        self.original, self.run = original, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_beneath_autograd():
            return self.original(*args, **kwargs)
        return self.run(self.original, *args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.original)

    __eq__ = object.__eq__


def _is_beneath_autograd() -> bool:
    """Whether the code that runs is the implementation of an op, so that C++ code above it refers to its tensors."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    # the first in code that ignores subclasses, the second in every `__torch_dispatch__`, of tensors and of modes
    return excluded(torch._C.DispatchKey.Python) or excluded(torch._C.DispatchKey.PythonTLSSnapshot)
