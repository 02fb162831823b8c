"""Steps whose blocks have symbolic sizes that the axes need not divide: one op in the graph, which runs as in eager mode.

How blocks of a size are packed, and which collective moves them, depends on whether the axes divide the size. A compiled program
for all sizes leaves it to the time when the sizes are known. So on each size it sends what eager code sends, whichever
graphs the other ranks run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.mesh import coord_of
from shardwise.layout import Axes, Factor, Layout
from shardwise.layout.sizes import as_sizes, divides
from shardwise.plan import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Identity,
    Permute,
    Plan,
    ReduceScatter,
    Slice,
    Step,
)
from shardwise.plan.exchange import Extent
from shardwise.torch_internals.collective_order import count_as_collective
from shardwise.torch_internals.collectives import note_traced_group, unwatched
from shardwise.torch_internals.graph_values import mesh_named, name_mesh
from shardwise.torch_internals.ordered_ops import define_op

__all__ = ["define_steps", "depends_on_sizes", "step_at_run_time"]

_KINDS: dict[str, type[Step]] = {
    kind.__name__: kind for kind in (Slice, Identity, AllGather, AllToAll, Permute, ReduceScatter, Exchange)
}
_ops: dict[str, Any] = {}


def depends_on_sizes(step: Step) -> bool:
    """Whether the blocks of a step are known only when the sizes are."""
    if isinstance(step, AllReduce):  # each rank sends its block as it is
        return False
    if isinstance(step, Exchange):
        return step.source.is_symbolic
    return _is_uneven(step.source) or _is_uneven(step.target)


def _is_uneven(layout: Layout) -> bool:
    """Whether axes split a symbolic size that they are not known to divide."""
    if not layout.is_symbolic:
        return False
    sizes = layout.axes.sizes
    factors = [f for dim in layout.dims for f in dim if f.axes and type(f.size) is not int]
    return any(not divides(math.prod(sizes[a] for a in f.axes), f.size) for f in factors)


def step_at_run_time(step: Step, mesh: DeviceMesh, group: str) -> Callable[[Tensor], Tensor]:
    """A function that puts a step into the graph that is being traced."""
    sizes: list[Any] = []
    said = {
        "kind": type(step).__name__,
        "axes": step.axes,
        "mesh": name_mesh(mesh),
        "on": [step.source.axes.sizes, step.source.axes.names],
        "source": _encode(step.source, sizes),
        "target": _encode(step.target, sizes),
    }
    if isinstance(step, Exchange):
        parts = {"dim": step.dim, "owned": step.owned, "wanted": step.wanted, "extents": step.extents}
        said |= {name: _encode_numbers(part, sizes) for name, part in parts.items()}
    text, shape = json.dumps(said), list(as_sizes(step.shape_at(coord_of(mesh) or ())))
    if not group:
        return lambda block: _ops["rearrange"](block, text, sizes, shape, "")
    note_traced_group(group)
    return lambda block: _ops["communicate"](block, text, sizes, shape, group)


def _encode_numbers(value: Any, sizes: list[Any]) -> Any:
    """Nested tuples of numbers with places for symbols, which are appended to a list."""
    if isinstance(value, tuple):
        return [_encode_numbers(v, sizes) for v in value]
    if type(value) is int:
        return value
    sizes.append(value)
    return None


def _decode_numbers(said: Any, sizes: list[int]) -> Any:
    if isinstance(said, list):
        return tuple(_decode_numbers(v, sizes) for v in said)
    return sizes.pop(0) if said is None else said


def _encode(layout: Layout, sizes: list[Any]) -> Any:
    """A layout with places for its symbolic sizes, which are appended to a list."""
    dims = []
    for dim in layout.dims:
        dims.append([[f.size if type(f.size) is int else None, f.axes] for f in dim])
        sizes += [f.size for f in dim if type(f.size) is not int]
    return [dims, layout.partial]


def _decode(said: Any, on: Axes, sizes: list[int]) -> Layout:
    dims = [[Factor(sizes.pop(0) if n is None else n, tuple(axes)) for n, axes in dim] for dim in said[0]]
    return Layout(on, dims, dict(said[1]))


@lru_cache(maxsize=4096)
def _plan_of(text: str, sizes: tuple[int, ...]) -> tuple[Plan, str]:
    """The plan with one step that was encoded, at some sizes, and the name of its mesh."""
    said, rest = json.loads(text), list(sizes)
    on = Axes(tuple(said["on"][0]), tuple(said["on"][1]))
    source, target = (_decode(said[end], on, rest) for end in ("source", "target"))
    kind, parts = _KINDS[said["kind"]], {}
    if kind is Exchange:
        parts = {name: _decode_numbers(said[name], rest) for name in ("dim", "owned", "wanted", "extents")}
        parts["extents"] = tuple(Extent(*extent) for extent in parts["extents"])
    step = kind(source, target, tuple(said["axes"]), **parts)
    return Plan(source, target, (step,), 1), said["mesh"]


def define_steps(run: Callable[[Plan, Tensor, DeviceMesh], Tensor]) -> None:
    """Say how plans are run."""

    def move(block: Tensor, text: str, sizes: Sequence[int], shape: Sequence[int], group: str) -> Tensor:
        plan, mesh = _plan_of(text, tuple(sizes))
        with unwatched():
            out = run(plan, block, mesh_named(mesh))
        return out.clone() if out is block else out.contiguous()

    def infer(block: Tensor, text: str, sizes: Any, shape: Any, group: str) -> Tensor:
        return torch.empty(shape, dtype=block.dtype, device=block.device)

    schema = "(Tensor block, str text, SymInt[] sizes, SymInt[] shape, str group) -> Tensor"
    for name in ("rearrange", "communicate"):
        _ops[name] = define_op(name + schema, move, infer)
    count_as_collective(_ops["communicate"])
