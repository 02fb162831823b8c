"""The names of `torch.distributed.tensor.experimental`."""

from shardwise.api.local_map import local_map
from shardwise.api.register_sharding import register_sharding
from shardwise.experimental._context_parallel import context_parallel  # noqa: F401 - it refuses, so it is not offered
from shardwise.tensor.policy import implicit_replication

__all__ = ["implicit_replication", "local_map", "register_sharding"]
