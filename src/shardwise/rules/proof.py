"""Proof of rules by execution: the public entry point.

This package cannot run ops. `import shardwise` registers the function that does with `prove_by`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.layout import LayoutError

__all__ = ["Proof", "RuleError", "prove_by", "verify"]

Sample = tuple[Sequence[Any], Mapping[str, Any]]


class RuleError(LayoutError):
    """A rule that allows a layout in which the op gives another result, shown by an example."""


@dataclass(frozen=True)
class Proof:
    """What `verify` ran: the number of calls, of their layouts, and of layouts in which gradients were compared too."""

    op: str
    row: str
    calls: int
    candidates: int
    gradients: int

    def __str__(self) -> str:
        return (
            f"{self.op} agrees with its row, '{self.row}', in {self.candidates} layouts of {self.calls} calls, "
            f"{self.gradients} of them with gradients"
        )


_Prover = Callable[[Any, "Sequence[Sample] | None", int, int], Proof]
_provers: list[_Prover] = []


def prove_by(prover: _Prover) -> None:
    """Register the function that runs ops for `verify`."""
    _provers[:] = [prover]


def verify(op: Any, calls: Sequence[Sample] | None = None, *, examples: int = 8, seed: int = 0) -> Proof:
    """Run an op in every layout that its rule allows and compare with the op on full tensors.

    `op` is an op of torch or the name of its row. `calls` are (args, kwargs) pairs of plain tensors and values; without
    them, `examples` calls that fit the row and the op's schema are generated from `seed`. Raises `RuleError` with a
    small example if results or gradients differ. It simulates its ranks and communicates with no process.

    >>> import torch, shardwise as sw
    >>> print(verify(torch.ops.aten.mv.default, examples=2))
    aten.mv.default agrees with its row, 'm k, k -> m; linear in (0) and in (1)', in ... layouts of 2 calls, ...
    """
    if not _provers:
        raise RuntimeError(
            "shardwise.rules.verify cannot run ops.\n"
            "  why: shardwise.rules knows ops by name only, and no function that runs them is registered.\n"
            "  fix: import shardwise"
        )
    return _provers[0](op, calls, examples, seed)
