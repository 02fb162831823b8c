"""Linear layers of plans as one autograd function on the blocks: a third of the Python of the ops that torch makes of them."""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from shardwise.comm import coord_of
from shardwise.comm.simulate import at_simulation_end
from shardwise.layout import Layout, Spec, contiguous_stride
from shardwise.layout.sizes import cached
from shardwise.tensor.dtensor import DTensor, is_simulated_tensor
from shardwise.tensor.inference import note_inference_mode
from shardwise.torch_internals.autograd import has_tangent
from shardwise.torch_internals.autograd_function import applied_directly
from shardwise.torch_internals.dispatcher import transforms_are_active
from shardwise.torch_internals.subclass import new_dtensor

__all__ = ["linear", "run_on_blocks"]


def run_on_blocks(module: nn.Module) -> None:
    """Let a linear layer run by `linear`, if its forward method is that of `nn.Linear`."""
    if (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
    ):
        vars(module)["forward"] = MethodType(
            linear, module
        )  # bound, so that a copy of the module binds its copy


def linear(self: nn.Linear, input: Tensor) -> Tensor:
    """The forward method of `nn.Linear`, on blocks where nothing has to be sent for it."""
    x: Any = input
    w: Any = self.weight
    b: Any = self.bias
    if (
        not torch.compiler.is_compiling()
        and type(x) is DTensor
        and type(w) is DTensor
        and torch.is_grad_enabled()
        and (b is None or type(b) is DTensor)
    ):
        specs = _specs(x._spec, w._spec, None if b is None else b._spec)
        if specs is not None and not _is_special(x, w):
            return _Linear.apply(x, w, b, specs)  # type: ignore[no-any-return, no-untyped-call]
    return F.linear(x, w, b)


def _is_special(x: Tensor, w: Tensor) -> bool:
    """Whether something beside autograd has to see the ops."""
    return (
        is_simulated_tensor(x)  # type: ignore[arg-type]
        or (x.device.type != "meta" and torch.is_autocast_enabled(x.device.type))
        or transforms_are_active()
        or has_tangent(x)
        or has_tangent(w)
    )


class _Specs(NamedTuple):
    """The specs of the result and of the gradients of input, weight and bias, and the layout that its gradient must have."""

    out: Spec
    x: Spec
    w: Spec
    b: Spec | None
    grad: Layout


@cached(4096)
def _specs(x: Spec, w: Spec, b: Spec | None) -> _Specs | None:
    """What a linear layer gives without communication in these layouts; None if it needs some."""
    rows, features, (outputs, inputs) = x.layout.dims[:-1], x.layout.dims[-1:], w.layout.dims
    split_rows, split_outputs, summed = (_axes(*dims) for dims in (rows, (outputs,), features))
    if x.mesh is not w.mesh or coord_of(x.mesh) is None or features != (inputs,) or not rows:
        return None
    if x.layout.partial or w.layout.partial or split_rows & split_outputs or x.dtype is not w.dtype:
        return None
    if b is not None and (
        b.mesh is not w.mesh
        or b.layout.partial
        or b.layout.dims != (outputs,)
        or summed
        or b.dtype is not w.dtype
    ):
        return None
    if not x.dtype.is_floating_point or any(
        s is not None and (s.stride is None or s.units) for s in (x, w, b)
    ):
        return None
    grad = Layout(x.layout.axes, (*rows, outputs))

    def spec(layout: Layout, pending: frozenset[int]) -> Spec:
        pended = layout.with_partial(dict.fromkeys(pending, "sum"))
        return Spec(x.mesh, pended, x.dtype, torch.Size(layout.shape), contiguous_stride(layout.shape))

    return _Specs(
        spec(grad, summed),
        spec(x.layout, split_outputs),
        spec(w.layout, split_rows),
        None if b is None else spec(b.layout, split_rows),
        grad,
    )


at_simulation_end(_specs.cache_clear)


def _axes(*dims: Any) -> frozenset[int]:
    return frozenset(a for dim in dims for f in dim for a in f.axes)


@applied_directly
class _Linear(torch.autograd.Function):
    """`apply(x, weight, bias or None, specs)`."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, w: DTensor, b: DTensor | None, specs: _Specs) -> DTensor:
        ctx.save_for_backward(x, w)
        ctx.specs = specs
        note_inference_mode()
        block = F.linear(x._local_tensor, w._local_tensor, None if b is None else b._local_tensor)
        return new_dtensor(DTensor, block, specs.out, False)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, w = ctx.saved_tensors
        specs: _Specs = ctx.specs
        needs = ctx.needs_input_grad
        plain = (
            not torch.is_grad_enabled()
            and type(grad) is DTensor
            and grad._spec.layout is specs.grad
            and grad._spec.stride is not None
            and not has_tangent(grad)
        )
        given = [t._local_tensor for t in (grad, x, w)] if plain else [grad, x, w]
        found = _gradients(given[0], given[1], given[2], needs)
        if plain:
            wrapped = zip(found, (specs.x, specs.w, specs.b), strict=True)
            found = tuple(None if g is None else new_dtensor(DTensor, g, s, False) for g, s in wrapped)
        return (*found, None)


def _gradients(grad: Tensor, x: Tensor, w: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight and bias, of blocks or of DTensors."""
    flat = grad.flatten(0, -2)
    to_x = grad.matmul(w) if needs[0] else None
    to_w = flat.t().mm(x.flatten(0, -2)) if needs[1] else None
    return to_x, to_w, flat.sum(0) if needs[2] else None
