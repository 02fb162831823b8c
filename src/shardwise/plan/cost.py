"""The cost model: how long a step takes, by latency and bandwidth of the axes it communicates over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shardwise.layout import Axes
from shardwise.plan.step import Plan, Step
from shardwise.plan.symbolic_time import time_of

__all__ = ["DEFAULT_COSTS", "CostModel"]

Figures = float | tuple[float, ...] | Mapping[str, float]


@dataclass(frozen=True)
class CostModel:
    """Seconds per collective: `latency + bytes / bandwidth`, where bytes are what one rank sends on average.

    A ring all-gather or reduce-scatter of `b` bytes among `n` ranks sends `b * (n - 1) / n` bytes per rank, an all-reduce
    twice that. This is the only estimator: alternatives of an op, dry runs and redistribution all compare plans with it.

    Args:
        latency: seconds per collective: one number, one per mesh axis in order, or a mapping from axis names.
        bandwidth: bytes per second that a rank sends, in the same forms. A step over several axes runs at the pace of
            the slowest of them, and so does an axis that has no figure of its own.

    Raises:
        ValueError: a figure is negative, or a bandwidth is zero.

    >>> model = CostModel(latency={"dp": 1e-5, "tp": 1e-6}, bandwidth=(1e9, 1e11))
    >>> model.pace(Axes((2, 4), ("dp", "tp")), (0, 1))
    (1e-05, 1000000000.0)
    """

    latency: Figures = 1e-4
    bandwidth: Figures = 2e9

    measure: ClassVar[Callable[[Any], CostModel]]
    """`CostModel.measure(mesh)`: calibrate on a mesh; `shardwise.comm.measure` implements it."""

    def __post_init__(self) -> None:
        for name, value, least in (("latency", self.latency, 0.0), ("bandwidth", self.bandwidth, 1e-30)):
            figures = _figures(value)
            if not figures or not all(isinstance(f, float | int) and f >= least for f in figures):
                kind = "non-negative" if least == 0 else "positive"
                raise ValueError(
                    f"CostModel got {name}={value!r}.\n"
                    f"  why: {name} is a {kind} number, a tuple of one per mesh axis, or a mapping from axis names.\n"
                    "  fix: CostModel(latency=1e-5, bandwidth=1e10), or CostModel.measure(mesh)."
                )

    def __hash__(self) -> int:
        return hash((_hashable(self.latency), _hashable(self.bandwidth)))

    def pace(self, on: Axes, axes: Iterable[int]) -> tuple[float, float]:
        """Latency in seconds and bandwidth in bytes per second over some of a mesh's axes."""
        some = tuple(axes)
        return (
            max(_figure(self.latency, on, a, max) for a in some),
            min(_figure(self.bandwidth, on, a, min) for a in some),
        )

    def seconds(self, step: Step, itemsize: int) -> float:
        """The modelled time of one step; local steps are free."""
        if not step.is_collective:
            return 0.0
        latency, bandwidth = self.pace(step.source.axes, step.axes)
        elements, count = step.elements, step.source.axes.count
        if type(elements) is not int:
            return time_of(latency, elements, itemsize / count / bandwidth)  # type: ignore[no-any-return]
        return latency + elements * itemsize / count / bandwidth

    def total(self, plans: Iterable[Plan | None]) -> float:
        """The modelled time of some plans, one after the other; None stands for a tensor that stays."""
        return sum(
            self.seconds(step, plan.itemsize) for plan in plans if plan is not None for step in plan.steps
        )


def _figures(value: Figures) -> tuple[float, ...]:
    if isinstance(value, Mapping):
        return tuple(value.values())
    return value if isinstance(value, tuple) else (value,)


def _figure(value: Figures, on: Axes, axis: int, slowest: Callable[[Iterable[float]], float]) -> float:
    if isinstance(value, float | int):
        return value
    if isinstance(value, tuple):
        return value[axis] if axis < len(value) else slowest(value)
    name = on.names[axis]
    return value[name] if name in value else slowest(value.values())


def _hashable(value: Figures) -> object:
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


DEFAULT_COSTS = CostModel()
"""Roughly gloo between processes of one machine; `CostModel.measure(mesh)` gives the figures of a real mesh."""
