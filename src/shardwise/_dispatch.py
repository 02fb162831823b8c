"""Where torch keeps the dispatch of ops."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_dispatch",
    "OpDispatcher as_strided_handler found_inf_reduce_handler is_pinned_handler is_same_size_handler",
    why="`shardwise.dispatch` is a function with a table of routes, not an object.",
    fix="shardwise.describe(model) and `with shardwise.debug.CommDebugMode()` show what runs.",
)
