"""The modules that were called, with their collectives and ops, as text and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.debug.module_calls import GLOBAL, ModuleInfo
from shardwise.tensor.dtensor import DTensor

__all__ = ["Operation", "table", "tree"]

Counts = Mapping[str, Mapping[str, Mapping[Any, int]]]
Operations = Mapping[str, Sequence["Operation"]]

_TRIVIAL = frozenset({"detach", "t", "view", "_to_copy", "as_strided", "transpose", "alias", "_unsafe_view"})
"""Ops that compute nothing: they are shown from noise level 3 on."""


@dataclass(frozen=True)
class Operation:
    """One call of an op: its name, the direction, and of its DTensors the shapes, placements and mesh."""

    name: str
    direction: str
    shapes: tuple[Any, ...] = ()
    placements: tuple[Any, ...] = ()
    mesh: Any = None

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], direction: str) -> Operation:
        """The call of an op with these arguments."""
        flat = [x for a in args for x in (a if isinstance(a, list | tuple) else (a,))]
        found = [x for x in flat if isinstance(x, Tensor)]
        if not any(isinstance(x, DTensor) for x in found):
            return cls(str(func), direction)
        placed = [x for x in found if isinstance(x, DTensor)]
        shapes = tuple(x.shape for x in placed)
        return cls(str(func), direction, shapes, tuple(x.placements for x in placed), placed[0].device_mesh)

    def is_shown(self, noise_level: int) -> bool:
        """Whether the call is shown: from 1 on with DTensors, from 2 on others, from 3 on those that compute nothing."""
        if noise_level < 3 and self.name.split(".")[1:2] and self.name.split(".")[1] in _TRIVIAL:
            return False
        return noise_level > (0 if self.shapes else 1)


def _depth(name: str) -> int:
    return 0 if name == GLOBAL else name.count(".") + 1


def table(modules: Mapping[str, ModuleInfo], counts: Counts, operations: Operations, noise_level: int) -> str:
    """The text of `CommDebugMode.generate_comm_debug_tracing_table`."""
    lines = []
    for name, module in modules.items():
        indent = "    " * _depth(name)
        lines.append(f"{indent}{name}")
        if noise_level > 0 and module.module_type:
            lines.append(f"{indent}*module type: class '{module.module_type}'")
        if noise_level > 0 and module.parameters:
            lines.append(f"{indent}*Parameter List")
            lines += [f"{indent} *{p}: {module.placements.get(p, 'plain')}" for p in module.parameters]
        for direction in ("forward", "backward"):
            collectives = counts.get(name, {}).get(direction, {})
            shown = [
                o for o in operations.get(name, ()) if o.direction == direction and o.is_shown(noise_level)
            ]
            if not collectives and not shown:
                continue
            lines.append(f"{indent}  {direction.upper()} PASS")
            lines += [f"{indent}    *{op}: {n}" for op, n in collectives.items()]
            for o in shown:
                lines.append(f"{indent}    **{o.name}")
                if o.shapes:
                    lines.append(f"{indent}      shape: {list(o.shapes)}")
                    lines.append(f"{indent}      sharding: {list(o.placements)}")
                    lines.append(f"{indent}      device mesh: {o.mesh}")
    return "\n".join(lines) + "\n"


def tree(
    modules: Mapping[str, ModuleInfo], counts: Counts, operations: Operations, noise_level: int
) -> dict[str, Any]:
    """The value that `CommDebugMode.generate_json_dump` writes: one object per module, inside that of its parent."""
    nodes: dict[str, dict[str, Any]] = {}
    for name, module in modules.items():
        node: dict[str, Any] = {
            "fqn": name,
            "module_type": f"class '{module.module_type}'" if module.module_type else "",
            "parameters": [[p, str(module.placements.get(p, "plain"))] for p in module.parameters],
            "children": [],
        }
        for direction in ("forward", "backward"):
            ops = counts.get(name, {}).get(direction, {})
            node[f"collectives_{direction}"] = [[str(op), n] for op, n in ops.items()]
        for direction in ("forward", "backward"):
            node[f"operations_{direction}"] = [
                _json(o)
                for o in operations.get(name, ())
                if o.direction == direction and o.is_shown(noise_level)
            ]
        nodes[name] = node
        if name != GLOBAL:
            nodes[_parent(name, nodes)]["children"].append(node)
    return nodes[GLOBAL]


def _parent(name: str, known: Mapping[str, Any]) -> str:
    """The closest module around another one that was called."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return GLOBAL


def _json(o: Operation) -> dict[str, Any]:
    return {
        "name": o.name,
        "input_shape": list(map(str, o.shapes)),
        "input_sharding": list(map(str, o.placements)),
        "device_mesh": "" if o.mesh is None else str(o.mesh),
        "is_bw": o.direction == "backward",
    }
