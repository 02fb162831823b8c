"""Values in the graphs of `torch.compile`: classes whose instances are constants, and a stable text of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from torch._library import opaque_object
from torch.distributed.device_mesh import DeviceMesh

from shardwise.torch_internals.mesh import sibling_ranks
from shardwise.torch_internals.rank_queries import process_coordinate
from shardwise.torch_internals.releases import torch_release

__all__ = [
    "describe_by",
    "describe_constant",
    "graph_value",
    "live_mesh",
    "mesh_named",
    "name_mesh",
    "package_digest",
    "register_value",
    "stable_hash",
]

_texts: dict[type, Callable[[Any], str]] = {}
_values: dict[str, Any] = {}
_meshes: WeakValueDictionary[str, DeviceMesh] = WeakValueDictionary()


def register_value(cls: type, text: Callable[[Any], str] = repr) -> None:
    """Have `torch.compile` take the instances of a class as constants, which it compares by `==`.

    Args:
        cls: a class of immutable values, with `__eq__` and `__hash__`.
        text: describes an instance completely, and in the same way in every process.
    """
    _texts[cls] = text
    cls.__fx_repr__ = _fx_repr  # type: ignore[attr-defined]
    if torch_release() < (2, 14):
        if not opaque_object.is_opaque_type(cls):
            opaque_object.register_opaque_type(cls, typ="value")
    elif not opaque_object.is_custom_class(cls):  # type: ignore[attr-defined]
        # the same under the names of later releases
        opaque_object.register_custom_class(cls, typ="constant")  # type: ignore[attr-defined]


def name_mesh(mesh: DeviceMesh) -> str:
    """A name by which compiled code of this rank finds the mesh, in this process and in others.

    It has the place of this rank: programs differ between ranks, and ranks share the caches of compiled code on disk.
    """
    shape, at = tuple(mesh.shape), process_coordinate(mesh)
    name = f"mesh({mesh.device_type}, {mesh.mesh_dim_names}, {shape}, {sibling_ranks(mesh)}, at {at})"
    _meshes.pop(name, None)  # the last ones come last
    _meshes[name] = mesh
    return name


def mesh_named(name: str) -> DeviceMesh:
    """The mesh with this name."""
    return _meshes[name]


def live_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of this process that equals one which was restored from a cache, if there is one; the one that was named last.

    Others may be of a world that has ended, with this process in another place.
    """
    known = list(_meshes.values())[::-1]
    return next((m for m in known if m is mesh), next((m for m in known if m == mesh), mesh))


@cache
def package_digest() -> str:
    """A text that changes with the code of this package, so that compiled code of another version is not used."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stable_hash(*texts: str) -> str:
    """A hash that is the same in every process.

    >>> stable_hash("a") == stable_hash("a"), len(stable_hash("a"))
    (True, 32)
    """
    text = "\n".join((package_digest(), *texts))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def describe_by(cls: type, text: Callable[[Any], str]) -> None:
    """Say how instances of a class are described where they are constants of a call; they are compared by identity."""
    _texts[cls] = text


def _fx_repr(value: Any) -> tuple[str, dict[str, Any]]:
    """The expression by which the code of a graph refers to a value, and the names in it."""
    text = describe_constant(value)
    _values[text] = value
    return f"graph_value({text!r})", {"graph_value": graph_value}


def graph_value(text: str) -> Any:
    """The value that a graph refers to by its text."""
    return _values[text]


def describe_constant(value: Any) -> str:
    """A text of a constant, the same in every process that runs the program.

    >>> describe_constant([None, 2, {"a": (max,)}])
    "[None, 2, {'a': (builtins.max)}]"
    """
    text = _texts.get(type(value))
    if text is not None:
        return text(value)
    match value:
        case DeviceMesh():
            return name_mesh(value)
        case list():
            return f"[{', '.join(map(describe_constant, value))}]"
        case dict():
            return "{" + ", ".join(f"{k!r}: {describe_constant(v)}" for k, v in value.items()) + "}"
        case tuple():
            return f"({', '.join(map(describe_constant, value))})"
        case _ if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
