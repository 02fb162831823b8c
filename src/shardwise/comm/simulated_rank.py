"""The rank of a program that runs once for all ranks of a simulation: not a number, because there are several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.mesh import axes_of, members_of
from shardwise.comm.simulated_groups import groups_like
from shardwise.torch_internals.rank_queries import answered_rank_queries

__all__ = ["SimulatedRank", "simulated_ranks"]


class SimulatedRank:
    """What `dist.get_rank()` returns in a simulation, outside of `per_rank`.

    It is printed as 0 and is equal to 0, so that programs print and save as on rank 0. It is no int, and cannot be used as one:
    a number would count for all ranks.

    >>> rank = SimulatedRank("dist.get_rank()", 4)
    >>> rank == 0, bool(rank), f"rank {rank}"
    (True, False, 'rank 0')
    >>> rank + 1
    Traceback (most recent call last):
        ...
    RuntimeError: dist.get_rank() was used as a number in a simulation, by __add__.
      why: The program runs once for all ranks; on processes this number is one of 0 to 3.
      fix: x = shardwise.per_rank(lambda rank: ...) calls a function with the number of each rank
    """

    __slots__ = ("_count", "_source")

    def __init__(self, source: str, count: int) -> None:
        self._source, self._count = source, count

    def __repr__(self) -> str:
        return "0"

    def __format__(self, spec: str) -> str:
        return format(0, spec)

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SimulatedRank):
            return self._source == other._source or self._refuse("==")
        if other is None or isinstance(other, str):
            return False
        return (isinstance(other, int | float) and other == 0) or self._refuse("==")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _refuse(self, how: str) -> NoReturn:
        raise RuntimeError(
            f"{self._source} was used as a number in a simulation, by {how}.\n"
            f"  why: The program runs once for all ranks; on processes this number is one of 0 to {self._count - 1}.\n"
            "  fix: x = shardwise.per_rank(lambda rank: ...) calls a function with the number of each rank"
        )


def _refusal(name: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: self._refuse(name)


_ARITHMETIC = "add sub mul truediv floordiv mod divmod pow lshift rshift and or xor matmul"
for _name in [
    *"hash index int float complex lt le gt ge neg pos abs invert round trunc floor ceil array".split(),
    *_ARITHMETIC.split(),
    *(f"r{op}" for op in _ARITHMETIC.split()),
]:
    setattr(SimulatedRank, f"__{_name}__", _refusal(f"__{_name}__"))


@contextmanager
def simulated_ranks(current_rank: Callable[[], int | None]) -> Iterator[None]:
    """Answer questions for the rank: inside `per_rank` by the number of the rank, else by a `SimulatedRank`."""

    def rank_in(group: Any, question: str) -> Any:
        groups = groups_like(None if group is dist.group.WORLD else group)
        rank = current_rank()
        if rank is not None:
            mine = next((ranks for ranks in groups if rank in ranks), ())
            return mine.index(rank) if mine else -1
        if sum(map(len, groups)) == len(groups) == dist.get_world_size():
            return 0
        return SimulatedRank(question, len(groups[0]))

    def coordinate_on(mesh: DeviceMesh) -> tuple[Any, ...] | None:
        rank = current_rank()
        if rank is not None:
            return members_of(mesh).get(rank)
        axes = axes_of(mesh)
        return tuple(
            0 if size == 1 else SimulatedRank(f"mesh.get_coordinate() along {name}", size)
            for name, size in zip(axes.names, axes.sizes, strict=True)
        )

    with answered_rank_queries(rank_in, coordinate_on):
        yield
