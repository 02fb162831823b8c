"""Where torch kept context parallelism before 2.10."""

from shardwise.experimental._context_parallel import _attention
from shardwise.experimental._context_parallel._attention import (
    _context_parallel_shard,
    _ContextParallel,
    _ContextParallelOptions,
    _cp_options,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _RotateMethod,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)

__all__ = [
    "_ContextParallel",
    "_ContextParallelOptions",
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_RotateMethod",
    "_context_parallel_shard",
    "_cp_options",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "context_parallel",
    "context_parallel_unshard",
    "set_rotate_method",
]

__getattr__ = _attention.__getattr__
