"""Calibrating the cost model: latency and bandwidth of each mesh axis, measured by all-gathers."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.mesh import Group, axes_of, coord_of, current_mesh, group_of
from shardwise.comm.simulate import is_simulated
from shardwise.layout import LayoutError
from shardwise.plan.cost import DEFAULT_COSTS, CostModel
from shardwise.torch_internals.collectives import all_gather, all_reduce, wait

__all__ = ["measure_costs"]

_SMALL, _LARGE = 8, 1 << 22  # bytes that a rank contributes
_WARM_UP, _REPEATS = 3, 10
_SECONDS = 0.5  # at most per axis and size


def measure_costs(mesh: DeviceMesh | None = None) -> CostModel:
    """Measure what communication costs on a mesh: `CostModel.measure(mesh)`.

    Args:
        mesh: the mesh, by default the one of the `with mesh:` around the call. All of its ranks must call this.

    Returns:
        A `CostModel` with a latency and a bandwidth per axis, by name if the mesh has names. It is the same on all ranks: of
        each axis the slowest figures that any rank measured. A simulation has nothing to measure and returns the default.

    Raises:
        LayoutError: this rank is not on the mesh.

    It sends a few small and a few large all-gathers along each axis, and takes about a second per axis.
    """
    mesh = current_mesh(mesh, "CostModel.measure")
    if is_simulated():
        return DEFAULT_COSTS
    if coord_of(mesh) is None:
        raise LayoutError(
            f"CostModel.measure was called on a rank that is not on the mesh {mesh}.",
            why="The ranks of the mesh measure how fast they communicate with each other.",
            fix="Call it only where mesh.get_coordinate() is not None, and pass the result on to the other ranks.",
        )
    axes = axes_of(mesh)
    figures = [f for a, n in enumerate(axes.sizes) for f in (_measure_axis(mesh, a) if n > 1 else (0.0, 0.0))]
    slowest = _maxima(figures, group_of(mesh, tuple(range(mesh.ndim))), mesh)
    latency, bandwidth = slowest[::2], [1 / max(pace, 1e-15) for pace in slowest[1::2]]
    if mesh.mesh_dim_names:
        return CostModel(
            dict(zip(axes.names, latency, strict=True)), dict(zip(axes.names, bandwidth, strict=True))
        )
    return CostModel(tuple(latency), tuple(bandwidth))


def _measure_axis(mesh: DeviceMesh, axis: int) -> tuple[float, float]:
    """Latency in seconds, and seconds per byte that a rank sends."""
    group = group_of(mesh, (axis,))
    small, large = (_best_time(mesh, group, nbytes) for nbytes in (_SMALL, _LARGE))
    return small, max(large - small, 0.0) / ((_LARGE - _SMALL) * (len(group.peers) - 1))


def _best_time(mesh: DeviceMesh, group: Group, nbytes: int) -> float:
    block = torch.zeros(nbytes, dtype=torch.uint8, device=mesh.device_type)
    best, spent = float("inf"), 0.0
    for i in range(_WARM_UP + _REPEATS):
        _synchronize(block)
        start = time.perf_counter()
        _synchronize(wait(all_gather(block, len(group.peers), group.name)))
        took = time.perf_counter() - start
        if i >= _WARM_UP:
            best, spent = min(best, took), spent + took
        # all ranks must stop at the same time, so they agree on the longest
        if nbytes == _LARGE and i >= _WARM_UP and _maxima([spent], group, mesh)[0] > _SECONDS:
            break
    return best


def _maxima(figures: list[float], group: Group, mesh: DeviceMesh) -> list[float]:
    """The largest value of each figure on any rank of a group."""
    mine = torch.tensor(figures, dtype=torch.float64, device=mesh.device_type)
    return wait(all_reduce(mine, "max", group.name)).tolist()


def _synchronize(t: Tensor) -> None:
    """Wait for the device, which may still be busy with the collective."""
    if t.device.type != "cpu":
        torch.get_device_module(t.device).synchronize(t.device)
