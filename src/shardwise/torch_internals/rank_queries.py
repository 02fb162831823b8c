"""The functions by which a program asks for its rank: `dist.get_rank`, and those of a `DeviceMesh`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["answered_rank_queries", "process_coordinate", "process_rank"]

_answered: list[bool] = []


def process_rank(group: dist.ProcessGroup | None = None) -> int:
    """The rank of this process in a group, -1 if it is not one of its ranks; whatever `answered_rank_queries` says."""
    return distributed_c10d.get_rank(group)


def process_coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """The coordinate of this process on a mesh, or None; whatever `answered_rank_queries` says."""
    # inside torch's LocalTensorMode the method returns a number of each rank
    coordinate = mesh._coordinate_on_dim if _answered else mesh.get_coordinate()
    return None if coordinate is None else tuple(coordinate)


@contextmanager
def answered_rank_queries(
    rank: Callable[[Any, str], Any], coordinate: Callable[[DeviceMesh], tuple[Any, ...] | None]
) -> Iterator[None]:
    """Answer the program's questions for its rank by functions.

    Code of torch that asks by `torch.distributed.get_rank` is answered so, too; process groups and the creation of meshes
    ask another way, and get the rank of the process.

    Args:
        rank: called with the group, or None, and with the text of the question, for `dist.get_rank`, `mesh.get_rank` and `mesh.get_local_rank`.
        coordinate: called with the mesh, for `mesh.get_coordinate`.
    """

    def get_local_rank(mesh: DeviceMesh, mesh_dim: int | str | None = None) -> Any:
        return rank(
            mesh.get_group(mesh_dim), f"mesh.get_local_rank({'' if mesh_dim is None else repr(mesh_dim)})"
        )

    answers: dict[str, Callable[..., Any]] = {
        "get_rank": lambda mesh: rank(None, "mesh.get_rank()"),
        "get_local_rank": get_local_rank,
        "get_coordinate": lambda mesh: coordinate(mesh),
    }
    original: dict[str, Any] = {name: getattr(DeviceMesh, name) for name in answers}
    first = dist.get_rank
    for name, answer in answers.items():
        setattr(DeviceMesh, name, answer)
    dist.get_rank = lambda group=None: rank(group, "torch.distributed.get_rank()")
    _answered.append(True)
    try:
        yield
    finally:
        _answered.pop()
        dist.get_rank = first
        for name, method in original.items():
            setattr(DeviceMesh, name, method)
