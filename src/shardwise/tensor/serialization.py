"""What `torch.load(weights_only=True)` may make: DTensors, of the values that are saved with them."""

from __future__ import annotations

import torch
from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank
from shardwise.layout import Axes, Factor, Layout, Spec
from shardwise.tensor.dtensor import DTensor, rebuild

__all__ = ["allow_loading"]


def allow_loading() -> None:
    """Name the classes that a saved DTensor consists of as safe to load; none of them runs what it is given."""
    torch.serialization.add_safe_globals(
        [DTensor, rebuild, Spec, Layout, Axes, Factor, PerRank, DeviceMesh, _MeshLayout, _FlatLayout]
    )
