"""Where torch keeps the order of tokens in context parallelism."""

from shardwise.experimental._context_parallel import _attention
from shardwise.experimental._context_parallel.token_order import HeadTailLoadBalancer as _HeadTailLoadBalancer
from shardwise.experimental._context_parallel.token_order import LoadBalancer as _LoadBalancer

__all__ = ["_HeadTailLoadBalancer", "_LoadBalancer"]

__getattr__ = _attention.__getattr__
