"""Methods that change a tensor's own shape: `t_`, `squeeze_`, `resize_` and the like.

Views remember the tensor that they are views of, and autograd computes them again from it: of a DTensor by the op that created
the view, since a DTensor has no memory of which they could be strided parts. So the tensor that the views know must stay
what it was. `x.t_()` is `x.t()`, with which the object `x` changes places: the views keep the tensor that was called `x`.

C++ code that calls these ops has no object whose tensor could change: there, the tensor itself changes
(`ops/inplace_view.py`). Such code creates the tensor that it changes, and no views of it. Python code that calls `torch.ops.aten.t_(x)`
or `torch.Tensor.t_(x)` calls the method here (`ops/patches.py`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise.layout import contiguous_stride, is_dense
from shardwise.tensor.view_places import memory_offset, memory_root
from shardwise.torch_internals.autograd import current_backward
from shardwise.torch_internals.lazy_bits import negated_view
from shardwise.torch_internals.subclass import (
    bump_versions,
    can_become_view,
    has_views,
    is_used_elsewhere,
    view_base,
)
from shardwise.torch_internals.tracing import is_recording, is_tracing

__all__ = ["CHANGE_SHAPES", "STRIDED", "ShapeMethods", "may_leave_views"]


_USED = """{name} was called on the DTensor {spec}, of which there are views or uses in an autograd graph.
  why: Their gradients are computed from the tensor as it was. It cannot change, because it is a leaf that requires grad, or \
retain_grad() was called on it.
  fix: y = x.{out_of_place}(...), or call x.{name}(...) before the tensor is used."""

_LATE_GRADIENT = """A view of a DTensor got a gradient, and the tensor no longer is what it is a view of.
  why: The view was created, then x.{name}(...) was called, then x.requires_grad_().
  fix: create the view after x.requires_grad_()."""


_OUTSIDE = """as_strided({size}, {stride}) of the DTensor {spec} reaches memory outside of it.
  why: It is a view that requires grad, and its base does not, so the gradient of that memory belongs to no tensor.
  fix: x.detach().as_strided(...), or requires_grad_() of the base before the view is created."""


def _becoming(name: str, out_of_place: Callable[..., Any]) -> Any:
    """The method `name`, after which the tensor is the result of an out-of-place method."""
    original = getattr(torch.Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _can_change_places(self):
            return original(self, *args, **kwargs)
        if not can_become_view(self):
            if is_used_elsewhere(self):
                raise RuntimeError(_USED.format(name=name, out_of_place=name[:-1], spec=self._spec))
            return original(self, *args, **kwargs)
        former = _former_self(self)
        if self.requires_grad and torch.is_grad_enabled():
            new = out_of_place(self, *args, **kwargs)
        else:  # a view still gets the gradient of its base, and the base of views may get one later, whatever mode this is
            with torch.inference_mode(False), torch.enable_grad():
                new = out_of_place(self, *args, **kwargs)
        if new is self:
            return self
        if not getattr(new, "_can_change_places", False):  # no view, or one of a torch.func transform
            return original(self, *args, **kwargs)
        call = (out_of_place, args, kwargs)
        if view_base(self) is None:
            new.__dict__[_SUCCESSOR] = (id(self), name, (call,))
        elif former is not None:
            successor, name_before, calls = former.__dict__[_SUCCESSOR]
            former.__dict__[_SUCCESSOR] = (successor, name_before, (*calls, call))
        is_write = True  # torch counts it as one
        is_base = former is not None or view_base(self) is None
        if self.requires_grad and is_base and torch.is_grad_enabled():
            _NewNode.apply(self if former is None else former)  # type: ignore[no-untyped-call]
            is_write = False  # it is counted already
        return self._become(new, is_write=is_write)

    method.__name__ = name
    return method


def _can_change_places(x: Any) -> bool:
    """Whether an object can become another tensor; a graph that is recorded would still refer to what it was."""
    return not torch.compiler.is_compiling() and x._can_change_places and not is_recording()


def may_leave_views(x: Any) -> bool:
    """Whether an object can become a tensor with other memory, while its views keep what it was."""
    return view_base(x) is None and not x.requires_grad and not x.is_inference() and _can_change_places(x)


def _set(self: Any, *source: Any, **kwargs: Any) -> Any:
    """Take the memory of another tensor."""
    if len(source) != 1 or kwargs or not hasattr(source[0], "_spec") or not may_leave_views(self):
        return torch.Tensor.set_(self, *source, **kwargs)
    if not has_views(self) or torch.is_inference_mode_enabled():
        return torch.Tensor.set_(self, *source)
    bump_versions([self])
    self.data = source[0]
    return self


class _NewNode(torch.autograd.Function):
    """A new node for a tensor, in place: hooks of its gradient see what uses it from now on, as after any write."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


_SUCCESSOR, _FORMER = "_shardwise_successor", "_shardwise_former"


def _former_self(x: Any) -> Any:
    """The tensor that a tensor was before its shape changed, if it was no view."""
    base = x.__dict__.get(_FORMER, view_base(x))
    is_former = base is not None and base.__dict__.get(_SUCCESSOR, (None,))[0] == id(x)
    return base if is_former else None


