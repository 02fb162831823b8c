"""Where torch keeps the order of tokens in context parallelism; a layout has no such order."""

from shardwise.experimental._context_parallel import _attention

__all__: list[str] = []

__getattr__ = _attention.__getattr__
