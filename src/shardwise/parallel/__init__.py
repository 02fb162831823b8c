"""Module parallelism; its names come here as they are delivered."""

__all__: list[str] = []
