"""The parts of a program as JSON: constants, ops, steps of plans, layouts. Nothing that is read is executed as code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, coord_of
from shardwise.compile.errors import CaptureError
from shardwise.compile.targets import GETITEM, OWN_OPS, STRIDED, Begin, Finish, Move, MoveMany
from shardwise.layout import Axes, Layout, Spec, parse_layout
from shardwise.plan import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    GroupedStep,
    Identity,
    ReduceScatter,
    Slice,
    Step,
)
from shardwise.plan.exchange import Extent
from shardwise.plan.grouped import Member
from shardwise.plan.step import Permute
from shardwise.torch_internals.dispatcher import find_op, is_op

__all__ = [
    "Meshes",
    "cannot",
    "decode_spec",
    "decode_target",
    "decode_value",
    "encode_spec",
    "encode_target",
    "encode_value",
]

_STEPS: dict[str, type[Step]] = {
    c.__name__: c for c in (AllGather, AllReduce, AllToAll, Exchange, Identity, Permute, ReduceScatter, Slice)
}
_CALLS: dict[str, Callable[..., Any]] = {"getitem": GETITEM, "strided": STRIDED}
_NAMED = ("dtype", "layout", "memory_format")
_OPS = frozenset({"aten", "prims", "shardwise", "_c10d_functional"})
"""The namespaces of ops that a program may have."""


def cannot(what: str) -> CaptureError:
    """The error of a program that has something that no file can hold."""
    return CaptureError(
        f"A program with {what} cannot be saved.",
        why="A file has ops, layouts, numbers and texts only, so that loading it runs no code.",
        fix="Capture it again where it is needed.",
    )


class Meshes:
    """The meshes of a program by the names of their axes, which are parts of one."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.root = mesh

    def encode(self, mesh: DeviceMesh) -> list[str]:
        """The names of the axes of a mesh."""
        names = list(mesh.mesh_dim_names or ())
        if not names or (self.root is not None and self.decode(names) != mesh):
            raise cannot("a mesh that is no part of the program's mesh by the names of its axes")
        return names

    def decode(self, names: Sequence[str]) -> DeviceMesh:
        """The mesh with these axes."""
        if self.root is None:
            raise CaptureError(
                "The program has a mesh.", why="Its collectives run on one.", fix="load(path, mesh=mesh)"
            )
        own = tuple(self.root.mesh_dim_names or ())
        return self.root if tuple(names) == own else self.root[tuple(names)]


