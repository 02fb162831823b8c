"""What each rank writes, computed on every rank from layouts alone."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.grid import I64, Grid, assign_writers, grid_of
from shardwise.checkpoint.safetensors_file import dtype_name
from shardwise.comm import PerRank, coord_of, is_simulated, members_of, siblings_of
from shardwise.layout import Axes, Layout, owned
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.rank_queries import process_rank

__all__ = [
    "Item",
    "SavePlan",
    "Stored",
    "block_on",
    "coord_on",
    "is_alone",
    "plan_save",
    "positions",
    "stored_of",
    "this_rank",
    "world_size",
]


_RESERVED = "__metadata__"
"""The key of a header that is no tensor."""


class Stored(NamedTuple):
    """A tensor to be stored.

    Attributes:
        layout: its layout.
        ranks: those of its mesh, a row for each sibling of a sub-mesh.
        dtype: its dtype.
        is_plain: it is no DTensor.
    """

    layout: Layout
    ranks: I64
    dtype: torch.dtype
    is_plain: bool = False


class Item(NamedTuple):
    """A cell that a rank writes: the name of its tensor, the number of the cell, its offset and its shape."""

    name: str
    cell: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def name_in_file(self, cells: int) -> str:
        """The name of the cell in its file: that of the tensor where it is whole, else with its indices."""
        if cells == 1:
            return self.name if self.name != _RESERVED else f"{self.name}[]"
        return (
            f"{self.name}[{','.join(f'{o}:{o + n}' for o, n in zip(self.offset, self.shape, strict=True))}]"
        )


@dataclass(frozen=True)
class SavePlan:
    """The cells of each tensor and the ranks that write them."""

    stored: Mapping[str, Stored]
    grids: Mapping[str, Grid]
    writers: Mapping[str, I64]
    world: int

    def items_of(self, rank: int) -> list[Item]:
        """What a rank writes; elements of many bytes first, so that all are aligned in its file."""
        found = [
            Item(name, int(cell), *self.grids[name].box(int(cell)))
            for name, writers in self.writers.items()
            for cell in np.flatnonzero(writers == rank)
        ]
        return sorted(found, key=lambda i: -self.stored[i.name].dtype.itemsize)

    def bytes_of(self, rank: int) -> int:
        """The number of bytes that a rank writes."""
        return sum(
            int(self.grids[name].elements()[writers == rank].sum()) * self.stored[name].dtype.itemsize
            for name, writers in self.writers.items()
        )

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The tensors in JSON: dtype, shape, where each dim is cut, and the number of the rank that wrote each cell."""
        return {
            name: {
                "dtype": dtype_name(stored.dtype),
                "shape": list(stored.layout.shape),
                "cuts": [c.tolist() for c in self.grids[name].cuts],
                "files": self.writers[name].tolist(),
                **({"plain": True} if stored.is_plain else {}),
            }
            for name, stored in self.stored.items()
        }


def plan_save(stored: Mapping[str, Stored], world: int) -> SavePlan:
    """Plan who writes what: nothing is communicated, and a replicated cell is written once.

    >>> from shardwise.layout import parse_layout
    >>> mesh = np.arange(4).reshape(1, 4)
    >>> axes = Axes((2, 2), ("dp", "tp"))
    >>> layouts = {"w": "[4:tp, 6]", "b": "[6]"}
    >>> plan = plan_save({k: Stored(parse_layout(v, axes)[0], mesh, torch.float32) for k, v in layouts.items()}, 4)
    >>> {k: v.tolist() for k, v in plan.writers.items()}, [plan.bytes_of(r) for r in range(4)]
    ({'w': [0, 1], 'b': [2]}, [48, 48, 24, 0])
    """
    grids = {name: grid_of(s.layout) for name, s in stored.items()}
    writers = assign_writers([(grids[n], s.ranks, s.dtype.itemsize) for n, s in stored.items()], world)
    return SavePlan(stored, grids, dict(zip(stored, writers, strict=True)), world)


def world_size() -> int:
    """The number of ranks, simulated or not; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() or is_simulated() else 1


def this_rank() -> int:
    """The rank of this process."""
    return process_rank() if dist.is_initialized() else 0


def is_alone() -> bool:
    """Whether no other process takes part."""
    return is_simulated() or world_size() == 1


def stored_of(tensor: Tensor) -> Stored:
    """How a tensor is stored: a plain one counts as the same on all ranks."""
    if isinstance(tensor, DTensor):
        return Stored(tensor.sharding, np.array(siblings_of(tensor.device_mesh), np.int64), tensor.dtype)
    axes = Axes((world_size(),), ("rank",))
    layout = Layout.replicated(tuple(tensor.shape), axes)
    return Stored(layout, np.arange(world_size())[None], tensor.dtype, is_plain=True)


def coord_on(tensor: Tensor, rank: int) -> Sequence[int] | None:
    """The coord of a rank on the mesh of a tensor, None off the mesh; that of a plain tensor does not matter."""
    if not isinstance(tensor, DTensor):
        return (0,)
    if is_simulated():
        return members_of(tensor.device_mesh).get(rank)
    return coord_of(tensor.device_mesh)


def block_on(tensor: Tensor, rank: int) -> Tensor:
    """The block that a rank holds; a plain tensor is its own block."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # the block itself
        local: Tensor = tensor.to_local()
        return (local.of_rank(rank) if isinstance(local, PerRank) else local).detach()


def positions(layout: Layout, coord: Sequence[int], offset: Sequence[int]) -> list[int]:
    """Where in the block of a coord the element with this index is."""
    return [
        at - held.start if isinstance(held, range) else bisect.bisect_left(held, at)
        for held, at in zip(owned(layout, coord), offset, strict=True)
    ]
