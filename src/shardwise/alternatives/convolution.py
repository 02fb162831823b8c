"""Convolutions over split positions: ranks exchange the halos of their blocks, not the blocks.

Of a convolution, what goes in are positions and what comes out are windows; of a transposed one it is the other way
round, and of a gradient too. So each of the four is one of two: positions go to the windows that cover them, or
windows to the positions they touch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives import grouped_convolution as grouped
from shardwise.alternatives.alternative import Maker, Offer, seconds_of
from shardwise.alternatives.exchange import block_of, named, plan_to
from shardwise.alternatives.halo import Halo, halos_of, recut
from shardwise.call.resolve import Prepared
from shardwise.comm import Coord, on_mesh, run
from shardwise.layout import Factor, Layout, Spec, block_shape
from shardwise.plan import plan_exchanges
from shardwise.plan.windows import Window
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import mind

__all__ = ["OFFERS"]

aten = torch.ops.aten
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class _Conv(NamedTuple):
    """The numbers of a convolution, and the halos of its split dims."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int
    halos: tuple[Halo, ...]

    def on_blocks(self) -> tuple[Any, ...]:
        """The arguments for blocks that have their halos: nothing is padded where it was split."""
        split = {h.dim - 2 for h in self.halos}
        none = [0 if i in split else p for i, p in enumerate(self.padding)]
        rest = [0 if i in split else p for i, p in enumerate(self.output_padding)]
        return self.stride, none, self.dilation, self.transposed, rest, self.groups


def _conv(given: dict[str, Any], layout: Layout, into: torch.Size, out: torch.Size) -> _Conv | None:
    """The convolution of a call whose input lies so, or None if there are no halos to exchange."""
    nd = len(into) - 2
    if nd < 1 or len(given["weight"].shape) != len(into) or 0 in into or 0 in out:
        return None
    each = [list(given[name]) for name in ("stride", "padding", "dilation", "output_padding")]
    stride, padding, dilation, extra = (v * nd if len(v) == 1 else v for v in each)
    kernel = given["weight"].shape[2:]
    windows = [Window(*w) for w in zip(kernel, stride, padding, dilation, strict=True)]
    transposed = given["transposed"]
    sizes, counts = (out[2:], into[2:]) if transposed else (into[2:], out[2:])
    halos = halos_of(layout, windows, sizes, counts)
    if halos is None:
        return None
    return _Conv(stride, padding, dilation, transposed, extra, given["groups"], tuple(halos))


def _in_layout(x: DTensor) -> Layout:
    """How what goes in must lie: channels whole and nothing pending, for weights are whole too."""
    return x._spec.layout.with_dim(1, Factor(x.shape[1])).with_partial({})


def _whole(t: Any, layout: Layout) -> Layout:
    return Layout.replicated(t.shape, layout.axes)


