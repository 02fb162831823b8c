"""The methods by which `torch.distributed.checkpoint` saves and loads a DTensor: one chunk per rectangular run of its block."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.comm import PerRank, coord_of
from shardwise.layout import Spec, owned
from shardwise.torch_internals.checkpoint import chunk, write_item
from shardwise.torch_internals.local_tensor import is_active

__all__ = ["Box", "CheckpointMethods", "boxes"]


class Box(NamedTuple):
    """A rectangular part of a tensor: where it begins in the tensor, where in the block, and its shape."""

    offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    shape: tuple[int, ...]


def boxes(spec: Spec) -> list[Box]:
    """The rectangular runs of this rank's block; none for an empty block and on ranks that are not on the mesh."""
    coord = coord_of(spec.mesh)
    if coord is None:
        return []
    if 0 in spec.layout.shape:  # the tensor has no elements, but is saved
        return [Box((0,) * spec.ndim, (0,) * spec.ndim, spec.layout.shape)]
    runs = [_runs(indices) for indices in owned(spec.layout, coord)]
    return [Box(*zip(*one, strict=True)) if one else Box((), (), ()) for one in product(*runs)]


def _runs(indices: Any) -> list[tuple[int, int, int]]:
    """Consecutive indices as (first index, position of the first, number).

    >>> _runs(range(2, 5)), _runs([0, 1, 4, 5]), _runs(range(3, 3))
    ([(2, 0, 3)], [(0, 0, 2), (4, 2, 2)], [])
    """
    if isinstance(indices, range):
        return [(indices.start, 0, len(indices))] if len(indices) else []
    out: list[tuple[int, int, int]] = []
    for position, i in enumerate(indices):
        if out and out[-1][0] + out[-1][2] == i:
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + 1)
        else:
            out.append((i, position, 1))
    return out


class CheckpointMethods:
    """What `torch.distributed.checkpoint` asks a tensor for."""

    _local_tensor: Tensor
    _spec: Spec
    __slots__ = ()

    def _boxes(self) -> list[Box]:
        """The runs of the block, or an error if it cannot be saved."""
        spec = self._spec
        if any(p.is_partial() for p in spec.placements):
            raise ValueError(
                "Any checkpointing related operations are not supported for DTensor with partial placements!\n"
                f"  why: {spec} holds terms of a reduction that has not been done, so no rank has its values.\n"
                "  fix: x.redistribute(placements=[Replicate(), ...]) before it is saved"
            )
        if spec.stride is None or isinstance(self._local_tensor, PerRank) or is_active():
            kind = "sparse" if spec.stride is None else "simulated"
            raise ValueError(
                f"A {kind} DTensor, {spec}, cannot be saved by torch.distributed.checkpoint.\n"
                "  why: It saves the dense block of one rank per process.\n"
                "  fix: save x.full_tensor()"
            )
        return boxes(spec)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        spec = self._spec
        return [write_item(fqn, b.offset, b.shape, spec.dtype, spec.shape) for b in self._boxes()]

    def __create_chunk_list__(self) -> list[Any]:
        return [chunk(b.offset, b.shape) for b in self._boxes()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        found = self._boxes()
        local = self._local_tensor.detach()
        wanted = None if index.offset is None else tuple(index.offset)
        for b in found:
            if wanted == b.offset or (wanted is None and len(found) == 1):
                for d, (begin, size) in enumerate(zip(b.local_offset, b.shape, strict=True)):
                    local = local.narrow(d, begin, size)
                return local
        raise ValueError(
            f"This rank has no part of {self._spec} at {wanted}.\n"
            f"  why: Its parts begin at {[b.offset for b in found]}.\n"
            "  fix: Ask for an offset of x.__create_chunk_list__()."
        )

    @property
    def global_shape(self) -> torch.Size:
        """The shape of the full tensor; with the three below, torch's `CheckpointableTensor` (2.15)."""
        return self._spec.shape  # type: ignore[no-any-return]

    @property
    def global_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Where each rectangular run of the block begins in the full tensor."""
        return tuple(b.offset for b in self._boxes())

    @property
    def local_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Where each rectangular run begins in the block."""
        return tuple(b.local_offset for b in self._boxes())

    @property
    def local_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each rectangular run."""
        return tuple(b.shape for b in self._boxes())
