"""`DTensor._op_dispatcher`: the names of torch's dispatcher that programs read or set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from shardwise.call.schema import op_info
from shardwise.plan.settings import current_settings, forget_decisions, restore_settings
from shardwise.rules.table import REGISTERED
from shardwise.torch_internals.dispatcher import read_schema

__all__ = ["OpDispatcher"]


class _SchemaInfo(NamedTuple):
    """Which arguments of an op a rule of `register_sharding` may depend on, under torch's names."""

    static_argnum: int
    static_kwargkey: list[str] | None
    needs_pytree: bool = True


class _Rules:
    """Torch's registries of rules. Every op has one here: a row of the table, an inferred one, or the fallback."""

    def __contains__(self, op: Any) -> bool:
        return True

    def get(self, op: Any, default: Any = None) -> Any:
        """The rule that was registered for an op."""
        return REGISTERED.get(op_info(op).name, default)

    def pop(self, op: Any, default: Any = None) -> Any:
        """Forget the rule that was registered for an op, so that it has the built-in one, and return it."""
        rule = REGISTERED.pop(op_info(op).name, default)
        forget_decisions(plans=False)
        return rule

    def __getitem__(self, op: Any) -> Any:
        return self.get(op)

    def __setitem__(self, op: Any, rule: Any) -> NoReturn:
        raise NotImplementedError(
            f"A strategy of torch was assigned to {op}.\n"
            "  why: Ops have rules in place of strategies.\n"
            "  fix: shardwise.register_sharding(op) takes a function of the specs of a call."
        )


class _SchemaInfos:
    def __getitem__(self, op: Any) -> _SchemaInfo:
        static = [
            (i, a) for i, a in enumerate(read_schema(op).arguments) if a.type in ("int", "Optional[int]")
        ]
        keywords = [a.name for _, a in static if a.kwarg_only]
        return _SchemaInfo(static[0][0] if static else 100, keywords or None)


class _Propagator:
    """What programs read of torch's `ShardingPropagator`."""

    op_strategy_funcs = op_to_rules = op_single_dim_strategy_funcs = _Rules()
    op_to_schema_info = _SchemaInfos()

    def __getattr__(self, name: str) -> NoReturn:
        raise _absent(f"sharding_propagator.{name}")


class OpDispatcher:
    """What programs read and set of torch's `OpDispatcher`.

    >>> from shardwise import DTensor
    >>> DTensor._op_dispatcher._allow_implicit_replication
    False
    """

    sharding_propagator = _Propagator()

    @property
    def _allow_implicit_replication(self) -> bool:
        """Whether plain tensors beside DTensors count as replicated; assigning it is `policy(plain=...)` from here on."""
        return current_settings().plain == "replicate"

    @_allow_implicit_replication.setter
    def _allow_implicit_replication(self, value: bool) -> None:
        restore_settings(replace(current_settings(), plain="replicate" if value else "error"))

    def __getattr__(self, name: str) -> NoReturn:
        raise _absent(name)


def _absent(name: str) -> AttributeError:
    return AttributeError(
        f"DTensor._op_dispatcher.{name} was used.\n"
        "  why: `shardwise.dispatch` is a function with a table of routes, not an object.\n"
        "  fix: shardwise.register_sharding gives an op a rule; `with shardwise.debug.CommDebugMode()` shows what runs."
    )
