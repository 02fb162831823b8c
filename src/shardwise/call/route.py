"""Route: how a call runs, what it sends, and what comes out; a value that can be compared and cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.layout import Spec
from shardwise.plan import Plan

__all__ = ["Route", "RouteKind", "Run"]

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]

RouteKind = Literal[
    "rule",
    "alternative",
    "composite",
    "decomposition",
    "fallback",
    "random",
    "foreach",
    "optimizer",
    "sparse",
    "request",
    "sub-mesh",
    "plain target",
    "resized out",
    "in-place view",
    "off mesh",
]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """How a call runs.

    Attributes:
        kind: which mechanism runs it.
        run: runs it, given the arguments of a call with the same key.
        plans: all it will send, or None where that is not known before it runs.
        outputs: its results, with the spec of each tensor in its place; None where they are not known before it runs.
    """

    kind: RouteKind
    run: Run
    plans: tuple[Plan, ...] | None = None
    outputs: tuple[Any, ...] | None = None

    @property
    def specs(self) -> tuple[Spec, ...] | None:
        """The specs of the tensor results."""
        return None if self.outputs is None else tuple(o for o in self.outputs if isinstance(o, Spec))
