"""What the nodes of a captured program call, besides torch's own ops: steps of plans, and random draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import Coord
from shardwise.comm.ledger import Sent
from shardwise.comm.stages import grouped_entry, grouped_stage, single_entry, single_stage
from shardwise.ops.random_fill import fill_block
from shardwise.plan import GroupedStep, Step
from shardwise.torch_internals.dispatcher import below_autograd, signature_of

__all__ = [
    "FILL",
    "GETITEM",
    "OWN_OPS",
    "RECORDED_AS",
    "STRIDED",
    "Begin",
    "Finish",
    "Move",
    "MoveMany",
    "is_move",
]


class _Target(ABC):
    """A function of a graph: torch.fx writes its name into the code that it generates."""

    __module__ = "shardwise.compile.targets"

    @property
    def __name__(self) -> str:
        return self.label

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the function in a graph."""


@dataclass(frozen=True, eq=False)
class Move(_Target):
    """A step of a plan: a block goes in, the block after the step comes out."""

    step: Step
    mesh: DeviceMesh
    coord: Coord
    dtype: torch.dtype

    @property
    def label(self) -> str:
        return self.step.name.replace("-", "_").replace(" ", "_")

    @property
    def is_collective(self) -> bool:
        """Whether it communicates."""
        return self.step.is_collective

    @property
    def key(self) -> Any:
        """Equal for targets that do the same."""
        return (self.step, id(self.mesh), self.dtype)

    @cached_property
    def stage(self) -> Any:
        """The functions that start and complete the step on this rank."""
        return single_stage(self.step, self.mesh, self.dtype)

    def sent(self) -> Sent:
        """What this rank sends."""
        return single_entry(self.step, self.coord, self.dtype)

    def __call__(self, block: Tensor) -> Tensor:
        begin, finish = self.stage
        return finish(begin(block), block)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class MoveMany(_Target):
    """A step of a grouped plan: a list of blocks goes in, the list of blocks after the step comes out."""

    step: GroupedStep
    mesh: DeviceMesh
    coord: Coord
    dtypes: tuple[torch.dtype, ...]

    @property
    def label(self) -> str:
        return f"grouped_{self.step.kind.replace('-', '_')}"

    @property
    def is_collective(self) -> bool:
        """Whether it communicates."""
        return self.step.is_collective

    @property
    def key(self) -> Any:
        """Equal for targets that do the same."""
        return (self.step, id(self.mesh), self.dtypes)

    @cached_property
    def stage(self) -> Any:
        """The functions that start and complete the step on this rank."""
        return grouped_stage(self.step, self.mesh, self.dtypes)

    def sent(self) -> Sent:
        """What this rank sends."""
        return grouped_entry(self.step, self.coord, self.dtypes)

    def __call__(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        begin, finish = self.stage
        return finish(begin(list(blocks)), blocks)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Begin(_Target):
    """The first half of a collective: pack and start it."""

    move: Move | MoveMany

    @property
    def label(self) -> str:
        return f"begin_{self.move.label}"

    def __call__(self, block: Any) -> Tensor:
        return self.move.stage[0](block)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Finish(_Target):
    """The second half of a collective: wait for it and unpack."""

    move: Move | MoveMany

    @property
    def label(self) -> str:
        return f"finish_{self.move.label}"

    def __call__(self, coming: Tensor, block: Any) -> Any:
        return self.move.stage[1](coming, block)


def is_move(target: Any) -> bool:
    """Whether a node with this target is a step of a plan."""
    return isinstance(target, Move | MoveMany)


_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("fill_(Tensor(a!) block, Tensor state, int number, str numbers) -> ()")
_library.impl("fill_", fill_block, "CompositeExplicitAutograd")
_library.impl("fill_", lambda block, state, number, numbers: None, "Meta")
FILL: Any = torch.ops.shardwise.fill_.default
"""`fill_(block, state, number, numbers)`: see `shardwise.ops.random_fill.fill_block`."""

aten = torch.ops.aten


def _recurrent_layer(*args: Any) -> tuple[Tensor, ...]:
    """The kernel of a recurrent layer on CPU, which keeps what the backward pass needs only if gradients are enabled."""
    with below_autograd(), torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*args)  # type: ignore[no-any-return]


_library.define(signature_of(aten.mkldnn_rnn_layer.default, "recurrent_layer"))
_library.impl("recurrent_layer", _recurrent_layer, "CompositeExplicitAutograd")
_library.impl("recurrent_layer", aten.mkldnn_rnn_layer.default, "Meta")
RECORDED_AS: dict[Any, Any] = {
    aten.mkldnn_rnn_layer.default: torch.ops.shardwise.recurrent_layer.default,
}
"""Ops whose kernels ask whether gradients are enabled, and what does the same in a program, which runs without."""
OWN_OPS: dict[str, Any] = {str(op): op for op in (FILL, *RECORDED_AS.values())}
"""The ops of this module by name."""


def STRIDED(x: Tensor, size: Sequence[int], stride: Sequence[int], first: int) -> Tensor:  # noqa: N802
    """A view of the memory of a block by sizes and strides, beginning `first` elements after the block does."""
    return x.as_strided(size, stride, int(x.storage_offset()) + first)


def GETITEM(values: Any, number: int) -> Any:  # noqa: N802
    """One of several results of a node."""
    return values[number]
