"""Where torch keeps its sharding rules; `shardwise.rules` has ours."""

__all__: list[str] = []
