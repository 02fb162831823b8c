"""Where torch keeps several blocks of one rank as one tensor; here layouts have that, and there is no such class."""

from __future__ import annotations

from typing import Any

__all__ = ["LocalShardsWrapper"]


class LocalShardsWrapper:
    """The class of torch's wrapper; no tensor is one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "LocalShardsWrapper was constructed.\n"
            "  why: A block of shardwise is one tensor, whatever runs of the full tensor it holds.\n"
            "  fix: DTensor.from_local(block, mesh, placements)"
        )
