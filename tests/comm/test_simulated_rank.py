"""The rank of a program in a simulation: its own inside `per_rank`, not a number outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import shardwise as sw

QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "torch.distributed.get_rank": lambda mesh: dist.get_rank(),
    "mesh.get_rank": lambda mesh: mesh.get_rank(),
    "mesh.get_local_rank": lambda mesh: mesh.get_local_rank("tp"),
    "mesh.get_coordinate": lambda mesh: mesh.get_coordinate()[1],
}
USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda rank: rank + 1,
    "multiply": lambda rank: torch.ones(2) * rank,
    "seed": lambda rank: torch.manual_seed(7 + rank),
    "fill": lambda rank: torch.full((2,), float(rank)),
    "slice": lambda rank: torch.arange(8)[rank * 2 : (rank + 1) * 2],
    "slice from": lambda rank: torch.arange(8)[rank:],
    "range": lambda rank: range(rank),
    "list": lambda rank: torch.arange(8).chunk(4)[rank],
    "dict": lambda rank: {0: "a", 1: "b"}[rank],
    "compare": lambda rank: rank < 2,
    "equal": lambda rank: rank == 1,
    "int": lambda rank: int(rank),
    "sampler": lambda rank: DistributedSampler(range(8), num_replicas=4, rank=rank),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("question", QUESTIONS)
def test_used_as_a_number_it_is_an_error(question: str, use: str) -> None:
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rank = QUESTIONS[question](mesh)
        text = (
            question.replace(".", r"\.")
            + r"\(.*used as a number[^|]*\n  why: [^|]*\n  fix: x = shardwise\.per_rank"
        )
        with pytest.raises(RuntimeError, match=text):
            USES[use](rank)


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_is_printed_and_compared_with_0_as_on_rank_0(question: str) -> None:
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rank = QUESTIONS[question](mesh)
        assert rank == 0
        assert (rank != 0) is False
        assert not rank
        assert f"{rank} {rank:02d} {rank!s}" == "0 00 0"
        assert rank == QUESTIONS[question](mesh)
        assert rank is not None
        assert rank != "0"


def test_inside_per_rank_it_is_the_number_of_the_rank() -> None:
    with sw.simulate(6):
        mesh = sw.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        flat = mesh._flatten("all")
        pair = dist.new_group([0, 4])

        def numbers(rank: int) -> torch.Tensor:
            of_groups = [dist.get_rank(mesh.get_group("tp")), dist.get_rank(pair), flat.get_local_rank()]
            return torch.tensor([dist.get_rank(), mesh.get_rank(), *mesh.get_coordinate(), *of_groups])

        found = sw.per_rank(numbers).ranks
        expected = [[r, r, r // 3, r % 3, r % 3, [0, 4].index(r) if r in (0, 4) else -1, r] for r in range(6)]
        assert [t.tolist() for t in found] == expected
        assert sw.per_rank(lambda rank: torch.tensor(mesh["dp"].get_local_rank())).ranks[4] == 1


def test_where_it_is_the_same_on_all_ranks_it_is_a_number() -> None:
    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
        assert torch.arange(3)[mesh.get_coordinate()[0]] == 0
        assert torch.arange(3)[mesh.get_local_rank("dp") :].numel() == 3
    with sw.simulate(1):
        assert torch.arange(3)[dist.get_rank()] == 0


def test_a_mesh_without_the_first_rank_has_coordinates() -> None:
    with sw.simulate(3):
        mesh = sw.DeviceMesh("cpu", [1, 2])
        assert mesh.get_coordinate() is not None
        assert sw.per_rank(lambda rank: torch.tensor(mesh.get_coordinate() or (-1,))).ranks[1:] == (
            torch.tensor([0]),
            torch.tensor([1]),
        )


def test_afterwards_the_functions_of_torch_are_back() -> None:
    def functions() -> list[Any]:
        mesh = sw.DeviceMesh
        return [dist.get_rank, mesh.get_rank, mesh.get_local_rank, mesh.get_coordinate]

    before = functions()
    with sw.simulate(2):
        assert all(a is not b for a, b in zip(functions(), before, strict=True))
    assert functions() == before
