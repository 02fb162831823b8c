"""Running the programs of all ranks of a simulation in one process: each up to its next collective, then the collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor, fx

from shardwise.comm import PerRank
from shardwise.comm.per_rank import at_rank
from shardwise.comm.stages import simulated_grouped_stage, simulated_stage
from shardwise.compile.lower import as_python
from shardwise.compile.targets import Begin, Finish, Move, MoveMany, is_move

__all__ = ["run_all_ranks"]


def run_all_ranks(
    graphs: Mapping[int, fx.Graph], blocks: Mapping[int, Sequence[Tensor]], others: Sequence[Any]
) -> list[Tensor]:
    """Run the graph of each rank on its blocks; returns the outputs of all ranks.

    Args:
        graphs: the graph of each rank. All have the same collectives in the same order.
        blocks: for each rank its first inputs, the blocks of all ranks in PerRank tensors; a plain one is the same on all ranks,
            and what the first rank writes to it counts.
        others: the other inputs, the same on all ranks.
    """
    runs = {}
    for i, (rank, graph) in enumerate(graphs.items()):
        mine = [at_rank(b, rank) if isinstance(b, PerRank) or i == 0 else b.clone() for b in blocks[rank]]
        runs[rank] = _function(graph)(*mine, *others)
    asked = {rank: next(run) for rank, run in runs.items()}
    while (target := next(iter(asked.values()))[0]) is not None:
        answers = _communicate(target, {rank: args for rank, (_, args) in asked.items()})
        asked = {rank: run.send(answers[rank]) for rank, run in runs.items()}
    outputs = zip(*(found for _, found in asked.values()), strict=True)
    return [PerRank(dict(zip(runs, parts, strict=True))) for parts in outputs]


@lru_cache(maxsize=256)
def _function(graph: fx.Graph) -> Any:
    return as_python(graph, lambda target: is_move(target) or isinstance(target, Begin | Finish))


def _communicate(target: Any, args: dict[int, Any]) -> dict[int, Any]:
    """The result of a step of a plan on each rank."""
    match target:
        case Finish():  # complete since it began
            return {rank: coming for rank, (coming, _) in args.items()}
        case Begin(move=move):
            return _communicate(move, args)
        case Move(step, mesh, _, dtype):
            begin, finish = simulated_stage(step, mesh, dtype)
            block = PerRank({rank: block for rank, (block,) in args.items()})
            out = finish(begin(block), block)
            return {rank: at_rank(out, rank) for rank in args}
        case MoveMany(grouped, mesh, _, dtypes):
            first, complete = simulated_grouped_stage(grouped, mesh, dtypes)
            many: list[Tensor] = [
                PerRank({rank: given[i] for rank, (given,) in args.items()}) for i in range(len(dtypes))
            ]
            found = complete(first(many), many)
            return {rank: [at_rank(x, rank) for x in found] for rank in args}
        case _:
            raise TypeError(f"{target} is no step of a plan")
