"""The path of torch's experimental names; they come here as they are delivered."""

from shardwise.tensor import implicit_replication

__all__ = ["implicit_replication"]
