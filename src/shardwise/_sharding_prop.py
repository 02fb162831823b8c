"""Where torch keeps the propagation of shardings; here routes and rules decide, in `shardwise.dispatch`."""

__all__ = ["ShardingPropagator"]


class ShardingPropagator:
    """The class of torch's propagator, for programs that import its name."""

    def __init__(self) -> None:
        raise RuntimeError(
            "ShardingPropagator was constructed.\n"
            "  why: Layouts of results follow from rules, so there is no object that propagates shardings.\n"
            "  fix: shardwise.register_sharding adds a rule for an op."
        )
