"""Where torch keeps its mode that counts collectives."""

from shardwise.debug.comm_mode import CommDebugMode

__all__ = ["CommDebugMode"]
