"""What a step costs: seconds by latency and bandwidth of the axes it talks over."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.plan.step import Step

__all__ = ["DEFAULT_COSTS", "CostModel"]


@dataclass(frozen=True)
class CostModel:
    """`latency + bytes ÷ bandwidth` for each collective, with bytes what a rank sends on average.

    A ring's all-gather or reduce-scatter of `b` bytes among `n` ranks sends `b·(n−1)/n`, an all-reduce twice
    that. Figures may be given for each axis, measured or from a data sheet; a step over several axes goes at
    the pace of the slowest.

    >>> CostModel(latency=(1e-5, 1e-6), bandwidth=(1e9, 1e11)).pace((0, 1))
    (1e-05, 1000000000.0)
    """

    latency: float | tuple[float, ...] = 1e-4
    bandwidth: float | tuple[float, ...] = 2e9

    def pace(self, axes: tuple[int, ...]) -> tuple[float, float]:
        """Latency in seconds and bandwidth in bytes per second over some axes."""
        latency = (
            self.latency if isinstance(self.latency, float | int) else max(self.latency[a] for a in axes)
        )
        width = (
            self.bandwidth
            if isinstance(self.bandwidth, float | int)
            else min(self.bandwidth[a] for a in axes)
        )
        return latency, width

    def seconds(self, step: Step, itemsize: int) -> float:
        """The modelled time of one step; local ones are free."""
        if not step.is_collective:
            return 0.0
        latency, width = self.pace(step.axes)
        return latency + step.elements * itemsize / step.source.axes.count / width


DEFAULT_COSTS = CostModel()
"""What gloo does between processes of one machine, roughly; measure your own and pass them where it matters."""
