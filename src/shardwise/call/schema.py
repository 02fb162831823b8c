"""OpInfo: the facts about an op that follow from its schema."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from shardwise.torch_internals.dispatcher import Argument, Return, is_composite, read_schema

__all__ = ["OpInfo", "op_info"]

aten = torch.ops.aten

# Arguments that an op writes to although its schema does not declare it.
_UNDECLARED_WRITES: dict[Any, tuple[str, ...]] = dict.fromkeys(
    (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default),
    ("running_mean", "running_var"),
)


class OpInfo:
    """One op: its names, which arguments it writes to and returns, and its functional variant."""

    def __init__(self, func: Any) -> None:
        schema = read_schema(func)
        self.func = func
        self.qualified_name = schema.name
        """As torch writes it: `aten::add_`."""
        self.name = f"{schema.name.replace('::', '.')}.{schema.overload}"
        """As the rule table has it: `aten.add_.Tensor`."""
        self.arguments: tuple[Argument, ...] = schema.arguments
        self.returns: tuple[Return, ...] = schema.returns
        self.tags: frozenset[Any] = frozenset(func.tags)
        self.writes = any(a.writes for a in schema.arguments)
        """Whether it writes to an argument, by its schema."""
        undeclared = _UNDECLARED_WRITES.get(func, ())
        self.written = tuple(i for i, a in enumerate(schema.arguments) if a.writes or a.name in undeclared)
        """The arguments that it writes to, also those that its schema does not declare."""
        self.out_names = tuple(a.name for a in schema.arguments if a.is_out)
        self.tensor_arguments = tuple(i for i, a in enumerate(schema.arguments) if "Tensor" in a.type)
        first = schema.arguments[0] if schema.arguments else None
        aliases = first is not None and bool(first.alias) and not first.writes
        self.is_composite_view = aliases and is_composite(func)
        """Whether it runs as other ops, whose result may share the memory of its first argument: `reshape`, `contiguous`."""
        self.is_view = aliases and not self.is_composite_view
        """Whether its results share the memory of its first argument."""
        names = [a.name for a in schema.arguments if a.name in ("dropout_p", "dropout")]
        self.dropout_argument = names[0] if names else None
        self.returns_tensor = [r.type for r in schema.returns] == ["Tensor"]
        self.returns_written = any(r.writes for r in schema.returns)
        base = schema.name.replace("::", ".")
        if not self.writes:
            functional = base
        elif base.endswith("_") and not base.endswith("__"):
            functional = base[:-1]
        else:
            functional = base.replace(".__i", ".__") if ".__i" in base else ""
        self.rule_name = f"{functional}.{schema.overload}" if functional else ""
        """The op whose rule it has: an in-place op has that of its functional variant; "" if there is none."""

    @cached_property
    def returned(self) -> tuple[int, str] | None:
        """The position and name of the argument that the op writes to and returns; None if it returns a new tensor."""
        for r in self.returns:
            for i, a in enumerate(self.arguments):
                if r.writes and a.alias & r.alias:
                    return i, a.name
        return None

    @cached_property
    def functional(self) -> Any | None:
        """The op that returns what this one writes: `add` for `add_` and for `add.out`."""
        namespace, _, name = self.qualified_name.partition("::")
        in_place = name.endswith("_") and not name.endswith("__")
        packet = getattr(getattr(torch.ops, namespace), name[:-1] if in_place else name, None)
        wanted = [(a.name, a.type) for a in self.arguments if not a.is_out]
        for overload in () if packet is None else packet.overloads():
            other = op_info(getattr(packet, overload))
            if (
                not any(a.alias for a in other.arguments)
                and [(a.name, a.type) for a in other.arguments] == wanted
            ):
                return other.func
        return None

    @cached_property
    def out_of_place(self) -> Any:
        """The view op that returns a new tensor, of an op that changes its tensor's own shape: `squeeze` for `squeeze_`."""
        packet = getattr(aten, self.qualified_name.removeprefix("aten::")[:-1])
        wanted = [(a.name, a.type) for a in self.arguments]
        overloads = (op_info(getattr(packet, o)) for o in packet.overloads())
        return next(o.func for o in overloads if [(a.name, a.type) for a in o.arguments] == wanted)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with defaults."""
        named = {a.name: a.default for a in self.arguments}
        named.update(zip(named, args, strict=False))
        named.update(kwargs)
        return named

    def one_at_a_time(self, args: tuple[Any, ...]) -> list[list[Any]]:
        """The arguments of an op that writes to a list, for one element after the other; none for other ops and single elements."""
        first = self.arguments[0]
        if not first.type.startswith("List") or not first.writes or len(args[0]) < 2:
            return []
        lists = [
            isinstance(a, list | tuple) or arg.name == "scalars"
            for a, arg in zip(args, self.arguments, strict=False)
        ]
        return [
            [a[i : i + 1] if many else a for a, many in zip(args, lists, strict=True)]
            for i in range(len(args[0]))
        ]

    def returned_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument of a call that the op writes to and returns, or None."""
        if self.returned is None:
            return None
        i, name = self.returned
        return args[i] if i < len(args) else kwargs.get(name)


_infos: dict[int, OpInfo] = {}  # by the op's id: ops hash slowly, and an OpInfo keeps its op alive


def op_info(func: Any) -> OpInfo:
    """The `OpInfo` of an op.

    >>> info = op_info(torch.ops.aten.add_.Tensor)
    >>> info.name, info.rule_name, info.writes, info.functional
    ('aten.add_.Tensor', 'aten.add.Tensor', True, <OpOverload(op='aten.add', overload='Tensor')>)
    """
    info = _infos.get(id(func))
    if info is None:
        info = _infos[id(func)] = OpInfo(func)
    return info
