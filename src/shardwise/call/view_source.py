"""How a view that has memory of its own is computed from its base, and how what is written to it reaches the base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.call.fallback import gather, write_back
from shardwise.call.strides import copy_into, in_order, may_overlap, memory_order
from shardwise.call.view_scatter import on_memory, scatter_of
from shardwise.call.writes import memory_of, note_write, shares_memory
from shardwise.comm import map_ranks
from shardwise.layout import Spec
from shardwise.plan.settings import override_settings
from shardwise.tensor.copy_methods import copy_block
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import to_layout
from shardwise.torch_internals.subclass import view_base

__all__ = ["Kind", "ViewSource", "held"]

aten = torch.ops.aten
Kind = Literal["moved", "shared", "copied"]


class ViewSource:
    """How a moved view is computed: the `number`-th result of `func` on `base`, or its only one.

    Attributes:
        base: the tensor that it is a view of. A tensor object of its own, which has the memory of the user's; what the user's
            becomes by `t_()` or `x.data = y` does not change the view.
        spec: the spec that the block has.
        block: the block, as of `seen`.
        kind: how the block was computed: "moved", with memory of its own on every rank; "shared", as a view of the base's
            block; or "copied", as a reshaped copy of it, which some ranks may have while others share.
        seen: the state of the memory when the block was computed; None if it must be computed for every read.
    """

    __slots__ = (
        "args", "base", "block", "func", "is_held", "kind", "kwargs", "memory", "number", "roots", "seen", "spec",
    )  # fmt: skip
    is_grown = False
    """Whether it has elements that its base has not, as in `call/grown_memory.py`."""

    def __init__(
        self, base: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int | None
    ) -> None:
        self.func, self.args, self.kwargs, self.number = func, args, kwargs, number
        source = base._source
        if source is None:
            self.roots = _blocks_with_versions(base)
            self.memory = memory_of(self.roots[0])
            base = DTensor(base._local_tensor, base._spec)
        else:
            base = base._same_view()
            self.roots, self.memory = source.roots, source.memory
        self.base: DTensor = base
        self.is_held = False
        self.kind: Kind = "moved"
        self.seen: tuple[int, int] | None = None
        self.block: Tensor
        self.spec: Spec

    def set_block(self, result: Any) -> None:
        """Take the block of a result of `func`."""
        source = result._source
        if source is not None:
            self.kind = self._kind_of(source)
        self.block = result._local_tensor if source is None else source.block
        if self.kind == "moved":
            # views of this view have the strides that those of its strides have
            order = memory_order(tuple(self.spec.shape), self.spec.stride)
            self.block = map_ranks(in_order, self.block, order)
        self.seen = self.memory.state(self.roots)

    def _kind_of(self, source: ViewSource) -> Kind:
        """How a result of `func` was computed; torch may have run several view ops for it."""
        kinds = {source.kind}
        while (above := source.base._source) is not None and above is not self.base._source:
            source = above
            kinds.add(source.kind)
        return "moved" if "moved" in kinds else "copied" if "copied" in kinds else "shared"

    def read(self) -> Tensor:
        """The block, computed anew if the base was written to."""
        if not self.is_held and (self.seen is None or self.seen != self.memory.state(self.roots)):
            with torch.no_grad():
                result = self.func(self.base, *self.args, **self.kwargs)
            result = result if self.number is None else result[self.number]
            self.kind = "shared" if result._source is None else self._kind_of(result._source)
            # under another cost model the result may have another layout, and the base of `move_in_place` has
            moved = to_layout(self.func, result, self.spec.layout)
            self.kind = self.kind if moved is result else "moved"
            self.set_block(moved)
        return self.block

    def write_back(self) -> None:
        """Write the block into the base: as a slice of it, or else into the gathered base."""
        base, func, args, kwargs, number = self.base, self.func, self.args, self.kwargs, self.number
        value = DTensor(self.block, self.spec)
        # the view is written already: refusing to communicate now would leave view and base different
        with torch.no_grad(), override_settings(implicit="allow"):
            above = base._source
            if above is not None and (above.overlaps or may_overlap(base.shape, base.stride())):
                self._write_to_root(value)
                return
            block = base._local_tensor
            if self.kind == "copied":
                map_ranks(_copy_reshaped, block, self.block)
            elif self.kind == "shared":
                pass
            elif func is aten.alias.default:  # the same elements in another layout
                map_ranks(copy_into, block, to_layout(func, value, base._spec.layout)._local_tensor)
            elif (scatter := scatter_of(func, number, base, *args, **kwargs)) is not None:
                updated = scatter(DTensor(block, base._spec), value)
                map_ranks(copy_into, block, to_layout(func, updated, base._spec.layout)._local_tensor)
            else:
                full = gather(func, base)
                viewed = map_ranks(func, full, *args, **kwargs)
                map_ranks(copy_into, viewed if number is None else viewed[number], gather(func, value))
                write_back(func, base, full)
        if base._source is not None:
            with held([base._source]):
                base._source.write_back()
        else:
            note_write(self.roots[0])
        self.seen = self.memory.state(self.roots)

    def lazy_bits(self) -> tuple[bool, bool]:
        """Whether a plain tensor in its place would be conjugated, and whether it would be negated, when it is read."""
        conj = neg = of_conj = False
        for source in reversed(_chain(self)):
            if source.func is aten._conj.default:
                conj = not conj
            elif source.func is aten._neg_view.default:
                neg = not neg
            elif source.func is aten.view_as_real.default:
                conj, of_conj = False, conj
            elif of_conj and source.func is aten.select.int and source.args[0] in (-1, source.base.dim() - 1):
                # the imaginary part of a conjugate
                neg, of_conj = neg != (source.args[1] in (1, -1)), False
        return conj, neg

    @property
    def overlaps(self) -> bool:
        """Whether elements of the view, or of a view that it is a view of, are the same element of the base."""
        return self.func in _OVERLAPPING or (self.base._source is not None and self.base._source.overlaps)

    def _write_to_root(self, value: DTensor) -> None:
        """Write only the elements of this view: those of its base may occur in it more than once."""
        self.write_as(lambda view: map_ranks(copy_into, view, gather(self.func, value)))
        self.seen = self.memory.state(self.roots)

    def write_as(self, write: Callable[[Tensor], object]) -> None:
        """Call a function with the view as one of the gathered memory, and write back what it wrote."""
        chain = _chain(self)
        top = chain[-1]
        if top.is_grown:
            chain.pop()
        root = DTensor(top.read(), top.spec) if top.is_grown else top.base
        full = gather(self.func, root)
        view = full
        for source in reversed(chain):
            view = map_ranks(on_memory(source.func), view, *source.args, **source.kwargs)
            view = view if source.number is None else view[source.number]
        if self.lazy_bits()[1]:
            view = map_ranks(aten._neg_view.default, view)
        write(view)
        write_back(self.func, root, full)
        if top.is_grown:
            top.write_back()
        else:
            note_write(self.roots[0])

    def copied(self, base: DTensor, memo: dict[int, Any]) -> ViewSource:
        """The same view of `base`, a copy of its own."""
        out = ViewSource(base, self.func, self.args, self.kwargs, self.number)
        out.spec, out.kind = self.spec, self.kind
        out.set_block(DTensor(copy_block(self.read(), memo), self.spec))
        return out


_OVERLAPPING = frozenset({aten.unfold.default, aten.as_strided.default, aten.expand.default})


def _copy_reshaped(block: Tensor, view: Tensor) -> None:
    """Write a reshaped copy of a block into it; on some ranks it may be a view, which has written to the block already."""
    if not shares_memory(block, view):
        block.copy_(view.reshape(block.shape))


def _blocks_with_versions(base: DTensor) -> tuple[Tensor, ...]:
    """The blocks whose versions change when the result of `to_local()` is written to."""
    above = view_base(base)
    if not isinstance(above, DTensor) or above._source is not None:
        return (base._local_tensor,)
    return base._local_tensor, above._local_tensor


@contextmanager
def held(sources: Iterable[ViewSource]) -> Iterator[None]:
    """Compute views, and the views that they are views of, once, and not again inside the block."""
    taken = []
    try:
        for source in sources:
            for each in reversed(_chain(source)):
                each.read()
                if not each.is_held:
                    each.is_held = True
                    taken.append(each)
        yield
    finally:
        for source in taken:
            source.is_held = False


def _chain(source: ViewSource) -> list[ViewSource]:
    """A view, the view that it is a view of, and so on."""
    out = [source]
    while (above := out[-1].base._source) is not None:
        out.append(above)
    return out
