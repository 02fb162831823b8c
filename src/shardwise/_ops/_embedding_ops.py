"""Where torch keeps the placement of a lookup in a split table."""

from shardwise.layout import MaskPartial as _MaskPartial

__all__ = ["_MaskPartial"]
