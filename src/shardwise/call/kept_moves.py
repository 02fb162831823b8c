"""Blocks that an op moved, kept for the next ops that need the same tensor in the same layout: q, k and v, say.

Whether a block is still here must be the same on every rank, or some would wait for a collective that others leave out. So a
tensor is recognized by what all ranks see alike: the tensor object or the one that it is a view of, its spec, and the writes
to it. Nothing depends on when a rank frees memory: a block whose tensor is gone is dropped, and its slot stays taken.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from shardwise.call.view_scatter import COMPUTED
from shardwise.call.writes import Memory, memory_of, shares_memory
from shardwise.comm import PerRank
from shardwise.comm.simulate import at_simulation_end
from shardwise.layout import Layout, Spec, is_dense, largest_block
from shardwise.plan import Plan
from shardwise.plan.settings import current_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.subclass import version, view_base
from shardwise.torch_internals.tracing import is_recorded

__all__ = ["forget_moves", "move_once", "unshared"]

_MOST = 2  # an activation, and a weight that is gathered between two uses of it


class _Token:
    """The identity of a tensor object, in its `__dict__`; a weak reference to the tensor itself would forbid `swap_tensors`.

    `owner` is the id of the object, because a copy gets the `__dict__` of the original.
    """

    __slots__ = ("__weakref__", "owner")

    def __init__(self, owner: int) -> None:
        self.owner = owner


_NAME = "_shardwise_token"


def _token_of(x: DTensor) -> _Token:
    known = x.__dict__.get(_NAME)
    if not isinstance(known, _Token) or known.owner != id(x):
        known = x.__dict__[_NAME] = _Token(id(x))
    return known


class _Origin(NamedTuple):
    """What a tensor is, as all ranks see it: the elements of `root` in the order of `spec`; and the blocks of both."""

    root: DTensor
    spec: Spec
    blocks: tuple[Tensor, Tensor]


class _Kept:
    """A moved block, and the tensor that it was moved from."""

    __slots__ = ("block", "blocks", "memory", "of_root", "spec", "state", "target", "token", "version")

    def __init__(self, origin: _Origin, target: Layout, block: Tensor) -> None:
        root = origin.root
        self.spec, self.target, self.of_root = origin.spec, target, root._spec
        self.block: Tensor | None = block
        self.memory: Memory | None = memory_of(origin.blocks[0])
        self.blocks: tuple[Tensor, ...] = origin.blocks
        self.state, self.version = self.memory.state(origin.blocks), version(root)
        self.token = weakref.ref(_token_of(root), self.release)

    def release(self, _: Any = None) -> None:
        """Free the memory."""
        self.block = self.memory = None
        self.blocks = ()

    def find(self, origin: _Origin, target: Layout) -> Tensor | None:
        """The block, if it is that of a tensor in a layout and nothing was written since."""
        root, memory = origin.root, self.memory
        if self.token() is not _token_of(root) or memory is None or self.target is not target:
            return None
        if self.spec is not origin.spec or self.of_root is not root._spec or self.version != version(root):
            return None
        if not shares_memory(memory.block, origin.blocks[0]) or memory.state(self.blocks) != self.state:
            return None
        if not _is_unwritten(origin, self.blocks):
            return None
        return self.block


class _Slots(threading.local):
    """The blocks that a thread keeps, the one that was used last at the end."""

    def __init__(self) -> None:
        self.kept: list[_Kept] = []


_slots = _Slots()


def forget_moves() -> None:
    """Keep no moved blocks any longer."""
    while _slots.kept:
        _slots.kept.pop().release()


at_simulation_end(forget_moves)


def move_once(t: Tensor, plan: Plan, move: Callable[[], Tensor]) -> Tensor:
    """The block of an operand after a plan: that of an earlier op if it is kept, else what `move` returns.

    The caller must not write to it, nor return a tensor that shares its memory.
    """
    size = largest_block(plan.target) * t.dtype.itemsize
    origin = _origin(t) if plan.collectives and size <= current_settings().reuse else None
    if origin is None:
        return move()
    kept = _slots.kept
    for i, one in enumerate(kept):
        if (block := one.find(origin, plan.target)) is not None:
            kept.append(kept.pop(i))
            return block
    while len(kept) >= _MOST:
        kept.pop(0).release()  # before the next one takes memory
    block = move()
    kept.append(_Kept(origin, plan.target, block))
    return block


def _origin(t: Tensor) -> _Origin | None:
    """What a tensor is; None if that cannot be told, or if writes to it are not counted."""
    if not isinstance(t, DTensor) or t.is_inference() or t.dtype.is_complex:
        return None
    above = view_base(t)
    root = t if above is None else above
    if not isinstance(root, DTensor) or root.dtype is not t.dtype:
        return None
    # shape and strides tell how the elements of a view are arranged only if it has them all
    if root is not t and not (root.numel() == t.numel() and _is_dense(t) and _is_dense(root)):
        return None
    block, whole = _memory(t), _memory(root)
    if block is None or whole is None or not _is_plain(block) or not shares_memory(block, whole):
        return None
    return _Origin(root, t._spec, (block, whole))


def _is_unwritten(origin: _Origin, known: Sequence[Tensor]) -> bool:
    """Whether the block of a view, which counts versions of its own, is one whose versions are known, or new."""
    block = origin.blocks[0]
    if any(block is b for b in known):
        return True
    return not any(version(b) for b in (block.ranks if isinstance(block, PerRank) else (block,)))


def _is_plain(block: Tensor) -> bool:
    """Whether a block has values, and ops on it are not recorded."""
    blocks = block.ranks if isinstance(block, PerRank) else (block,)
    return all(type(b) in (Tensor, Parameter) and not is_recorded(b) for b in blocks)


def _memory(t: DTensor) -> Tensor | None:
    """The block whose memory a tensor is computed from; None for a tensor whose values differ from those in memory."""
    source = t._source
    block: Tensor = t._local_tensor if source is None else source.roots[0]
    while source is not None:
        if source.func in COMPUTED:
            return None
        source = source.base._source
    return block


def _is_dense(t: DTensor) -> bool:
    return t._spec.stride is not None and is_dense(t._spec.shape, t._spec.stride)


def unshared(result: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """A result that shares no memory with blocks: on each rank where it does, a copy."""
    if isinstance(result, PerRank):
        each = {
            r: unshared(b, [x.of_rank(r) if isinstance(x, PerRank) else x for x in blocks])
            for r, b in result._blocks.items()
        }
        return PerRank(each)
    return result.clone() if any(shares_memory(result, b) for b in blocks) else result
