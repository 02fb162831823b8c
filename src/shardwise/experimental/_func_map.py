"""Where torch keeps `local_map`."""

from __future__ import annotations

from typing import Any

from shardwise.api.local_map import local_map

__all__ = ["local_map"]


def _local_map_wrapped(*args: Any, **kwargs: Any) -> Any:
    """The function that torch.compile looks for among calls; ours is compiled like any other function."""
    return local_map(*args, **kwargs)
