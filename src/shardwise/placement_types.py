"""Where torch keeps the placements; here they come from `shardwise.layout`."""

from shardwise.layout import MaskPartial as _MaskPartial
from shardwise.layout import Partial, Placement, Replicate, Shard
from shardwise.layout import StridedShard as _StridedShard

__all__ = ["Partial", "Placement", "Replicate", "Shard", "_MaskPartial", "_StridedShard"]

_Partial = Partial
