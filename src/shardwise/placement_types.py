"""Where torch keeps the placements; here they come from `shardwise.layout`."""

# torch.distributed._tensor.placement_types has these two as well
from shardwise._dtensor_spec import DTensorSpec, TensorMeta  # noqa: F401
from shardwise.layout import MaskPartial as _MaskPartial  # noqa: F401
from shardwise.layout import Partial, Placement, Replicate, Shard
from shardwise.layout import StridedShard as _StridedShard  # noqa: F401

__all__ = ["Partial", "Placement", "Replicate", "Shard"]

_Partial = Partial
