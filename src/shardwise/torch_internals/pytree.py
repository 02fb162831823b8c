"""Nested structures of tensors, as torch flattens them: lists, tuples, dicts, named tuples, registered classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree

__all__ = ["flatten"]


def flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of a nested structure, and a function that rebuilds it from other leaves.

    >>> leaves, rebuild = flatten({"a": [1, 2], "b": 3})
    >>> leaves, rebuild([4, 5, 6])
    ([1, 2, 3], {'a': [4, 5], 'b': 6})
    """
    leaves, structure = _pytree.tree_flatten(tree)
    return leaves, lambda new: _pytree.tree_unflatten(list(new), structure)
