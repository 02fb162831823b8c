"""The names of `torch.distributed.tensor.experimental`."""

from shardwise._reexports import reexports
from shardwise.api.local_map import local_map
from shardwise.api.register_sharding import register_sharding
from shardwise.experimental._context_parallel.sequences import context_parallel
from shardwise.tensor.policy import implicit_replication

__all__ = ["context_parallel", "implicit_replication", "local_map", "register_sharding"]

__getattr__ = reexports("experimental")