def encode_value(value: Any) -> Any:
    """A constant, or a nested list of constants and nodes, as JSON."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [encode_value(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [encode_value(v) for v in value]}
    if type(value) is dict:
        return {"dict": [[encode_value(k), encode_value(v)] for k, v in value.items()]}
    for kind in _NAMED:
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise cannot(f"a {type(value).__name__}")


def decode_value(said: Any, nodes: dict[str, fx.Node]) -> Any:
    """What `encode_value` encoded."""
    if isinstance(said, list):
        return [decode_value(v, nodes) for v in said]
    if not isinstance(said, dict):
        return said
    ((kind, content),) = said.items()
    match kind:
        case "float":
            return float.fromhex(content)
        case "node":
            return nodes[content]
        case "tuple":
            return tuple(decode_value(v, nodes) for v in content)
        case "dict":
            return {decode_value(k, nodes): decode_value(v, nodes) for k, v in content}
        case "device":
            return torch.device(content)
        case "dtype" | "layout" | "memory_format":
            found = getattr(torch, content)
            if isinstance(found, getattr(torch, kind)):
                return found
    raise _unreadable(said)


def _unreadable(said: Any) -> CaptureError:
    return CaptureError(
        f"The file has {said!r}.",
        why="This is nothing that programs consist of.",
        fix="Save the program again with this release of shardwise.",
    )


# targets -------------------------------------------------------------------------------------------------------------


def encode_target(target: Any, meshes: Meshes) -> Any:
    """What a node calls, as JSON."""
    match target:
        case Begin(move=move):
            return {"begin": encode_target(move, meshes)}
        case Finish(move=move):
            return {"finish": encode_target(move, meshes)}
        case Move(step, mesh, _, dtype):
            return {"move": _encode_step(step), "mesh": meshes.encode(mesh), "dtypes": [encode_value(dtype)]}
        case MoveMany(grouped, mesh, _, dtypes):
            said = {
                "kind": grouped.kind,
                "axes": [*grouped.axes],
                "op": grouped.op,
                "sizes": [*grouped.itemsizes],
            }
            said["members"] = [[m.tensor, _encode_step(m.step)] for m in grouped.members]
            return {"moves": said, "mesh": meshes.encode(mesh), "dtypes": [encode_value(d) for d in dtypes]}
    for name, call in _CALLS.items():
        if target is call:
            return {"call": name}
    if is_op(target) and target.namespace in _OPS:
        return {"op": str(target)}
    raise cannot(f"a call of {target}")


def decode_target(said: Any, meshes: Meshes) -> Any:
    """What `encode_target` encoded, for this rank."""
    match said:
        case {"begin": inner}:
            return Begin(decode_target(inner, meshes))
        case {"finish": inner}:
            return Finish(decode_target(inner, meshes))
        case {"move": step, "mesh": names, "dtypes": [dtype]}:
            mesh = meshes.decode(names)
            return Move(
                _decode_step(step, axes_of(mesh)), mesh, coord_of(mesh) or (), decode_value(dtype, {})
            )
        case {"moves": many, "mesh": names, "dtypes": dtypes}:
            mesh = meshes.decode(names)
            members = tuple(Member(i, _decode_step(s, axes_of(mesh))) for i, s in many["members"])
            step = GroupedStep(many["kind"], tuple(many["axes"]), many["op"], members, tuple(many["sizes"]))
            return MoveMany(step, mesh, coord_of(mesh) or (), tuple(decode_value(d, {}) for d in dtypes))
        case {"call": name} if name in _CALLS:
            return _CALLS[name]
        case {"op": name} if name in OWN_OPS:
            return OWN_OPS[name]
        case {"op": name}:
            return _op(name)
    raise _unreadable(said)


def _op(name: str) -> Any:
    space, op, overload = name.split(".")
    found = find_op(space, op, overload) if space in _OPS else None
    if found is None:
        raise _unreadable(name)
    return found


def _encode_step(step: Step) -> Any:
    said: dict[str, Any] = {
        "step": type(step).__name__,
        "source": str(step.source),
        "target": str(step.target),
    }
    said["axes"] = [*step.axes]
    if isinstance(step, Exchange):
        said |= {"dim": step.dim, "owned": step.owned, "wanted": step.wanted}
        said["extents"] = step.extents
    return said


def _decode_step(said: Any, axes: Axes) -> Step:
    kind = _STEPS[said["step"]]
    ends = (_layout(said["source"], axes), _layout(said["target"], axes), tuple(said["axes"]))
    if kind is not Exchange:
        return kind(*ends)
    owned, wanted = (_tuples(said[side]) for side in ("owned", "wanted"))
    return Exchange(*ends, said["dim"], owned, wanted, tuple(Extent(*_tuples(e)) for e in said["extents"]))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _layout(text: str, axes: Axes) -> Layout:
    return parse_layout(text, axes)[0]


def encode_spec(spec: Spec | None, meshes: Meshes) -> Any:
    """The spec of a DTensor as JSON."""
    if spec is None:
        return None
    if spec.units:
        raise cannot(f"a tensor that is {spec.placements}")
    said = {"mesh": meshes.encode(spec.mesh), "layout": str(spec.layout), "dtype": encode_value(spec.dtype)}
    return said | {"stride": None if spec.stride is None else [*spec.stride]}


def decode_spec(said: Any, meshes: Meshes) -> Spec | None:
    """What `encode_spec` encoded."""
    if said is None:
        return None
    mesh = meshes.decode(said["mesh"])
    layout = _layout(said["layout"], axes_of(mesh))
    stride = None if said["stride"] is None else tuple(said["stride"])
    return Spec(mesh, layout, decode_value(said["dtype"], {}), torch.Size(layout.shape), stride)
