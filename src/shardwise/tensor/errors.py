"""Errors about tensors and meshes that do not fit."""

from __future__ import annotations

from shardwise.layout import LayoutError

__all__ = ["MeshError"]


# NotImplementedError is what torch raises here, and what programs catch.
class MeshError(LayoutError, NotImplementedError):
    """Tensors of different meshes met, or one was to move between meshes."""
