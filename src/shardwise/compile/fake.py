"""A mesh of any size, without the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.simulate import forget_world
from shardwise.torch_internals.process_groups import fake_world

__all__ = ["fake_mesh"]


@contextmanager
def fake_mesh(
    shape: Sequence[int], names: Sequence[str], rank: int = 0, device_type: str = "cpu"
) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh that is not there, for `capture`.

    Tensors on it are created on the meta device, and captured programs can be printed and measured, but not run.

    Args:
        shape: the size of each axis.
        names: the name of each axis.
        rank: which rank of the mesh to be.
        device_type: the kind of device that programs are for.

    Nothing is communicated.

    >>> with fake_mesh((128, 8), ("dp", "tp"), rank=9) as mesh:
    ...     mesh.get_coordinate()
    (1, 1)
    """
    with fake_world(math.prod(shape), rank):
        try:
            yield init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names))
        finally:
            forget_world()
