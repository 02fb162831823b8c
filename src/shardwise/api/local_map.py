"""Applying a function to the local tensors of DTensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import Layout, LayoutError, Partial, Placement, Replicate
from shardwise.tensor.consistency import checked_shape
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.graph_calls import call_while_tracing
from shardwise.torch_internals.pytree import flatten

__all__ = ["MapError", "local_map"]

Placed = Sequence[Placement] | None


class MapError(LayoutError, AssertionError):
    """An argument or a result of a mapped function does not fit its placements."""


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placed | tuple[Placed, ...] = None,
    in_placements: tuple[Placed, ...] | None = None,
    in_grad_placements: tuple[Placed, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
) -> Callable[..., Any]:
    """A function of DTensors that applies `func` to their blocks and makes DTensors of the results; differentiable.

    Without a DTensor among the arguments it is `func` itself. Called without `func`, this is a decorator. Where a
    placement is expected per argument or result, lists and dicts count as their elements, and None stands for a value
    that is not a DTensor.

    Args:
        func: a function of local tensors.
        out_placements: the placements of the result, or a tuple of them, one per result.
        in_placements: the placements that each positional argument must have; by default any.
        in_grad_placements: the placements of the gradient of each argument. By default they are those of the argument,
            without pending reductions; on an axis where the argument is replicated and a result is not, the gradient is a
            partial sum.
        device_mesh: the mesh of the results; by default that of the first DTensor.
        redistribute_inputs: redistribute arguments that do not have their `in_placements`.
        spmd_types: an argument of torch 2.14, which checks `func` with the package spmd_types; only False is supported.

    Raises:
        LayoutError: an argument does not have its `in_placements` and `redistribute_inputs` is False.
        MapError: there are more or fewer placements than values, a DTensor has None for its placements or a value that is
            not a tensor has some, `func` returned a DTensor, or `spmd_types` is True.

    It sends what `func` sends, what `redistribute_inputs` makes necessary, and where blocks are uneven one small all-gather
    of the shape of each sharded result.

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
            spmd_types=spmd_types,
        )
    if spmd_types:
        raise MapError(
            "local_map does not support spmd_types=True.",
            why="The package spmd_types annotates the blocks of torch's DTensors, not of these.",
            fix="local_map(..., spmd_types=False)",
        )
    outs = out_placements if isinstance(out_placements, tuple) else (out_placements,)
    return _mapped(func, outs, in_placements, in_grad_placements, device_mesh, redistribute_inputs)


def _mapped(
    func: Callable[..., Any],
    outs: tuple[Placed, ...],
    in_placements: tuple[Placed, ...] | None,
    in_grad_placements: tuple[Placed, ...] | None,
    device_mesh: DeviceMesh | None,
    redistribute_inputs: bool,
) -> Callable[..., Any]:
    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        given, rebuild = flatten(args)
        _check_count(in_placements, given, "in_placements", "input args")
        _check_count(in_grad_placements, given, "in_grad_placements", "input args")
        tensors = [a for a in given if isinstance(a, DTensor)]
        if not tensors:
            return func(*args, **kwargs)
        mesh = device_mesh or tensors[0].device_mesh
        inputs = [_input(i, a, in_placements, redistribute_inputs) for i, a in enumerate(given)]
        blocks = [
            a.to_local(grad_placements=_grad_placements(i, a, in_grad_placements, outs))
            if isinstance(a, DTensor)
            else a
            for i, a in enumerate(inputs)
        ]
        results, rebuild_results = flatten(func(*rebuild(blocks), **kwargs))
        _check_count(outs, results, "out_placements", "output values")
        uneven = any(_is_uneven(a) for a in inputs if isinstance(a, DTensor))
        return rebuild_results([_output(r, mesh, p, uneven) for r, p in zip(results, outs, strict=True)])

    return mapped


