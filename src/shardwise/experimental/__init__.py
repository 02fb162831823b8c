"""The path of torch's experimental names; they come here as they are delivered."""

from shardwise.api.local_map import local_map
from shardwise.tensor import implicit_replication, register_sharding

__all__ = ["implicit_replication", "local_map", "register_sharding"]
