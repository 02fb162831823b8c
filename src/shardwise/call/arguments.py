"""The arguments of a call as a tree: lists, tuples and dicts with tensors among their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["map_leaves", "map_tensors", "replace_tensors", "tensors_in", "with_tensors"]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with every leaf replaced by `fn(leaf)`.

    >>> map_leaves(lambda n: n + 1, {"a": [1, (2, 3)]})
    {'a': [2, (3, 4)]}
    """
    if isinstance(tree, list | tuple):
        items = [map_leaves(fn, v) for v in tree]
        # decompositions return named tuples, which take their fields one by one
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {k: map_leaves(fn, v) for k, v in tree.items()}
    return fn(tree)


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with every tensor replaced by `fn(tensor)`."""
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def replace_tensors(tree: Any, by_id: Mapping[int, Any]) -> Any:
    """The tree with those tensors replaced that `by_id` has a replacement for, under their id."""
    return map_tensors(lambda t: by_id.get(id(t), t), tree)


def with_tensors(tree: Any, tensors: Iterator[Any]) -> Any:
    """The tree with each tensor replaced by the next of `tensors`."""
    return map_leaves(lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, tree)


def tensors_in(trees: Iterable[Any]) -> list[Tensor]:
    """The tensors among some arguments, also within lists, in order."""
    out: list[Tensor] = []
    for tree in trees:
        if isinstance(tree, Tensor):
            out.append(tree)
        elif isinstance(tree, list | tuple):
            out += tensors_in(tree)
    return out