def _detach(self: Any) -> Any:
    """Detach the tensor from its graph."""
    if torch.is_inference_mode_enabled() and not self.is_inference():
        return self  # in inference mode torch runs the kernel alone, which does nothing
    former = _former_self(self)
    keeps = self.is_leaf or self.retains_grad or not _can_change_places(self)
    if former is None and (keeps or view_base(self) is not None):
        return torch.Tensor.detach_(self)
    new = self.detach()
    self._become(new, is_write=False)
    base = new if former is None else former
    if base.requires_grad:
        _cut(base, self, "detach_")
    elif former is not None and has_views(former):
        self.__dict__[_FORMER] = former
    return self


def _cut(base: Any, x: Any, name: str) -> None:
    """Let gradients of views end at their base, which is no longer the tensor that they were views of.

    A view whose base is written to is computed again from the base, and requires a gradient for ever if it did so once. So
    the base requires one, which nobody sees, unless the tensor itself requires one.
    """
    tensor, message = weakref.ref(x), _LATE_GRADIENT.format(name=name)

    def refuse(grad: Any) -> None:
        now = tensor()
        if now is not None and now.requires_grad:
            raise RuntimeError(message)

    torch.Tensor.detach_(base)
    torch.Tensor.requires_grad_(base).register_hook(refuse)


def _register_hook(self: Any, hook: Callable[[Any], Any]) -> Any:
    """Call a function with the gradient of the tensor, which it may replace by another."""
    former = _former_self(self)
    if former is None or not former.requires_grad:
        return torch.Tensor.register_hook(self, hook)  # type: ignore[no-untyped-call]
    calls = former.__dict__[_SUCCESSOR][2]

    def view(x: Any) -> Any:
        for out_of_place, args, kwargs in calls:
            x = out_of_place(x, *args, **kwargs)
        return x

    def relay(grad: Any) -> Any:
        result = hook(view(grad))
        if result is None:
            return None
        grad = torch.empty_like(grad)
        view(grad).copy_(result)
        return grad

    # the gradients of views are part of the tensor's, and for us they are views of what it was
    return former.register_hook(relay)


def _retain_grad(self: Any) -> None:
    """Keep the gradient of the tensor in `grad`, although it is no leaf."""
    former = _former_self(self)
    keeps = self.retains_grad
    torch.Tensor.retain_grad(self)
    if keeps or former is None or not former.requires_grad:
        return
    tensor = weakref.ref(self)
    before: dict[
        int, Any
    ] = {}  # by backward pass: one that fails, or ends at the tensor, leaves what it noted

    def note(grad: Any) -> None:
        now = tensor()
        if now is not None:
            before.clear()
            before[current_backward()] = None if now.grad is None else now.grad.clone()

    def keep(grad: Any) -> None:
        now = tensor()
        if now is not None:
            known = before.pop(current_backward(), now.grad)
            now.grad = grad.clone(memory_format=torch.contiguous_format) if known is None else known + grad

    # torch adds what reaches the tensor itself; then the whole gradient, with those of views, takes its place
    torch.Tensor.register_hook(self, note)  # type: ignore[no-untyped-call]
    self.register_hook(keep)


def _requires_grad(self: Any, requires_grad: bool = True) -> Any:
    """Let autograd record ops on the tensor, or not."""
    if requires_grad and self.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Setting requires_grad=True on inference tensor outside InferenceMode is not allowed.\n"
            "  why: The tensor has the memory of one that was created in torch.inference_mode().\n"
            "  fix: x = x.clone().requires_grad_()"
        )
    former = None if self.requires_grad or not requires_grad else _former_self(self)
    if former is not None:
        self._become(self.detach(), is_write=False)
        # views of what it was require a gradient from now on, as those of the tensor itself would
        _cut(former, self, former.__dict__[_SUCCESSOR][1])
    return torch.Tensor.requires_grad_(self, requires_grad)


_as_strided, _as_strided_scatter = torch.Tensor.as_strided, torch.Tensor.as_strided_scatter
"""Torch's own methods, whose names on `torch.Tensor` are patched."""


def _strided(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """`as_strided` of the tensor that `x` is a view of: sizes and strides may reach elements outside of `x`."""
    size, stride = tuple(size), tuple(stride)
    is_same = (size, stride) == (tuple(x.shape), x.stride())
    if is_same and storage_offset is None:
        return _as_strided(x, size, stride)
    root = memory_root(x)
    if root is None:
        return _as_strided(x, size, stride, storage_offset)
    first = memory_offset(x)
    offset = first if storage_offset is None else storage_offset
    if is_same and offset == first:
        return _as_strided(x, size, stride)
    if _got_gradient_later(x, root):
        return _as_strided(x, size, stride, _offset_within(x, size, stride, offset - first))
    out = _as_strided(_memory_in(root, x.dtype), size, stride, offset)
    if x.is_conj():
        out = out.conj()
    return negated_view(out) if x.is_neg() else out


def _memory_in(root: Any, dtype: torch.dtype) -> Any:
    """The memory of a tensor as numbers of another dtype, as views of it have them."""
    if root.dtype is dtype:
        return root
    is_real_part = root.is_complex() and not dtype.is_complex and root.dtype.to_real() is dtype
    if is_real_part:
        return torch.view_as_real(root)
    is_complex_pair = dtype.is_complex and root.dtype is dtype.to_real()
    return torch.view_as_complex(root) if is_complex_pair else root.view(dtype)


def _got_gradient_later(x: Any, root: Any) -> bool:
    """Whether gradients end at a view itself: it became a leaf that requires them, and its base requires none."""
    return x.requires_grad and not root.requires_grad and torch.is_grad_enabled()


def _offset_within(x: Any, size: Any, stride: Any, offset: int) -> int:
    """The offset that counts from the first element of `x`, whose memory must contain all the elements."""
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n)
    if is_dense(x.shape, x.stride()) and offset >= 0 and last < x.numel():
        return offset
    raise RuntimeError(_OUTSIDE.format(size=tuple(size), stride=tuple(stride), spec=x._spec))


