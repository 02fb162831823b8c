"""Where torch keeps the propagation of shardings; here routes and rules decide, in `shardwise.dispatch`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn

from shardwise._absent import absent

__all__ = ["ShardingPropagator"]

_WHY = "Layouts of results follow from rules, so there is no object that propagates shardings."
_FIX = "shardwise.register_sharding(op) adds a rule."


class ShardingPropagator:
    """What torch's test classes with a thread per rank set a lock of; there is no such object."""

    _fake_mode_lock: ClassVar[AbstractContextManager[Any]] = nullcontext()

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"shardwise._sharding_prop.ShardingPropagator was used.\n  why: {_WHY}\n  fix: {_FIX}"
        )


__getattr__ = absent(
    "_sharding_prop",
    "_format_unbacked_hinting_log _get_expected_num_tensor_outputs _length LocalLRUCache "
    "_propagate_use_strided_shard_flag _select_min_cost_strategy _select_min_redistribute_cost "
    "_validate_tensor_meta_count",
    why=_WHY,
    fix=_FIX,
)
