"""A function of blocks as a function of DTensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import Layout, LayoutError, Partial, Placement, Replicate
from shardwise.tensor.consistency import inferred_shape
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.pytree import flatten

__all__ = ["MapError", "local_map"]

Placed = Sequence[Placement] | None


class MapError(LayoutError, AssertionError):
    """What a mapped function gets or gives does not fit the placements that were said of it."""


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placed | tuple[Placed, ...] = None,
    in_placements: tuple[Placed, ...] | None = None,
    in_grad_placements: tuple[Placed, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """`func` gets the blocks of its DTensors, and what it returns becomes DTensors that lie as `out_placements` says.

    Inputs must lie as `in_placements` says, or are brought there with `redistribute_inputs`. Where blocks may be uneven the
    ranks tell each other the shapes of the results. Without `in_grad_placements`, what is replicated and turns into
    something that is not has a gradient that is pending: each rank has its part of it.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = sw.distribute_tensor(torch.arange(5.0), mesh, [sw.Shard(0)])
    ...     doubled = local_map(lambda block: block * 2, out_placements=[sw.Shard(0)])(x)
    ...     print(doubled.sharding, doubled.full_tensor().ranks[0])
    [5:tp] tensor([0., 2., 4., 6., 8.])
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    outs = out_placements if isinstance(out_placements, tuple) else (out_placements,)

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        given, rebuild = flatten(args)
        _check_count(in_placements, given, "in_placements", "arguments")
        _check_count(in_grad_placements, given, "in_grad_placements", "arguments")
        tensors = [a for a in given if isinstance(a, DTensor)]
        if not tensors:
            return func(*args, **kwargs)
        mesh = device_mesh or tensors[0].device_mesh
        laid = [_laid(i, a, in_placements, redistribute_inputs) for i, a in enumerate(given)]
        blocks = [
            a.to_local(grad_placements=_grads(i, a, in_grad_placements, outs))
            if isinstance(a, DTensor)
            else a
            for i, a in enumerate(laid)
        ]
        results, rebuild_results = flatten(func(*rebuild(blocks), **kwargs))
        _check_count(outs, results, "out_placements", "results")
        uneven = any(_is_uneven(a._spec.layout) for a in laid if isinstance(a, DTensor))
        return rebuild_results([_wrapped(r, mesh, p, uneven) for r, p in zip(results, outs, strict=True)])

    return mapped


def _check_count(said: Sequence[Any] | None, given: Sequence[Any], name: str, what: str) -> None:
    if said is not None and len(said) != len(given):
        raise MapError(
            f"local_map got {len(said)} {name} for {len(given)} {what}.",
            why="each value, with lists and dicts opened, has its own placements, or None if it is no tensor",
            fix=f"give a tuple of {len(given)}",
        )


def _laid(i: int, arg: Any, said: tuple[Placed, ...] | None, may_move: bool) -> Any:
    """An argument as the function wants it to lie."""
    if said is None:
        return arg
    wanted = said[i]
    if isinstance(arg, DTensor):
        if wanted is None:
            raise MapError(
                f"local_map got a DTensor {arg._spec} as argument {i}, whose in_placements is None.",
                why="None stands for what is no DTensor",
                fix="say how it is to lie, such as [Replicate()]",
            )
        if arg._spec.layout is Layout.of(arg.shape, arg._spec.layout.axes, wanted):
            return arg
        if may_move:
            return arg.redistribute(placements=wanted)
        raise LayoutError(
            f"local_map: argument {i} is {arg._spec} with placements {arg.placements}, not {tuple(wanted)}.",
            why="its in_placements say so, and a mismatched placements is not mended unasked",
            fix="redistribute it first, or set redistribute_inputs=True",
        )
    if wanted is not None and not isinstance(arg, torch.Tensor):
        raise MapError(
            f"local_map got {arg!r} as argument {i}, whose in_placements is {tuple(wanted)}.",
            why="only tensors lie on a mesh",
            fix="give None in its place",
        )
    return arg


def _grads(
    i: int, arg: DTensor, said: tuple[Placed, ...] | None, outs: Sequence[Placed]
) -> Sequence[Placement] | None:
    """How the gradient of an argument's block lies."""
    if said is not None:
        if said[i] is None:
            raise MapError(
                f"local_map got a DTensor {arg._spec} as argument {i}, whose in_grad_placements is None.",
                why="None stands for what is no DTensor",
                fix="say how its gradient lies, such as [Partial()]",
            )
        return said[i]
    laid = [tuple(p) for p in outs if p is not None]
    return [
        Partial() if p.is_replicate() and any(not out[axis].is_replicate() for out in laid) else _settled(p)
        for axis, p in enumerate(arg.placements)
    ]


def _settled(placement: Placement) -> Placement:
    return Replicate() if placement.is_partial() else placement


def _is_uneven(layout: Layout) -> bool:
    sizes = layout.axes.sizes
    return any(f.size % math.prod(sizes[a] for a in f.axes) for dim in layout.dims for f in dim if f.axes)


def _wrapped(result: Any, mesh: DeviceMesh, placements: Placed, uneven: bool) -> Any:
    if not isinstance(result, torch.Tensor):
        if placements is not None:
            raise MapError(
                f"local_map: the function returned {result!r}, whose out_placements is {tuple(placements)}.",
                why="only tensors lie on a mesh",
                fix="give None in its place",
            )
        return result
    if isinstance(result, DTensor):
        raise MapError(
            f"local_map: the function returned a DTensor, {result._spec}.",
            why="it works on blocks, and what it returns becomes a DTensor here",
            fix="return its block: x.to_local()",
        )
    split = placements is not None and any(p.is_shard() for p in placements)
    shape = inferred_shape(result, mesh, placements or ()) if uneven and split else None
    return DTensor.from_local(result, mesh, placements, shape=shape)
