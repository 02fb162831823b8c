"""Where torch keeps the geometry of blocks."""

from shardwise.api.geometry import compute_local_shape_and_global_offset

__all__ = ["compute_local_shape_and_global_offset"]
