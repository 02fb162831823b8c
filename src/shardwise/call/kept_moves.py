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

__all__ = ["forget_moves", "keep_lineage", "move_once", "unshared"]

_MOST = 16  # so that finding one stays quick; how much memory they take is `policy(reuse=...)`


class _Token:
    """The identity of a tensor object, in its `__dict__`; a weak reference to the tensor itself would forbid `swap_tensors`.

    `owner` is the id of the object, because a copy gets the `__dict__` of the original.
    """

    __slots__ = ("__weakref__", "owner")

    def __init__(self, owner: int) -> None:
        self.owner = owner


class _Lineage(NamedTuple):
    """What a detached tensor was detached from: all elements of the tensor of a token, which has the spec `of_root`."""

    owner: int
    token: _Token
    of_root: Spec


_NAME, _LINEAGE = "_shardwise_token", "_shardwise_lineage"


def _lineage_of(x: DTensor) -> tuple[_Token, Spec]:
    """The token of the tensor that has the memory of `x` as all ranks see it, and its spec."""
    known = x.__dict__.get(_LINEAGE)
    if isinstance(known, _Lineage) and known.owner == id(x):
        return known.token, known.of_root
    token = x.__dict__.get(_NAME)
    if not isinstance(token, _Token) or token.owner != id(x):
        token = x.__dict__[_NAME] = _Token(id(x))
    return token, x._spec


def keep_lineage(detached: DTensor, x: DTensor) -> None:
    """Let a detached tensor be recognized as the one that it is detached from, with which it shares its versions.

    Activation checkpointing detaches what autograd saves, once for each consumer, and drops the tensor itself.
    """
    if (root := _root_of(x)) is not None:
        detached.__dict__[_LINEAGE] = _Lineage(id(detached), *_lineage_of(root))


class _Origin(NamedTuple):
    """What a tensor is, as all ranks see it: the elements of `root` in the order of `spec`; and the blocks of both."""

    root: DTensor
    spec: Spec
    blocks: tuple[Tensor, Tensor]


class _Kept:
    """A moved block of so many bytes, and the tensor that it was moved from."""

    __slots__ = (
        "block",
        "blocks",
        "memory",
        "of_root",
        "size",
        "spec",
        "state",
        "target",
        "token",
        "version",
    )

    def __init__(self, origin: _Origin, target: Layout, block: Tensor, size: int) -> None:
        root = origin.root
        token, self.of_root = _lineage_of(root)
        self.spec, self.target, self.size = origin.spec, target, size
        self.block: Tensor | None = block
        self.memory: Memory | None = memory_of(origin.blocks[0])
        self.blocks: tuple[Tensor, ...] = origin.blocks
        self.state, self.version = self.memory.state(origin.blocks), version(root)
        self.token = weakref.ref(token, self.release)

    def release(self, _: Any = None) -> None:
        """Free the memory."""
        self.block = self.memory = None
        self.blocks = ()

    def find(self, origin: _Origin, target: Layout) -> Tensor | None:
        """The block, if it is that of a tensor in a layout and nothing was written since."""
        root, memory = origin.root, self.memory
        token, of_root = _lineage_of(root)
        if self.token() is not token or memory is None or self.target is not target:
            return None
        if self.spec is not origin.spec or self.of_root is not of_root or self.version != version(root):
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
    if (
        plan.target.is_symbolic
    ):  # while a program is traced nothing is kept, and the limit would be a question
        return move()
    size = largest_block(plan.target) * t.dtype.itemsize
    limit = current_settings().reuse
    origin = _origin(t) if plan.collectives and size <= limit else None
    if origin is None:
        return move()
    kept = _slots.kept
    for i, one in enumerate(kept):
        if (block := one.find(origin, plan.target)) is not None:
            kept.append(kept.pop(i))
            return block
    while kept and (len(kept) >= _MOST or size + sum(one.size for one in kept) > limit):
        kept.pop(0).release()  # before the next one takes memory
    block = move()
    kept.append(_Kept(origin, plan.target, block, size))
    return block


def _origin(t: Tensor) -> _Origin | None:
    """What a tensor is; None if that cannot be told, or if writes to it are not counted."""
    if not isinstance(t, DTensor) or t.is_inference() or t.dtype.is_complex:
        return None
    root = _root_of(t)
    if root is None:
        return None
    block, whole = _memory(t), _memory(root)
    if block is None or whole is None or not _is_plain(block) or not shares_memory(block, whole):
        return None
    return _Origin(root, t._spec, (block, whole))


def _root_of(t: DTensor) -> DTensor | None:
    """The tensor whose elements are those of `t`, in an order that shape and strides tell: itself, or what it is a view of."""
    above = view_base(t)
    if above is None:
        return t
    if not isinstance(above, DTensor) or above.dtype is not t.dtype:
        return None
    # of a view that has not all of them, shape and strides do not tell which
    return above if above.numel() == t.numel() and _is_dense(t) and _is_dense(above) else None


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
