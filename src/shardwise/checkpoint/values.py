"""Plain values as JSON that reads back as the same values: nothing in it can be executed."""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointStateError, CorruptCheckpointError

__all__ = ["TAG", "children", "decode", "encode", "is_plain", "tensor_name"]

TAG = "$"
_SCALARS = (bool, int, float, str, type(None))
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


def encode(value: Any, path: str, keep_tensor: Callable[[Tensor, str], str]) -> Any:
    """A value as JSON; tensors are replaced by the name that `keep_tensor(tensor, path)` returns."""
    if isinstance(value, _SCALARS) and type(value) in _SCALARS:
        return value
    if isinstance(value, Tensor):
        return {TAG: "tensor", "name": keep_tensor(value, path)}
    if isinstance(value, np.generic) and isinstance(value.item(), _SCALARS):
        return value.item()
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, keep_tensor)
    if isinstance(value, list):
        return [encode(v, _join(path, i), keep_tensor) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {TAG: "tuple", "items": [encode(v, _join(path, i), keep_tensor) for i, v in enumerate(value)]}
    if isinstance(value, bytes):
        return {TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "name": str(value).removeprefix("torch.")}
    for kind in (int, float, str):  # subclasses, as enumerations of numbers have
        if isinstance(value, kind):
            return kind(value)
    raise CheckpointStateError(
        f"state[{path!r}] is {_article(type(value))} that cannot be saved.",
        why="A checkpoint has tensors and plain values (numbers, text, bytes, None, lists, tuples, dicts); nothing is pickled.",
        fix=f"Give {type(value).__name__} the methods state_dict() and load_state_dict(state) that use plain values, or save what it is made from.",
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, keep_tensor: Callable[[Tensor, str], str]) -> Any:
    plain = all(type(k) is str for k in value) and TAG not in value
    if plain and not isinstance(value, Counter):
        return {k: encode(v, _join(path, k), keep_tensor) for k, v in value.items()}
    for k in value:
        if not isinstance(k, str | int | float | bool | type(None) | tuple):
            raise CheckpointStateError(
                f"state[{path!r}] has the key {k!r}, which cannot be saved.",
                why="Keys are text, numbers, None or tuples of them.",
                fix="Use text as keys.",
            )
    kind = "counter" if isinstance(value, Counter) else "map"
    items = [[encode(k, path, keep_tensor), encode(v, _join(path, k), keep_tensor)] for k, v in value.items()]
    return {TAG: kind, "items": items}


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _article(kind: type) -> str:
    return f"a {kind.__module__}.{kind.__qualname__}"


def is_plain(value: Any) -> bool:
    """Whether a value has no tensors and no objects with a state of their own."""
    if isinstance(value, Mapping):
        return all(is_plain(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(is_plain(v) for v in value)
    return not isinstance(value, Tensor) and not hasattr(value, "state_dict")


def tensor_name(stored: Any) -> str | None:
    """The name of the tensor that a stored value stands for; None for other values."""
    if isinstance(stored, dict) and stored.get(TAG) == "tensor" and isinstance(stored.get("name"), str):
        return str(stored["name"])
    return None


def decode(stored: Any, tensor: Callable[[str], Any]) -> Any:
    """The value of JSON that `encode` wrote; tensors come from `tensor(name)`."""
    if isinstance(stored, list):
        return [decode(v, tensor) for v in stored]
    if not isinstance(stored, dict):
        return stored
    if TAG not in stored:
        return {k: decode(v, tensor) for k, v in stored.items()}
    try:
        return _decode_tagged(stored, tensor)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"The metadata has the value {str(stored)[:200]}.",
            why=f"It is none that a checkpoint can have ({type(error).__name__}: {error}).",
            fix="Load another checkpoint.",
        ) from error


def _decode_tagged(stored: dict[str, Any], tensor: Callable[[str], Any]) -> Any:
    match stored[TAG]:
        case "tensor":
            return tensor(str(stored["name"]))
        case "tuple":
            return tuple(decode(v, tensor) for v in stored["items"])
        case "map":
            return {decode(k, tensor): decode(v, tensor) for k, v in stored["items"]}
        case "counter":
            return Counter({decode(k, tensor): int(v) for k, v in stored["items"]})
        case "bytes":
            return base64.b64decode(stored["base64"], validate=True)
        case "dtype":
            return _DTYPES[stored["name"]]
    raise ValueError(f"unknown kind {stored[TAG]!r}")


def children(stored: Any) -> dict[Any, Any] | None:
    """The items of a stored mapping, or list, by key; None for other values."""
    if isinstance(stored, list):
        return dict(enumerate(stored))
    if not isinstance(stored, dict):
        return None
    if TAG not in stored:
        return dict(stored)
    if stored[TAG] in ("map", "counter"):
        return OrderedDict((decode(k, str), v) for k, v in stored["items"])
    return None
