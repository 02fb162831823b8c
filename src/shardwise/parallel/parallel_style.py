"""The base class of parallel styles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import Placement
from shardwise.tensor.dtensor import DTensor

__all__ = ["ParallelStyle", "distributed", "placements_tuple"]


class ParallelStyle(ABC):
    """How a module is parallelized. Subclasses define `_apply(module, device_mesh)`, which returns the module.

    `src_data_rank` is set by `parallelize_module`: the rank whose parameters are distributed, or None for each rank's own.
    """

    src_data_rank: int | None = 0
    _shown: tuple[str, ...] = ()
    """The attributes that its text shows, by which ranks compare their plans; nothing with an address."""

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._shown)})"
        )

    def _problems(self, module: nn.Module, device_mesh: DeviceMesh) -> list[str]:
        """Why the style cannot be applied to a module; asked for all modules of a plan before any is changed."""
        return []


def placements_tuple(layouts: Any) -> tuple[Any, ...]:
    """One layout or several as a tuple.

    >>> from shardwise import Shard
    >>> placements_tuple(Shard(0)), placements_tuple([None])
    ((Shard(dim=0),), (None,))
    """
    return (layouts,) if layouts is None or isinstance(layouts, Placement) else tuple(layouts)


def distributed(
    x: Tensor, mesh: DeviceMesh, declared: Placement, wanted: Placement, shape: Sequence[int] | None = None
) -> DTensor:
    """An activation in the wanted placement on a mesh of one axis.

    A plain tensor is a block of the declared placement; its gradient is a block again, without pending sums.
    """
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (declared,), shape=shape)
    if x.placements == (wanted,):
        return x
    return x.redistribute(placements=(wanted,))
