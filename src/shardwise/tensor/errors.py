"""Errors about tensors: meshes that do not match, and communication or plain tensors that were not asked for."""

from __future__ import annotations

from shardwise.layout import LayoutError

__all__ = ["CommunicationError", "MeshError", "PlainTensorError"]


# NotImplementedError is what torch raises here, and what programs written for it catch.
class MeshError(LayoutError, NotImplementedError):
    """Tensors on different meshes met in one op, or a tensor was to move to another mesh."""


class CommunicationError(LayoutError):
    """An op would have communicated where `policy(implicit="error")` forbids it."""


class PlainTensorError(LayoutError):
    """A plain tensor met a DTensor, and nothing says how it is laid out; or it differs between ranks."""
