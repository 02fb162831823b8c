"""Convolutions in groups, with channels split between groups: each rank has some groups whole, and nothing moves.

Where each channel is a group of its own there is a row; else what goes in and what comes out have different numbers of
channels per group, and that they are cut at the same groups is a matter of layouts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Offer, seconds_of
from shardwise.alternatives.exchange import block_of, named, plain_axes, plan_to
from shardwise.call.resolve import Prepared
from shardwise.comm import Coord, on_mesh
from shardwise.layout import Factor, Layout, Spec, block_shape
from shardwise.plan.exchange import Range, chunked, place_of
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import mind

__all__ = ["backward", "forward"]

aten = torch.ops.aten
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class _Groups(NamedTuple):
    """How all tensors of a convolution in groups lie, and which groups each rank has."""

    axes: tuple[int, ...]
    every: tuple[Range, ...]
    into: Layout
    weight: Layout
    out: Layout

    def count(self, coord: Coord) -> int:
        low, high = self.every[place_of(coord, self.axes, self.into.axes)]
        return high - low

    def along_out(self, n: int) -> Layout:
        """Of a tensor with one number per channel that comes out."""
        return Layout(self.into.axes, [(Factor(n, self.axes),)])


def _groups(given: dict[str, Any], x: DTensor, into: torch.Size, out: torch.Size) -> _Groups | None:
    """The layouts, if channels are cut between groups; positions must be whole."""
    groups, w, layout = given["groups"], given["weight"].shape, x._spec.layout.with_partial({})
    axes = plain_axes(layout, 1) if len(into) == len(w) else None
    if groups == 1 or not axes or 0 in into or 0 in out:
        return None
    every = chunked(groups, axes, layout.axes)
    for n in (into[1], out[1]):
        if chunked(n, axes, layout.axes) != tuple((a * n // groups, b * n // groups) for a, b in every):
            return None

    def lie(shape: torch.Size) -> Layout:
        rest = [(Factor(n),) for n in shape[2:]]
        return Layout(layout.axes, [layout.dims[0], (Factor(shape[1], axes),), *rest])

    weight = Layout(layout.axes, [(Factor(w[0], axes),), *((Factor(n),) for n in w[1:])])
    return _Groups(axes, every, lie(into), weight, lie(out))


def forward(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """Each rank convolves its groups."""
    given = named(aten.convolution.default, args, kwargs)
    x, w, b = given["input"], given["weight"], given["bias"]
    if recipe is None or not all(isinstance(t, DTensor) for t in (x, w, b) if t is not None):
        return None
    spec = recipe.outputs[0]
    groups = _groups(given, x, x.shape, spec.shape)
    if groups is None:
        return None
    first = [plan_to(x, groups.into), plan_to(w, groups.weight)]
    first += [] if b is None else [plan_to(b, groups.along_out(spec.shape[1]))]
    spec, numbers = spec.with_layout(groups.out), [given[name] for name in _NUMBERS]

    def local(coord: Coord, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        shape = block_shape(groups.out, coord)
        if 0 in shape:
            return x.new_empty(shape)
        return aten.convolution.default(x, w, b, *numbers, groups.count(coord))  # type: ignore[no-any-return]

    def go(*args: Any, **kwargs: Any) -> DTensor:
        mind(aten.convolution.default, first)
        given = named(aten.convolution.default, args, kwargs)
        tensors = [t for t in (given["input"], given["weight"], given["bias"]) if t is not None]
        blocks = [block_of(t, p, spec.mesh) for t, p in zip(tensors, first, strict=True)]
        return DTensor(on_mesh(spec.mesh, local, *blocks), spec)

    return Offer(seconds_of(first), go, (spec,))


_NUMBERS = ("stride", "padding", "dilation", "transposed", "output_padding")


def backward(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """Each rank has the gradients of its groups; of the weight's and the bias's, its batch's part."""
    given = named(aten.convolution_backward.default, args, kwargs)
    grad, x, w = given["grad_output"], given["input"], given["weight"]
    if recipe is None or not all(isinstance(t, DTensor) for t in (grad, x, w)):
        return None
    groups = _groups(given, x, x.shape, grad.shape)
    if groups is None:
        return None
    first = [plan_to(grad, groups.out), plan_to(x, groups.into), plan_to(w, groups.weight)]
    parts = dict.fromkeys(groups.into.sharded - set(groups.axes), "sum")
    mask, numbers, mesh = list(given["output_mask"]), [given[name] for name in _NUMBERS], recipe.mesh
    channels = grad.shape[1]
    lies = [
        groups.into,
        groups.weight.with_partial(parts),
        groups.along_out(channels).with_partial(parts),
    ]
    made = iter(recipe.outputs)
    specs: list[Spec | None] = [
        next(made).with_layout(lie) if m else None for lie, m in zip(lies, mask, strict=True)
    ]

    def local(coord: Coord, grad: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        if 0 in grad.shape or 0 in x.shape:
            shapes = [x.shape, w.shape, grad.shape[1:2]]
            return [grad.new_zeros(s) for s, m in zip(shapes, mask, strict=True) if m]
        sizes = list(grad.shape[1:2])
        every = aten.convolution_backward.default(grad, x, w, sizes, *numbers, groups.count(coord), mask)
        return [g for g, m in zip(every, mask, strict=True) if m]

    def go(*args: Any, **kwargs: Any) -> tuple[DTensor | None, ...]:
        mind(aten.convolution_backward.default, first)
        given = named(aten.convolution_backward.default, args, kwargs)
        tensors = (given["grad_output"], given["input"], given["weight"])
        blocks = [block_of(t, p, mesh) for t, p in zip(tensors, first, strict=True)]
        made = iter(on_mesh(mesh, local, *blocks))
        return tuple(None if spec is None else DTensor(next(made), spec) for spec in specs)

    return Offer(seconds_of(first), go, tuple(s for s in specs if s is not None))