def _forward(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """What comes out is cut as what goes in."""
    given = named(aten.convolution.default, args, kwargs)
    x, w, b = given["input"], given["weight"], given["bias"]
    if recipe is None or not isinstance(x, DTensor):
        return None
    layout, made = _in_layout(x), recipe.outputs[0]
    conv = _conv(given, layout, x.shape, made.shape)
    if conv is None:
        return None
    out = recut(layout.with_dim(1, Factor(made.shape[1])), made.shape[2:])
    first = [plan_to(x, layout), plan_to(w, _whole(w, layout))]
    first.append(None if b is None else plan_to(b, _whole(b, layout)))
    moves = [h.to_positions() if conv.transposed else h.to_windows() for h in conv.halos]
    plan = plan_exchanges(layout, moves, x.dtype.itemsize)
    spec = made.with_layout(out)

    def local(coord: Coord, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        shape = block_shape(out, coord)
        if 0 in shape:
            return x.new_empty(shape)
        for h in conv.halos:
            x = x if conv.transposed else h.filled(coord, x)
        if 0 in x.shape:  # no window touches what is here
            y = x.new_zeros(shape)
        else:
            y = aten.convolution.default(x, w, None if conv.transposed else b, *conv.on_blocks())
            for h in conv.halos:
                y = h.kept(coord, y) if conv.transposed else y
        return y if b is None or not conv.transposed else y + b.view(-1, *[1] * (y.dim() - 2))

    def go(*args: Any, **kwargs: Any) -> DTensor:
        given = named(aten.convolution.default, args, kwargs)
        mind(aten.convolution.default, [*first, plan])
        tensors = [t for t in (given["input"], given["weight"], given["bias"]) if t is not None]
        x, *rest = (block_of(t, p, spec.mesh) for t, p in zip(tensors, first, strict=False))
        return DTensor(on_mesh(spec.mesh, local, run(plan, x, spec.mesh), *rest), spec)

    return Offer(seconds_of([*first, plan]), go, (spec,))


def _backward(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """Each rank has the gradient of its own positions, and its part of the weight's and the bias's.

    A product of a position and a window counts where what went in lies, so that each counts once.
    """
    given = named(aten.convolution_backward.default, args, kwargs)
    grad, x, w = given["grad_output"], given["input"], given["weight"]
    if recipe is None or not isinstance(x, DTensor) or not isinstance(grad, DTensor):
        return None
    layout = _in_layout(x)
    conv = _conv(given, layout, x.shape, grad.shape)
    if conv is None:
        return None
    out = recut(layout.with_dim(1, Factor(grad.shape[1])), grad.shape[2:])
    first = [plan_to(grad, out), plan_to(x, layout), plan_to(w, _whole(w, layout))]
    moves = [h.to_windows() if conv.transposed else h.to_positions() for h in conv.halos]
    mask = list(given["output_mask"])
    plan = plan_exchanges(out, moves if mask[0] or mask[1] else [], grad.dtype.itemsize)
    parts = dict.fromkeys(layout.sharded, "sum")
    made = iter(recipe.outputs)
    specs: list[Spec | None] = []
    for i, wanted in enumerate(mask):
        spec = next(made) if wanted else None
        lie = layout if i == 0 else None if spec is None else _whole(spec, layout).with_partial(parts)
        specs.append(None if spec is None or lie is None else spec.with_layout(lie))

    def local(coord: Coord, grad: Tensor, near: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        into, weight = _gradients(conv, coord, near, x, w, mask) if mask[0] or mask[1] else (None, None)
        bias = grad.sum([d for d in range(grad.dim()) if d != 1]) if mask[2] else None
        return [g for g in (into, weight, bias) if g is not None]

    mesh = recipe.mesh

    def go(*args: Any, **kwargs: Any) -> tuple[DTensor | None, ...]:
        mind(aten.convolution_backward.default, [*first, plan])
        given = named(aten.convolution_backward.default, args, kwargs)
        tensors = (given["grad_output"], given["input"], given["weight"])
        grad, x, w = (block_of(t, p, mesh) for t, p in zip(tensors, first, strict=True))
        made = iter(on_mesh(mesh, local, grad, run(plan, grad, mesh), x, w))
        return tuple(None if spec is None else DTensor(next(made), spec) for spec in specs)

    return Offer(seconds_of([*first, plan]), go, tuple(s for s in specs if s is not None))


def _gradients(
    conv: _Conv, coord: Coord, grad: Tensor, x: Tensor, w: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a block of what went in and, of this block's share, of the weight."""
    own = x
    for h in conv.halos:
        x = x if conv.transposed else h.spread(coord, x)
        grad = h.filled(coord, grad) if conv.transposed else grad
    if 0 in x.shape or 0 in grad.shape:
        return (torch.zeros_like(own) if mask[0] else None), (torch.zeros_like(w) if mask[1] else None)
    into, weight, _ = aten.convolution_backward.default(
        grad, x, w, None, *conv.on_blocks(), [mask[0], mask[1], False]
    )
    if mask[0] and not conv.transposed:
        for h in conv.halos:
            into = h.kept(coord, into)
    return into, weight


def _cheaper(*makers: Maker) -> Maker:
    def make(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
        found = (made for maker in makers if (made := maker(args, kwargs, recipe)) is not None)
        return min(found, key=lambda offer: offer.seconds, default=None)

    return make


OFFERS: dict[Any, Maker] = {
    aten.convolution.default: _cheaper(_forward, grouped.forward),
    aten.convolution_backward.default: _cheaper(_backward, grouped.backward),
}
