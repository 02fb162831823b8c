"""Where torch keeps the placement of a lookup in a split table; here it is a pending sum."""

from shardwise.layout import Partial

__all__: list[str] = []

_MaskPartial = Partial
