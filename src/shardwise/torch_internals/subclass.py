"""Tensor subclasses: their constructors, and marks that torch keeps on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = [
    "bump_versions",
    "can_become_view",
    "change_places",
    "counts_writes",
    "disabled_torch_function",
    "has_views",
    "increment_versions",
    "inference_error",
    "is_parameter",
    "is_used_elsewhere",
    "make_wrapper",
    "mark_parameter",
    "new_dtensor",
    "refuses_writes",
    "storage_id",
    "version",
    "view_base",
    "view_offset",
    "without_torch_functions",
]

_T = TypeVar("_T", bound=torch.Tensor)

without_torch_functions: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of tensor subclasses is not called."""
increment_versions: Any = torch._C._increment_version
"""`bump_versions` without its check: tensors of inference mode are passed over."""
_is_inference: Any = torch.Tensor.is_inference
_unknown_versions = count(1 << 40, 1 << 40)  # steps that sums with numbers of writes cannot make up for


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

    A tensor of inference mode does not count writes. It might have been written to since, so it has another number each time.

    >>> x = torch.ones(1)
    >>> before = version(x)
    >>> version(x.add_(1)) - before
    1
    """
    try:
        return x._version
    except RuntimeError:
        return next(_unknown_versions)


def counts_writes(x: Tensor) -> bool:
    """Whether a tensor has a version: one of inference mode has none, also where its `data` was set to that of another.

    >>> counts_writes(torch.ones(1))
    True
    """
    try:
        return x._version >= 0
    except RuntimeError:
        return False


def view_base(x: Tensor) -> Tensor | None:
    """The tensor that autograd knows a tensor to be a view of; None if there is none.

    >>> x = torch.ones(2)
    >>> view_base(x[1:]) is x, view_base(x)
    (True, None)
    """
    return x._base if x._is_view() else None


def view_offset(x: Tensor) -> int | None:
    """Where in the memory of the tensor that it is a view of a plain tensor in the place of `x` would begin.

    None if that tensor no longer has the shape that it had, so that autograd cannot compute the view from it.

    >>> view_offset(torch.ones(2, 3)[1, 1:])
    4
    """
    base: Any = view_base(x)
    if base is None:
        return 0
    plain = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    # parts of a conjugated tensor are recorded as those of one that is conjugated twice
    for start in (plain, plain.conj()) if plain.is_complex() else (plain,):
        try:
            found = x._view_func_unsafe(start)
        except (IndexError, RuntimeError):  # of an op that refuses the tensor
            continue
        if found.shape == x.shape:
            return found.storage_offset()  # type: ignore[no-any-return]
    return None


def bump_versions(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that tensors are written to: one that was saved for a backward pass can no longer be used there.

    Raises for a tensor of inference mode outside of it, as torch does.

    >>> x = torch.ones(1)
    >>> before = version(x)
    >>> bump_versions([x])
    >>> version(x) - before
    1
    """
    if refuses_writes(tensors):
        raise inference_error()
    increment_versions(tensors)  # ignores tensors of inference mode


def inference_error() -> RuntimeError:
    """The error of a write to a tensor of inference mode outside of it."""
    return RuntimeError(
        "Inplace update to inference tensor outside InferenceMode is not allowed.\n"
        "  why: The tensor was created in torch.inference_mode(), so autograd cannot see writes to it.\n"
        "  fix: write to x.clone(), or inside torch.inference_mode()."
    )


def refuses_writes(tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors was created in inference mode, and this is outside of it.

    >>> refuses_writes([torch.ones(1)])
    False
    """
    return True in map(_is_inference, tensors) and not torch.is_inference_mode_enabled()


def can_become_view(x: Tensor) -> bool:
    """Whether an in-place op that changes the shape of a tensor can be done as a view of it, and torch would allow the op.

    A tensor that requires a gradient must get it by an op that autograd records; a parameter must stay one.

    >>> x = torch.ones(2, requires_grad=True)
    >>> can_become_view(x), can_become_view(x * 1), can_become_view(x[1:]), can_become_view((x * 1).unbind(0)[0])
    (False, True, False, False)
    """
    if x.is_inference():
        return False
    if x.requires_grad:
        if x.is_leaf or x.retains_grad or not (torch.is_grad_enabled() or x._is_view()):
            return False
    elif x.grad is not None:
        return False
    if not x._is_view():
        return True
    base: Any = x._base
    is_default = torch._C._autograd._get_creation_meta(x) == torch._C._autograd.CreationMeta.DEFAULT
    return is_default and not (base.requires_grad and base.is_leaf and torch.is_grad_enabled())


def is_used_elsewhere(x: Tensor) -> bool:
    """Whether autograd graphs or views refer to a tensor that requires a gradient, beside what accumulates its gradient.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = x + 1
    >>> with torch.no_grad():
    ...     is_used_elsewhere(x)
    False
    >>> v = x[1:]
    >>> with torch.no_grad():
    ...     is_used_elsewhere(x)
    True
    """
    if not x.requires_grad or (torch.is_grad_enabled() and x.is_leaf):
        return False  # the latter is for torch to refuse
    tensor: Any = x
    if not x.is_leaf:
        return x.retains_grad and bool(tensor._use_count() > 1)
    if (
        x._is_view()
        and torch._C._autograd._get_creation_meta(x) == torch._C._autograd.CreationMeta.NO_GRAD_MODE
    ):
        return bool(tensor._use_count() > 1)  # it requires what its base requires, and has no node
    with torch.inference_mode(False):  # in which no edge is recorded
        node = torch.autograd.graph.get_gradient_edge(x).node  # refers to the tensor as well
    return node is not None and bool(tensor._use_count() > 2)


def has_views(x: Tensor) -> bool:
    """Whether views refer to a tensor that does not require a gradient.

    >>> x = torch.ones(2)
    >>> has_views(x)
    False
    >>> v = x[1:]
    >>> has_views(x)
    True
    """
    tensor: Any = x
    return bool(tensor._use_count() > 1)


def change_places(x: Tensor, y: Tensor, is_write: bool = True) -> None:
    """Exchange what two tensor objects are, except for their class and attributes. `x` becomes a newer version of itself.

    What C++ refers to stays: autograd and views of the tensor that `x` was know that tensor, which now is `y`.

    Args:
        is_write: whether the change counts as a write to `x`.

    >>> x = torch.ones(2, 3)
    >>> v = x[1]
    >>> y = x.t()
    >>> change_places(x, y)
    >>> x.shape, y.shape, v._base is y
    (torch.Size([3, 2]), torch.Size([2, 3]), True)
    """
    torch._C._swap_tensor_impl(x, y)
    x._backward_hooks = None  # they are hooks of the gradient of what `x` was, whose node has them
    if is_write:
        increment_versions([x])


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
