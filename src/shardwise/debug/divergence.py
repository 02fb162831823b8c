"""What ranks must agree on, and the error for what they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["REASONS", "DivergenceError", "Item", "describe_ranks", "divergence"]

REASONS = {
    "order": (
        "The ranks do not run the same ops on DTensors",
        "All ranks of a mesh must run the same ops, with the same layouts, dtypes and numbers, in the same order.",
        "Look for a branch, a shape, a number or the length of a loop that depends on the rank, at these lines.",
    ),
    "values": (
        "A replicated tensor is not the same on all ranks",
        "Ranks that differ only along an axis which replicates the tensor must hold the same bits.",
        "Make it equal on all ranks, as distribute_tensor(t, mesh, placements) does, or state what it is: "
        "DTensor.from_local(t, mesh, [Shard(dim)]) or [Partial()].",
    ),
    "plain": (
        "A plain tensor that counts as replicated is not the same on all ranks",
        "A plain tensor beside a DTensor counts as replicated, so all ranks must hold the same values.",
        "State its layout: DTensor.from_local(t, mesh, placements); or make it equal on all ranks.",
    ),
    "claim": (
        "The blocks that from_local got are not the same on all ranks",
        "Ranks that differ only along an axis where the placement is Replicate() must hold the same bits.",
        "Pass the placement that they have, DTensor.from_local(t, mesh, [Shard(dim)]) or [Partial()], or make them equal.",
    ),
    "gradient": (
        "The gradient of a block does not have the placement that to_local claims for it",
        "Without grad_placements the gradient is taken to have the layout of the tensor, so along an axis which replicates it all "
        "ranks must have computed the same gradient.",
        "If each rank computed a part of it: x.to_local(grad_placements=[Partial()]), or local_map(..., in_grad_placements=...).",
    ),
    "random": (
        "The random streams of the ranks are at different positions",
        "The numbers of one tensor come from one stream, so all ranks must draw from the same seed and position.",
        "Seed with shardwise.manual_seed(seed) on all ranks, and let all ranks draw equally often.",
    ),
    "layout": (
        "A block does not fit its layout",
        "The shape of a block follows from the layout and the rank, and its dtype is that of the tensor.",
        "Replace blocks only by blocks of the same shape and dtype; use DTensor.from_local for others.",
    ),
}
"""For each kind of divergence: what happened, why that is an error, and what to do."""


class DivergenceError(RuntimeError):
    """`sanitize` found that ranks do not agree; all ranks of the mesh raise it with the same text.

    Attributes:
        kind: "order", "values", "plain", "claim", "gradient", "random" or "layout".
        ranks: the first rank, and those that differ from it.
        is_alike: all ranks raise it, so that `guard` need not tell them soon.
    """

    is_alike = True

    def __init__(self, kind: str, ranks: tuple[int, ...], text: str) -> None:
        super().__init__(text)
        self.kind, self.ranks = kind, ranks

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kind, self.ranks, str(self))


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to agree on.

    Attributes:
        kind: the kind of divergence if the ranks do not.
        text: what it is, the same on all ranks if they agree.
        place: file, line and function of the program.
        origin: where the value comes from, or nothing.
        tensor: a weak reference to the value, or None.
    """

    kind: str
    text: str
    place: tuple[str, int, str]
    origin: str = ""
    tensor: Any = None

    def describe(self) -> str:
        """One side of a divergence, for people."""
        file, line, name = self.place
        value = self.tensor() if self.tensor is not None else None
        shown = "" if value is None else f" = {_shown(value)}"
        origin = f", {self.origin}" if self.origin else ""
        return f"{self.text}{shown} at {file}:{line} in {name}{origin}"


def _shown(tensor: Any) -> str:
    numbers = tensor.detach().reshape(-1)[:4].tolist()
    rest = ", ..." if tensor.numel() > 4 else ""
    return "[" + ", ".join(f"{n:.9g}" if isinstance(n, float) else str(n) for n in numbers) + rest + "]"


def describe_ranks(sides: Mapping[int, str]) -> str:
    """A line for each different text, with the ranks that have it.

    >>> print(describe_ranks({0: "aten.mm", 1: "aten.add", 2: "aten.mm"}), end="")
      ranks 0, 2: aten.mm
      rank 1: aten.add
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in sides.items():
        by_text.setdefault(text, []).append(rank)
    return "".join(
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}\n"
        for text, ranks in by_text.items()
    )


def divergence(kind: str, ranks: Sequence[int], sides: Mapping[int, str]) -> DivergenceError:
    """The error of one kind; `sides` says for each rank what it has."""
    what, why, fix = REASONS[kind]
    text = f"{what}.\n{describe_ranks(sides)}  why: {why}\n  fix: {fix}"
    return DivergenceError(kind, tuple(ranks), text)
