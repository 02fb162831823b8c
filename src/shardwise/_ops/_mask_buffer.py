"""Where torch keeps the mask of a lookup in a split table."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._mask_buffer",
    "MaskBuffer",
    why="Rows of other ranks are zeros, so no mask is kept.",
    fix='A lookup in a split table is Partial("sum").',
)
