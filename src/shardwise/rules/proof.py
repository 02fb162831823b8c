"""Proof of a rule: all that it allows is executed and compared with the op on whole tensors.

Rules know ops by name only and cannot run them, but this is where one looks for it. So the words are here, and who can
run ops says so with `prove_by`, which `import shardwise` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.layout import LayoutError

__all__ = ["Proof", "RuleError", "prove_by", "verify"]

Sample = tuple[Sequence[Any], Mapping[str, Any]]


class RuleError(LayoutError):
    """A rule that allows what gives another result than the op does, told by an example."""


@dataclass(frozen=True)
class Proof:
    """What was tried of an op's rule, and found right."""

    op: str
    row: str
    calls: int
    candidates: int
    gradients: int

    def __str__(self) -> str:
        return (
            f"{self.op} is as its row says, '{self.row}': {self.candidates} ways to lay out {self.calls} calls, "
            f"{self.gradients} of them with gradients"
        )


_Prover = Callable[[Any, "Sequence[Sample] | None", int, int], Proof]
_provers: list[_Prover] = []


def prove_by(prover: _Prover) -> None:
    """Say who runs ops for `verify`."""
    _provers[:] = [prover]


def verify(op: Any, calls: Sequence[Sample] | None = None, *, examples: int = 8, seed: int = 0) -> Proof:
    """Run an op in every layout that its rule allows and compare with the op on whole tensors; `RuleError` if they differ.

    `op` is an op of torch or the name of its row. `calls` are arguments to try it on, plain tensors among them;
    without them `examples` are drawn that fit the row and the op's schema.

    >>> import torch, shardwise as sw
    >>> print(verify(torch.ops.aten.mv.default, examples=2))
    aten.mv.default is as its row says, 'm k, k -> m; linear in (0) and in (1)': ... ways to lay out 2 calls, ...
    """
    if not _provers:
        raise RuntimeError(
            "shardwise.rules.verify has nobody to run ops.\n"
            "  why: rules know ops by name only\n"
            "  fix: import shardwise first"
        )
    return _provers[0](op, calls, examples, seed)
