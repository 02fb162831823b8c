"""Where torch keeps the placements; here they come from `shardwise.layout`."""

from shardwise.layout import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
