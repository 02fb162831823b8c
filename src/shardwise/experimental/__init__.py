"""The path of torch's experimental names; they come here as they are delivered."""

from shardwise.tensor import implicit_replication
from shardwise.tensor.local_map import local_map

__all__ = ["implicit_replication", "local_map"]
