"""Running statistics of batch norms in a simulation: each rank has its own, computed from its own rows, as on real processes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from shardwise.comm import is_simulated, spread

__all__ = ["spread_statistics"]

_KINDS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def spread_statistics(modules: Iterable[nn.Module], ranks: tuple[int, ...]) -> None:
    """Give each of these ranks a copy of the running statistics in these modules, if they are simulated."""
    if not is_simulated():
        return
    for module in (m for root in modules for m in root.modules() if isinstance(m, _KINDS)):
        for name in ("running_mean", "running_var"):
            statistic = module._buffers.get(name)
            if type(statistic) is Tensor and not statistic.is_meta:
                module._buffers[name] = spread(statistic, ranks)
