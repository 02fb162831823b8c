"""What `torch.load(weights_only=True)` may construct: DTensors and the values they are saved with."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank
from shardwise.layout import Axes, Factor, Layout, Spec
from shardwise.layout.spec import restore_spec
from shardwise.tensor.construct import rebuild
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.serialization import mesh_layout_classes

__all__ = ["allow_loading"]


def allow_loading() -> None:
    """Declare the classes of a saved DTensor safe to load; none of them executes what it is given."""
    torch.serialization.add_safe_globals(
        [
            DTensor,
            rebuild,
            Spec,
            restore_spec,
            Layout,
            Axes,
            Factor,
            PerRank,
            DeviceMesh,
            *mesh_layout_classes(),
        ]
    )
