"""What happens to activations where they enter and leave a module of a plan."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of
from shardwise.comm.simulate import at_simulation_end
from shardwise.layout import Layout, Placement, Replicate, Shard
from shardwise.layout.sizes import cached
from shardwise.parallel.tree import map_tensors
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.graph_calls import call_in_graph, call_while_tracing
from shardwise.torch_internals.mesh import root_mesh
from shardwise.torch_internals.subclass import version

__all__ = ["Boundary", "share_inputs", "stop_sharing_inputs"]

Inputs = Literal["keep", "gather", "sequence"]
Outputs = Literal["keep", "reduce", "gather", "sequence"]


@dataclass(frozen=True, slots=True)
class Boundary:
    """How the activations of a module are laid out on one axis of the mesh.

    Args:
        mesh: the mesh of the module's parameters.
        axis: the index of the axis.
        inputs: "gather": replicated, and their gradients reduced; "sequence": split along dim 1; "keep": as they come.
        outputs: "reduce": pending sums are reduced, or scattered if `scatter`; "gather": replicated; "sequence", "keep".
        scatter: sequence parallelism: outputs are scattered along dim 1 instead of being reduced on each rank.
        experts: the axis splits the experts of the module, to which tokens are routed.
    """

    mesh: DeviceMesh
    axis: int
    inputs: Inputs = "keep"
    outputs: Outputs = "keep"
    scatter: bool = False
    experts: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Boundary:
        return self  # a copy of a module is on the same mesh

    def on(self, mesh: DeviceMesh) -> Boundary | None:
        """The same for activations on a mesh with more axes, such as that of the data; None on one without this axis."""
        return self if mesh is self.mesh else _lifted(self, mesh)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the module takes them."""
        if self.inputs == "keep":
            return args, kwargs
        return map_tensors(self._input, (args, kwargs))  # type: ignore[no-any-return]

    def leave(self, result: Any) -> Any:
        """The results as the rest of the model takes them."""
        return result if self.outputs == "keep" else map_tensors(self._output, result)

    def _input(self, x: Tensor) -> Tensor:
        if (axis := self._axis(x)) is None:
            return x
        wanted: Placement = Replicate() if self.inputs == "gather" else Shard(1)
        if self.inputs == "sequence" and x.dim() < 3:
            return x
        return _prepare(x, axis, wanted)  # type: ignore[arg-type]

    def _output(self, x: Tensor) -> Tensor:
        if (axis := self._axis(x)) is None:
            return x
        layout: Layout = x.sharding  # type: ignore[attr-defined]
        if self.outputs == "reduce" and all(a != axis for a, _ in layout.partial) and not self.scatter:
            return x
        sequence = x.dim() >= 3 and (
            self.outputs == "sequence" or (self.outputs == "reduce" and self.scatter)
        )
        target = _with_axis(layout, axis, Shard(1) if sequence else Replicate())
        return x if target is layout else x.redistribute(placements=target.placements)  # type: ignore[attr-defined]

    def _axis(self, x: Tensor) -> int | None:
        """The axis on the mesh of a floating-point DTensor; None for other tensors: indices and masks stay as they are."""
        if not isinstance(x, DTensor) or not x.dtype.is_floating_point:
            return None
        if x.device_mesh is self.mesh:
            return self.axis
        on = _lifted(self, x.device_mesh)
        return None if on is None else on.axis


@call_while_tracing
@cached(4096)
def _lifted(boundary: Boundary, mesh: DeviceMesh) -> Boundary | None:
    name = axes_of(boundary.mesh).names[boundary.axis]
    names = axes_of(mesh).names
    if root_mesh(mesh) is not root_mesh(boundary.mesh) or name not in names:
        return None
    return replace(boundary, mesh=mesh, axis=names.index(name))


at_simulation_end(_lifted.cache_clear)


@call_while_tracing
@cached(4096)
def _with_axis(layout: Layout, axis: int, placement: Placement) -> Layout:
    placements = list(layout.placements)
    placements[axis] = placement
    return Layout.of(layout.shape, layout.axes, placements)


class _SharedInputs:
    """The last input that was prepared, so that projections of one tensor prepare it once: q, k and v, gate and up."""

    __slots__ = ("_source", "_state", "_target")

    def __init__(self) -> None:
        self._source: DTensor | None = None
        self._target: DTensor | None = None
        self._state: Any = None

    def get(self, x: DTensor, layout: Layout) -> DTensor:
        """The tensor in a layout, whose gradient is reduced to the tensor's own layout once for all who take it from here."""
        differentiable = torch.is_grad_enabled() and x.requires_grad
        if layout is x.sharding and not differentiable:
            return x
        state = (layout, version(x), differentiable)
        if self._source is x and self._state == state and self._target is not None:
            return self._target
        target = x.redistribute(placements=layout.placements)
        self._source, self._target, self._state = x, target, state
        return target


_shared: ContextVar[tuple[_SharedInputs, Any] | None] = ContextVar("shardwise_shared_inputs", default=None)


def share_inputs() -> None:
    """Have modules that get the same tensor prepare it once, until `stop_sharing_inputs`."""
    _shared.set((_SharedInputs(), _shared.get()))


def stop_sharing_inputs() -> None:
    """Return to what was before the last `share_inputs`."""
    shared = _shared.get()
    _shared.set(None if shared is None else shared[1])


@call_in_graph
def _prepare(x: DTensor, axis: int, placement: Placement) -> DTensor:
    """An input with a placement on an axis."""
    layout = _with_axis(x.sharding, axis, placement)
    shared = _shared.get()
    return (_SharedInputs() if shared is None else shared[0]).get(x, layout)
