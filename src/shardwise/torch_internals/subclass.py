"""Tensor subclasses: their constructors, and marks that torch keeps on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

__all__ = [
    "bump_versions",
    "disabled_torch_function",
    "is_parameter",
    "make_wrapper",
    "mark_parameter",
    "new_dtensor",
    "storage_id",
    "version",
    "view_base",
]

_T = TypeVar("_T", bound=torch.Tensor)


def _new_dtensor(cls: Any, local_tensor: Tensor, spec: Any, requires_grad: bool) -> Any:
    meta = spec.tensor_meta
    out: Any = torch.Tensor._make_wrapper_subclass(
        cls,
        meta.shape,
        strides=meta.stride,
        dtype=meta.dtype,
        device=local_tensor.device,
        requires_grad=requires_grad,
    )
    out._local_tensor, out._spec = local_tensor, spec
    return out


# torch's C++ constructor for wrappers of this very form: it reads `spec.tensor_meta`, sets `_local_tensor` and `_spec`, and
# takes half the time of `_make_wrapper_subclass`.
new_dtensor: Any = getattr(torch.Tensor, "_dtensor__new__", _new_dtensor)
"""`new_dtensor(cls, local_tensor, spec, requires_grad)`: a wrapper with the metadata of a spec around a local tensor."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a class whose functions are torch's own; only ops beneath autograd are dispatched."""


def is_parameter(x: Tensor) -> bool:
    """Whether a tensor of another class than `nn.Parameter` is one.

    >>> is_parameter(torch.ones(1))
    False
    """
    return bool(getattr(x, "_is_param", False))


def mark_parameter(x: Tensor) -> None:
    """Make a tensor subclass an `nn.Parameter`, to `isinstance` and to modules.

    >>> x = torch.ones(1)
    >>> mark_parameter(x)
    >>> is_parameter(x)
    True
    """
    x._is_param = True


def version(x: Tensor) -> int:
    """How often a tensor, or a tensor that shares its memory, was written to in place.

    >>> x = torch.ones(1)
    >>> before = version(x)
    >>> version(x.add_(1)) - before
    1
    """
    return x._version


def view_base(x: Tensor) -> Tensor | None:
    """The tensor that autograd knows a tensor to be a view of; None if there is none.

    >>> x = torch.ones(2)
    >>> view_base(x[1:]) is x, view_base(x)
    (True, None)
    """
    return x._base if x._is_view() else None


def bump_versions(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that tensors are written to: one that was saved for a backward pass can no longer be used there.

    Raises for a tensor of inference mode outside of it, as torch does.

    >>> x = torch.ones(1)
    >>> before = version(x)
    >>> bump_versions([x])
    >>> version(x) - before
    1
    """
    normal = [t for t in tensors if not t.is_inference()]
    if len(normal) < len(tensors) and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed.\n"
            "  why: The tensor was created in torch.inference_mode(), so autograd cannot see writes to it.\n"
            "  fix: write to x.clone(), or inside torch.inference_mode()."
        )
    increment_version(normal)


def storage_id(x: Tensor) -> int:
    """A number that tensors have in common if they share memory, as long as one of them exists.

    >>> x = torch.ones(2)
    >>> storage_id(x) == storage_id(x[1:]), storage_id(x) == storage_id(x.clone())
    (True, False)
    """
    return x.untyped_storage()._cdata  # type: ignore[no-any-return]


def make_wrapper(
    cls: type[_T],
    size: Sequence[int],
    strides: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device,
    layout: torch.layout = torch.strided,
    dispatch_layout: bool = False,
    requires_grad: bool = False,
) -> _T:
    """A tensor of class `cls` with this metadata and no storage, whose ops go to the class's `__torch_dispatch__`.

    Args:
        strides: None for sparse layouts, which have none.
        dispatch_layout: let ops that ask for the layout go to `__torch_dispatch__`, as sparse kinds need it.

    >>> class Example(torch.Tensor):
    ...     __torch_dispatch__ = classmethod(lambda cls, func, types, args, kwargs: None)
    >>> make_wrapper(Example, (2, 3), (3, 1), torch.int32, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    return torch.Tensor._make_wrapper_subclass(
        cls,
        size,
        strides=strides,
        dtype=dtype,
        device=device,
        layout=layout,
        dispatch_layout=dispatch_layout,
        requires_grad=requires_grad,
    )