def _check_count(placements: Sequence[Any] | None, values: Sequence[Any], name: str, kind: str) -> None:
    if placements is not None and len(placements) != len(values):
        raise MapError(
            f"local_map: {name} length {len(placements)} does not match the number of {kind} {len(values)}!",
            why=f"local_map requires one PlacementType be provided for each of the {kind}, also inside lists and dicts, or None for a value that is not a tensor; received {len(placements)} {name} but {len(values)} is expected.",
            fix=f"Use a tuple of length {len(values)}.",
        )


def _input(i: int, arg: Any, in_placements: tuple[Placed, ...] | None, redistribute: bool) -> Any:
    """An argument with its `in_placements`."""
    if in_placements is None:
        return arg
    wanted = in_placements[i]
    if isinstance(arg, DTensor):
        if wanted is None:
            raise MapError(
                f"local_map expects placements for the DTensor {arg._spec}, but the in_placements of argument {i} is None.",
                why="None stands for a value that is not a DTensor.",
                fix=f"in_placements=(..., {list(arg.placements)}, ...)",
            )
        if _has_layout(arg, tuple(wanted)):
            return arg
        if redistribute:
            return arg.redistribute(placements=wanted)
        raise LayoutError(
            f"local_map: argument {i} is {arg._spec} with placements {arg.placements}, not {tuple(wanted)}.",
            why="Arguments with mismatched placements are redistributed only on request: set redistribute_inputs=True.",
            fix=f"x.redistribute(placements={list(wanted)}), or local_map(..., redistribute_inputs=True)",
        )
    if wanted is not None and not isinstance(arg, torch.Tensor):
        raise MapError(
            f"local_map expects None placements for argument {i}, which is {arg!r}, but received {tuple(wanted)}.",
            why="Only tensors have placements.",
            fix="Use None as its in_placements.",
        )
    return arg


def _grad_placements(
    i: int, arg: DTensor, given: tuple[Placed, ...] | None, out_placements: Sequence[Placed]
) -> Sequence[Placement] | None:
    """The placements of the gradient of an argument's block."""
    if given is not None:
        if given[i] is None:
            raise MapError(
                f"local_map expects in grad placements for the DTensor {arg._spec}, but those of argument {i} are None.",
                why="None stands for a value that is not a DTensor.",
                fix="in_grad_placements=(..., [Partial()], ...) for a gradient that is a partial sum on each rank.",
            )
        return given[i]
    outs = [tuple(p) for p in out_placements if p is not None]

    def gradient(axis: int, p: Placement) -> Placement:
        if p.is_replicate() and any(not out[axis].is_replicate() for out in outs):
            return Partial()
        return Replicate() if p.is_partial() else p

    return [gradient(axis, p) for axis, p in enumerate(arg.placements)]


@call_while_tracing
def _has_layout(x: DTensor, placements: tuple[Placement, ...]) -> bool:
    """Whether the layout of a tensor is that of some placements."""
    layout = x._spec.layout
    return layout is Layout.of(layout.shape, layout.axes, placements)


@call_while_tracing
def _is_uneven(x: DTensor) -> bool:
    layout = x._spec.layout
    sizes = layout.axes.sizes
    return any(f.size % math.prod(sizes[a] for a in f.axes) for dim in layout.dims for f in dim if f.axes)


def _output(result: Any, mesh: DeviceMesh, placements: Placed, uneven: bool) -> Any:
    if not isinstance(result, torch.Tensor):
        if placements is not None:
            raise MapError(
                f"local_map expects None placements for the result {result!r}, but received {tuple(placements)}.",
                why="Only tensors have placements.",
                fix="Use None as its out_placements.",
            )
        return result
    if isinstance(result, DTensor):
        raise MapError(
            f"local_map: the function returned a DTensor, {result._spec}.",
            why="The function works on local tensors, and local_map makes DTensors of its results.",
            fix="return x.to_local()",
        )
    split = placements is not None and any(p.is_shard() for p in placements)
    shape = checked_shape(result, mesh, placements or (), values=False) if uneven and split else None
    return DTensor.from_local(result, mesh, placements, shape=shape)
