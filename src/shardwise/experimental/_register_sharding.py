"""Where torch keeps the registration of shardings."""

from shardwise._reexports import reexports
from shardwise.api.register_sharding import register_sharding

__all__ = ["register_sharding"]

__getattr__ = reexports("experimental._register_sharding")
