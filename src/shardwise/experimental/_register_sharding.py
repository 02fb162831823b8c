"""Where torch keeps the registration of shardings."""

from shardwise.api.register_sharding import register_sharding

__all__ = ["register_sharding"]
