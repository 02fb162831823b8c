"""Where torch keeps `local_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise._reexports import reexports
from shardwise.api.local_map import local_map
from shardwise.layout import Placement

__all__ = ["InputPlacements", "OutputPlacements", "PlacementType", "local_map"]

PlacementType = Sequence[Placement] | None
InputPlacements = tuple[PlacementType, ...] | None
OutputPlacements = PlacementType | tuple[PlacementType, ...]


def _local_map_wrapped(*args: Any, **kwargs: Any) -> Any:
    """The function that torch.compile looks for among calls; ours is compiled like any other function."""
    return local_map(*args, **kwargs)


__getattr__ = reexports("experimental._func_map")
