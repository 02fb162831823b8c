"""Nested structures of tensors, as torch flattens them: lists, tuples, dicts, named tuples, registered classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree

__all__ = ["flatten", "tree_flatten", "tree_unflatten"]


def flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of a nested structure, and a function that rebuilds it from other leaves.

    >>> leaves, rebuild = flatten({"a": [1, 2], "b": 3})
    >>> leaves, rebuild([4, 5, 6])
    ([1, 2, 3], {'a': [4, 5], 'b': 6})
    """
    leaves, structure = _pytree.tree_flatten(tree)
    return leaves, lambda new: _pytree.tree_unflatten(list(new), structure)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a nested structure, and its structure, which compares by value.

    >>> leaves, structure = tree_flatten({"a": [1, 2]})
    >>> leaves, tree_unflatten([3, 4], structure)
    ([1, 2], {'a': [3, 4]})
    """
    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """The nested structure of `tree_flatten` with other leaves."""
    return _pytree.tree_unflatten(list(leaves), structure)
