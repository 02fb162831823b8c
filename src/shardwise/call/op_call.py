"""OpCall: one call of an op on DTensors, with what the decision how to run it needs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.arguments import tensors_in
from shardwise.call.meta import infer_outputs
from shardwise.call.schema import op_info
from shardwise.comm import axes_of
from shardwise.layout import Axes, Layout
from shardwise.plan import Plan, plan_redistribute
from shardwise.rules.table import REGISTERED
from shardwise.tensor.dtensor import DTensor, is_simulated_tensor

__all__ = ["OpCall"]


class OpCall:
    """An op and its arguments. Derived attributes are computed at first use."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.info = op_info(func)
        self.tensors: list[Tensor] = tensors_in([*args, *kwargs.values()])

    @cached_property
    def named(self) -> dict[str, Any]:
        """The arguments by name, with defaults."""
        return self.info.bind(self.args, self.kwargs)

    @cached_property
    def first(self) -> DTensor:
        """The first DTensor, whose mesh is that of the call."""
        return next(t for t in self.tensors if isinstance(t, DTensor))

    @property
    def mesh(self) -> DeviceMesh:
        return self.first.device_mesh

    @property
    def axes(self) -> Axes:
        return axes_of(self.mesh)

    @property
    def simulated(self) -> bool:
        """Whether all ranks of the mesh are simulated in this process."""
        return is_simulated_tensor(self.first)

    @cached_property
    def layouts(self) -> list[Layout]:
        """The layouts of the tensors; plain tensors count as replicated."""
        return [
            t._spec.layout if isinstance(t, DTensor) else Layout.replicated(t.shape, self.axes)
            for t in self.tensors
        ]

    @cached_property
    def outputs(self) -> list[Any] | None:
        """The results on the meta device; None where they cannot be inferred."""
        return infer_outputs(self.func, self.args, self.kwargs, warn=self.info.name in REGISTERED)

    @cached_property
    def written(self) -> list[Tensor]:
        """The tensors that the op writes to."""
        given = [(i, self.info.arguments[i].name) for i in self.info.written]
        return tensors_in(self.args[i] if i < len(self.args) else self.kwargs.get(name) for i, name in given)

    @property
    def returned(self) -> Any:
        """The argument that the op writes to and returns, or None."""
        return self.info.returned_argument(self.args, self.kwargs)

    @cached_property
    def replication_plans(self) -> list[Plan]:
        """The plans that replicate each DTensor of the call."""
        return [
            plan_redistribute(here, Layout.replicated(here.shape, here.axes), t.dtype.itemsize)
            for t, here in zip(self.tensors, self.layouts, strict=True)
            if isinstance(t, DTensor)
        ]
