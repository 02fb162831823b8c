"""Saving and loading programs: one JSON file of ops, layouts and names of tensors. Loading executes nothing from the file."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise.comm import coord_of
from shardwise.compile.encoding import (
    Meshes,
    cannot,
    decode_spec,
    decode_target,
    decode_value,
    encode_spec,
    encode_target,
    encode_value,
)
from shardwise.compile.errors import CaptureError
from shardwise.compile.numbers import OptimizerNumbers
from shardwise.compile.owners import Find, Input, always, find_by_name
from shardwise.compile.program import Gradient, Output, Program
from shardwise.compile.signature import known_ids
from shardwise.torch_internals.pytree import tree_flatten, tree_unflatten
from shardwise.torch_internals.recording import empty_fake, new_fake_mode
from shardwise.torch_internals.subclass import storage_id

__all__ = ["load", "save"]

_FORMAT = "shardwise program 1"


def save(program: Program, path: str | Path) -> None:
    """Save the program of this rank to a file, which `load` reads; the tensors of modules and optimizers are not in it.

    Args:
        program: a program.
        path: the file. Programs of different ranks are different files.

    Raises:
        CaptureError: the program has values that no such file can hold, such as results of classes of one's own.
    """
    meshes = Meshes(program.mesh)
    constants = {}
    for number, i in enumerate(program.inputs):
        if i.name == "constant":
            constants[str(number)] = _encode_tensor(i.find([]))
    keys, structure = program.arguments
    said = {
        "format": _FORMAT,
        "coord": program.coord,
        "nodes": _encode_nodes(program.graph, meshes),
        "inputs": [[i.name, i.is_written] for i in program.inputs],
        "constants": constants,
        "streams": [[meshes.encode(mesh), count] for mesh, count in program.streams],
        "numbers": None if program.numbers is None else program.numbers.saved(),
        "outputs": [
            [o.number, encode_spec(o.spec, meshes), encode_value(o.constant)] for o in program.outputs
        ],
        "structure": _encode_structure(program.structure, len(program.outputs)),
        "gradients": [[g.name, g.number, encode_spec(g.spec, meshes)] for g in program.gradients],
        "arguments": [[_encode_key(k, meshes) for k in keys], _encode_structure(structure, len(keys))],
        "has_values": program.has_values,
        "passes": program.passes,
    }
    Path(path).write_text(json.dumps(said, separators=(",", ":")))


def load(
    path: str | Path,
    *,
    mesh: DeviceMesh | None = None,
    optimizer: Optimizer | None = None,
    modules: Sequence[nn.Module] = (),
) -> Program:
    """Load a program that `save` saved.

    Args:
        path: the file.
        mesh: the mesh, with the axes of the one that the program was captured on; this process has the same coord on it.
        optimizer: an optimizer like that of the capture, whose state is there: it has taken a step, or loaded one.
        modules: modules like those of the capture, whose tensors the program reads and writes, by name.

    Raises:
        CaptureError: the file is no program, or one for another coord, or a tensor that it names is not there.

    Nothing is communicated, and no code of the file is executed: ops are found by name among those of torch and shardwise.
    """
    said = json.loads(Path(path).read_text())
    if not isinstance(said, dict) or said.get("format") != _FORMAT:
        raise CaptureError(
            f"{path} is no program.", why=f"It does not begin with {_FORMAT!r}.", fix="program.save(path)"
        )
    meshes = Meshes(mesh)
    coord = tuple(said["coord"])
    here = () if mesh is None else coord_of(mesh) or ()
    if coord != here:
        raise CaptureError(
            f"{path} has the program of coord {coord}.",
            why=f"This process is at {here}, and has other blocks.",
            fix="Save and load a file for each coord.",
        )
    inputs = []
    for number, (name, is_written) in enumerate(said["inputs"]):
        held = said["constants"].get(str(number))
        find = always(_decode_tensor(held)) if held is not None else _find(name, optimizer, modules)
        inputs.append(Input(name, find, is_written))
    numbers = None
    if said["numbers"] is not None:
        if optimizer is None:
            raise CaptureError(
                f"{path} updates parameters.",
                why="Its optimizer is missing.",
                fix="load(path, optimizer=...)",
            )
        numbers = OptimizerNumbers.restored(optimizer, said["numbers"])
    keys, structure = said["arguments"]
    return Program(
        _decode_nodes(said["nodes"], meshes),
        mesh,
        coord,
        inputs,
        [(meshes.decode(names), count) for names, count in said["streams"]],
        numbers,
        [Output(n, decode_spec(s, meshes), decode_value(c, {})) for n, s, c in said["outputs"]],
        _decode_structure(said["structure"]),
        [
            Gradient(n, _find(n, optimizer, modules), k, decode_spec(s, meshes))
            for n, k, s in said["gradients"]
        ],
        ([_decode_key(k, meshes) for k in keys], _decode_structure(structure)),
        known_ids(optimizer, modules),
        said["has_values"],
        passes=said["passes"],
    )


def _find(name: str, optimizer: Optimizer | None, modules: Sequence[nn.Module]) -> Find:
    found = find_by_name(name, optimizer, modules)
    if found is None:
        raise CaptureError(
            f"The program has the tensor {name!r}.",
            why="Neither the optimizer nor the modules have a tensor of this name.",
            fix="load(path, mesh=..., optimizer=..., modules=[...]) with what the program was captured with",
        )
    return found


def _encode_tensor(x: Tensor) -> Any:
    plain = x.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return {
        "dtype": encode_value(x.dtype),
        "shape": [*x.shape],
        "device": str(x.device),
        "data": base64.b64encode(data).decode(),
    }


def _decode_tensor(said: Any) -> Tensor:
    data = bytearray(base64.b64decode(said["data"]))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(decode_value(said["dtype"], {})).reshape(said["shape"]).to(said["device"])


def _encode_structure(structure: Any, leaves: int) -> Any:
    return encode_value(tree_unflatten(range(leaves), structure))


def _decode_structure(said: Any) -> Any:
    return tree_flatten(decode_value(said, {}))[1]


def _encode_key(key: Any, meshes: Meshes) -> Any:
    if len(key) == 2:
        return {"value": encode_value(key[1])}
    kind, requires_grad, is_leaf, grad, same, me = key
    if me:
        raise cannot("an argument that is a parameter")
    return [_encode_kind(kind, meshes), requires_grad, is_leaf, _encode_kind(grad, meshes), same]


def _decode_key(said: Any, meshes: Meshes) -> Any:
    if isinstance(said, dict):
        value = decode_value(said["value"], {})
        return (type(value), value)
    kind, requires_grad, is_leaf, grad, same = said
    return (_decode_kind(kind, meshes), requires_grad, is_leaf, _decode_kind(grad, meshes), same, 0)


def _encode_kind(kind: Any, meshes: Meshes) -> Any:
    if kind is None:
        return None
    if not isinstance(kind, tuple):
        return {"spec": encode_spec(kind, meshes)}
    if kind[0] not in (Tensor, nn.Parameter):
        raise cannot(f"an argument that is a {kind[0].__name__}")
    return {"plain": [kind[0].__name__, encode_value(kind[1:])]}


def _decode_kind(said: Any, meshes: Meshes) -> Any:
    if said is None:
        return None
    if "spec" in said:
        return decode_spec(said["spec"], meshes)
    name, rest = said["plain"]
    return ({"Tensor": Tensor, "Parameter": nn.Parameter}[name], *decode_value(rest, {}))


def _encode_nodes(graph: fx.Graph, meshes: Meshes) -> list[Any]:
    memory: dict[int, int] = {}
    found = []
    for node in graph.nodes:
        said: dict[str, Any] = {"name": node.name, "op": node.op, "args": encode_value(node.args)}
        if node.op == "call_function":
            said |= {"target": encode_target(node.target, meshes), "kwargs": encode_value(dict(node.kwargs))}
        said["meta"] = {k: node.meta[k] for k in ("section", "line", "name") if k in node.meta}
        said["val"] = _encode_fake(node.meta.get("val"), memory)
        found.append(said)
    return found


def _encode_fake(value: Any, memory: dict[int, int]) -> Any:
    """The shape of a value, and the number of the memory that it is in."""
    if isinstance(value, list | tuple):
        return [_encode_fake(v, memory) for v in value]
    if not isinstance(value, Tensor):
        return None
    number = memory.setdefault(storage_id(value), len(memory))
    size = value.untyped_storage().nbytes()
    where = [[*value.shape], [*value.stride()], int(value.storage_offset())]
    return {
        "dtype": encode_value(value.dtype),
        "device": str(value.device),
        "at": where,
        "memory": [number, size],
    }


def _decode_nodes(said: list[Any], meshes: Meshes) -> fx.Graph:
    graph, mode = fx.Graph(), new_fake_mode()
    nodes: dict[str, fx.Node] = {}
    memory: dict[int, Tensor] = {}
    for n in said:
        args = decode_value(n["args"], nodes)
        match n["op"]:
            case "placeholder":
                node = graph.placeholder(n["name"])
            case "output":
                node = graph.output(args[0])
            case "call_function":
                target = decode_target(n["target"], meshes)
                node = graph.create_node(
                    "call_function", target, args, decode_value(n["kwargs"], nodes), n["name"]
                )
            case other:
                raise CaptureError(
                    f"The file has a node {other!r}.", why="Programs have none.", fix="Save it again."
                )
        node.meta |= n["meta"]
        if n["op"] != "output":
            node.meta["val"] = _decode_fake(n["val"], mode, memory)
        nodes[n["name"]] = node
    return graph


def _decode_fake(said: Any, mode: Any, memory: dict[int, Tensor]) -> Any:
    if isinstance(said, list):
        return [_decode_fake(v, mode, memory) for v in said]
    if said is None:
        return None
    number, size = said["memory"]
    on = None if said["device"] == "meta" else mode
    dtype = decode_value(said["dtype"], {})
    if number not in memory:
        like = torch.empty(0, dtype=torch.uint8, device=said["device"])
        memory[number] = empty_fake(on, (size,), (1,), like)
    shape, stride, offset = said["at"]
    whole = memory[number][: size // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(shape, stride, offset)
