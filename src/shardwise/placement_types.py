"""Where torch keeps the placements; here they come from `shardwise.layout`."""

# in torch these two are found here as well
from shardwise._dtensor_spec import DTensorSpec, TensorMeta  # noqa: F401
from shardwise._reexports import reexports
from shardwise.layout import MaskPartial as _MaskPartial  # noqa: F401
from shardwise.layout import Partial, Placement, Replicate, Shard
from shardwise.layout import StridedShard as _StridedShard
from shardwise.layout.placement import OffsetMode as _StridedShardOffsetMode  # noqa: F401

__all__ = ["Partial", "Placement", "Replicate", "Shard"]

_Partial = Partial


def _is_shard_like(placement: object) -> bool:
    """Whether a placement splits a dim."""
    return isinstance(placement, Shard | _StridedShard)


__getattr__ = reexports("placement_types")
