"""The path of torch's experimental names; they come here as they are delivered."""

from shardwise.tensor import implicit_replication, register_sharding
from shardwise.tensor.local_map import local_map

__all__ = ["implicit_replication", "local_map", "register_sharding"]