def _strided_scatter(x: Any, src: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """`as_strided_scatter`: offsets count from the beginning of the memory that `x` is a view of."""
    if x.is_conj() or x.is_neg():
        x = x.clone()  # torch computes the values before
    root = memory_root(x)
    if root is None:
        return _as_strided_scatter(x, src, size, stride, storage_offset)
    first = memory_offset(x)
    if _got_gradient_later(x, root):
        offset = first if storage_offset is None else storage_offset
        return _as_strided_scatter(x, src, size, stride, _offset_within(x, size, stride, offset - first))
    memory = _memory_in(root if root.requires_grad == x.requires_grad else root.detach(), x.dtype)
    out = _as_strided_scatter(memory, src, size, stride, first if storage_offset is None else storage_offset)
    out = _as_strided(out, x.shape, x.stride(), first)
    return out.clone() if is_dense(out.shape, out.stride()) else out


def _strided_copy(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    return _strided(x, size, stride, storage_offset).clone(memory_format=torch.contiguous_format)


def _storage_offset(x: Any) -> int:
    """Where the tensor begins in the memory of the one that it is a view of."""
    return 0 if is_tracing() else memory_offset(x)


def _resized(x: Any, *size: Any, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """The first elements of a tensor in another shape; None if that is not a view of it."""
    if len(size) == 1 and not isinstance(size[0], int):
        size = tuple(size[0])
    shape = [int(n) for n in size]
    if tuple(shape) == tuple(x.shape) and memory_format is torch.contiguous_format and not x.requires_grad:
        return x  # whatever its strides are
    if memory_format is not torch.contiguous_format or x.requires_grad or min(shape, default=0) < 0:
        return None
    if x.is_contiguous() and math.prod(shape) <= x.numel():
        return x.view(-1)[: math.prod(shape)].view(shape)
    above = memory_root(x)
    root = x if above is None else above
    if not is_dense(root.shape, root.stride()) or memory_offset(x) + math.prod(shape) > root.numel():
        return None
    return _strided(x, shape, contiguous_stride(shape))  # what follows in memory, whatever the strides were


def _resized_as(x: Any, other: Any, *, memory_format: torch.memory_format | None = None) -> Any:
    """A tensor in the shape of another one; None if that is not a view of it."""
    return None if memory_format is not None else _resized(x, other.shape)


class ShapeMethods:
    """Methods of `DTensor` that change its own shape."""

    __slots__ = ()
    _can_change_places = True
    """Whether an object of the class can become any DTensor, and the other way round."""

    t_ = _becoming("t_", torch.Tensor.t)
    transpose_ = _becoming("transpose_", torch.Tensor.transpose)
    swapdims_ = _becoming("swapdims_", torch.Tensor.swapdims)
    swapaxes_ = _becoming("swapaxes_", torch.Tensor.swapaxes)
    squeeze_ = _becoming("squeeze_", torch.Tensor.squeeze)
    unsqueeze_ = _becoming("unsqueeze_", torch.Tensor.unsqueeze)
    as_strided: Any = _strided
    as_strided_copy: Any = _strided_copy
    as_strided_scatter: Any = _strided_scatter
    storage_offset: Any = _storage_offset
    as_strided_ = _becoming("as_strided_", _strided)
    set_: Any = _set
    resize_ = _becoming("resize_", _resized)
    resize_as_ = _becoming("resize_as_", _resized_as)
    detach_: Any = _detach
    register_hook: Any = _register_hook
    retain_grad: Any = _retain_grad
    requires_grad_: Any = _requires_grad
    requires_grad = property(torch.Tensor.requires_grad.__get__, _requires_grad)  # type: ignore[attr-defined]


CHANGE_SHAPES = (
    "t_", "transpose_", "swapdims_", "swapaxes_", "squeeze_", "unsqueeze_", "as_strided_", "resize_", "resize_as_", "detach_",
)  # fmt: skip
"""The methods after which the object is another tensor. `torch.ops.aten` has ops of the same names, which must call them."""

STRIDED = ("as_strided", "as_strided_copy", "as_strided_scatter")
"""The methods that count strides and offsets in the memory of the tensor that `x` is a view of; also names of ops."""
