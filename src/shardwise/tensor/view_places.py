"""Where views begin in the memory of the tensors that they are views of."""

from __future__ import annotations

from typing import Any

from shardwise.comm import PerRank
from shardwise.torch_internals.subclass import storage_id, view_base, view_offset

__all__ = ["REPLACED", "known_offset", "memory_offset", "memory_root"]

_UNKNOWN_PLACE = """The place of the DTensor {spec} in memory was asked for.
  why: It is a view of a tensor whose memory was replaced (x.data = y, x.set_(y)) or whose shape was changed in inference mode, \
so where it begins in the former memory is not known.
  fix: create the view after that, or use indices in place of strides and offsets."""

REPLACED = "_shardwise_replaced"
"""The attribute of tensors whose memory was replaced while there were views of it."""


def memory_root(x: Any) -> Any:
    """The tensor that `x` is a view of, or None. Raises if `x` has the memory that this tensor had before it was replaced."""
    root = view_base(x)
    if root is not None and _has_former_memory(x, root):
        raise RuntimeError(_UNKNOWN_PLACE.format(spec=x._spec))
    return root


def memory_offset(x: Any) -> int:
    """Where `x` begins in the memory of the tensor that it is a view of. Raises if that is not known."""
    found = known_offset(x)
    if found is None:
        raise RuntimeError(_UNKNOWN_PLACE.format(spec=x._spec))
    return found


def known_offset(x: Any) -> int | None:
    """Where `x` begins in the memory of the tensor that it is a view of; None if that is not known."""
    root = view_base(x)
    if root is None:
        return 0
    return None if _has_former_memory(x, root) else view_offset(x)


def _has_former_memory(x: Any, root: Any) -> bool:
    return bool(root.__dict__.get(REPLACED)) and _storage_of(x) != _storage_of(root)


def _storage_of(x: Any) -> int:
    """The storage of the block that a tensor is computed from, on the first rank if there are several."""
    while x._source is not None:
        x = x._source.base
    block = x._local_tensor
    return storage_id(block.ranks[0] if isinstance(block, PerRank) else block)
