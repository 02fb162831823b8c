"""Where torch keeps the placements; here they come from `shardwise.layout`."""

from shardwise.layout import LayoutError, Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]

_Partial = Partial
_MaskPartial = Partial
"""A lookup in a split table leaves a pending sum, without a mask: rows of other ranks are zeros."""


class _StridedShard(Placement):
    """What torch writes for an axis that splits blocks of another axis, or an inner factor of a dim."""

    def __init__(self, dim: int, *, split_factor: int) -> None:
        raise LayoutError(
            f"_StridedShard({dim}, split_factor={split_factor}) is not a placement of shardwise.",
            why="Which axis is the outer one is the order of the Shard, and an inner factor of a dim is its factor.",
            fix=f"Shard({dim}, order=1) beside Shard({dim}, order=0), or Shard({dim}, factors=(a, b), factor=1)",
        )
