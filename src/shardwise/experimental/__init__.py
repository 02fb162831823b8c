"""The names of `torch.distributed.tensor.experimental`."""

from shardwise.api import local_map, register_sharding
from shardwise.tensor import implicit_replication

__all__ = ["implicit_replication", "local_map", "register_sharding"]
