"""Views with memory of their own: writes to them reach their base, and they see writes to their base.

A view of the blocks shares their memory and needs none of this. Where a view had to communicate, or where its values are not
those in memory (`conj`), it is a `MovedView`: a function of its base, computed anew when the base was written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.call.arguments import map_tensors
from shardwise.call.fallback import gather, write_back
from shardwise.call.meta import infer_outputs, on_meta
from shardwise.call.op_call import OpCall
from shardwise.call.overlap import FILLS, check_overlap, computing_operands, is_repeated, repeated_error
from shardwise.call.schema import op_info
from shardwise.call.strides import copy_into, in_order, match_strides, may_overlap, memory_order
from shardwise.call.view_mode import mode_of_view
from shardwise.call.view_scatter import on_memory, scatter_of
from shardwise.call.view_writes import announce_write, overlaps_itself, run_on_memory
from shardwise.call.writes import memory_of, note_write, shares_memory
from shardwise.comm import map_ranks
from shardwise.layout import Spec, is_dense
from shardwise.plan.settings import override_settings
from shardwise.tensor.dtensor import DTensor, copy_block, data_of_inference_tensor, local_slot
from shardwise.tensor.implicit import to_layout
from shardwise.torch_internals.subclass import bump_versions, is_parameter, view_base

__all__ = ["MovedView", "remember_base"]

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
        self, base: DTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int | None
    ) -> None:
        self.func, self.args, self.kwargs, self.number = func, args, kwargs, number
        source = base._source if isinstance(base, MovedView) else None
        if source is None:
            self.roots = _blocks_with_versions(base)
            self.memory = memory_of(self.roots[0])
            base = DTensor(base._local_tensor, base._spec)
        else:
            base = _view_of(source, base._spec)
            self.roots, self.memory = source.roots, source.memory
        self.base, self.is_held = base, False
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
            # under another cost model the result may have another layout
            self.set_block(to_layout(self.func, result, self.spec.layout))
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

    def copied(self, memo: dict[int, Any]) -> ViewSource:
        """The same view of a copy of the base."""
        out = ViewSource(self.base._copy_blocks(memo), self.func, self.args, self.kwargs, self.number)
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


class MovedView(DTensor):
    """A view with memory of its own.

    A subclass, so that other tensors need no check.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
    ...     middle = x[1:3]
    ...     _ = middle.zero_()
    ...     print(x.full_tensor().ranks[0], end=" ")
    ...     _ = x.add_(5)
    ...     print(middle.full_tensor().ranks[0])
    tensor([1., 0., 0., 1.]) tensor([5., 5.])
    """

    __slots__ = ()  # those of DTensor, so that swap_tensors can exchange them
    __tensor_unflatten__ = DTensor.__tensor_unflatten__  # without a source it is not a view

    @property
    def _source(self) -> ViewSource | None:
        """How the view is computed; None if it no longer is one, as after `x.data = y`."""
        source = local_slot.__get__(self)
        return source if isinstance(source, ViewSource) else None

    @property
    def _local_tensor(self) -> Tensor:
        """The block of this rank, computed anew if the base was written to."""
        block: Tensor | ViewSource = local_slot.__get__(self)
        return block.read() if isinstance(block, ViewSource) else block

    @_local_tensor.setter
    def _local_tensor(self, block: Tensor | ViewSource) -> None:
        local_slot.__set__(self, block)

    def is_conj(self) -> bool:
        return self._source is not None and self._source.lazy_bits()[0]

    def is_neg(self) -> bool:
        return self._source is not None and self._source.lazy_bits()[1]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        if info.is_view and (mode := mode_of_view(func, args[0])) is not None:
            if func is aten.detach.default and not torch.is_inference_mode_enabled():
                return data_of_inference_tensor(args[0])
            with mode:
                return cls.__torch_dispatch__(func, types, args, kwargs)
        call = OpCall(func, args, kwargs)
        written = [t for t in call.written if isinstance(t, MovedView) and t._source is not None]
        if torch.Tag.inplace_view in info.tags:
            written = []  # the shape changes, not the values
        if written and (lists := info.one_at_a_time(args)):
            # tensors in one list may overlap
            for some in lists:
                func(*some, **kwargs)
            return None
        if info.written:
            check_overlap(call)
            args = computing_operands(call)
            call = OpCall(func, args, kwargs)
        elif not any(a.alias for a in info.arguments):  # no result is a view
            args, kwargs = map_tensors(_without_gaps, args), map_tensors(_without_gaps, kwargs)
        for t in written:
            if is_repeated(t) and (t.is_conj() or t.is_neg()):
                raise repeated_error(func)  # its value is computed, and copied back
            announce_write(func, t)
        for t in written:
            if info.qualified_name not in FILLS and overlaps_itself(t):
                result = run_on_memory(call, t)
                if info.arguments[0].type.startswith("List"):
                    bump_versions(args[0])  # autograd does it for ops of single tensors
                return result
        with held(t._source for t in call.tensors if isinstance(t, MovedView) and t._source is not None):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            for t in written:
                if t._source is not None:
                    t._source.write_back()
        if info.is_view:
            # elements of the base that are one element of memory are several in its block, with strides of their own
            kind: Kind = "moved" if may_overlap(args[0].shape, args[0].stride()) else "shared"
            return remember_base(func, args, kwargs, result, kind)
        # blocks that moved may have other strides than the view, which ops preserve
        return result if info.writes else match_strides(result)

    def _copy_blocks(self, memo: dict[int, Any]) -> DTensor:
        source = self._source
        if source is None:
            return DTensor(copy_block(self._local_tensor, memo), self._spec)
        if any(source.lazy_bits()):  # torch computes the values of a conjugated tensor
            with torch.no_grad():
                return self.clone()  # type: ignore[return-value]
        if id(source) not in memo:
            memo[id(source)] = source.copied(memo)
        return _view_of(memo[id(source)], self._spec)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        source = self._source
        if source is None or source.is_grown or is_parameter(self):
            return super().__reduce_ex__(protocol)
        name = op_info(source.func).name
        # a view of the base's block is computed again: storages cannot be saved in two dtypes
        block = None if source.kind == "shared" else self._local_tensor.detach()
        return rebuild_view, (
            source.base, name, source.args, source.kwargs, source.number, source.kind,
            block, self._spec, self.requires_grad,
        )  # fmt: skip


def _without_gaps(x: Tensor) -> Tensor:
    """A conjugated or negated operand as kernels see it: torch computes it before, into memory without gaps."""
    if not isinstance(x, MovedView) or not (x.is_conj() or x.is_neg()):
        return x
    spec = x._spec
    if spec.stride is None or is_dense(spec.shape, spec.stride):
        return x
    stride = torch.empty_strided(spec.shape, spec.stride, device="meta").clone().stride()
    return DTensor(x._local_tensor, spec.with_layout(spec.layout, stride))


def rebuild_view(
    base: DTensor,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    number: int | None,
    kind: Kind,
    block: Tensor | None,
    spec: Spec,
    requires_grad: bool,
) -> MovedView:
    """The view that was pickled as these values."""
    namespace, packet, overload = name.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    source = ViewSource(base, func, args, kwargs, number)
    source.spec, source.kind = spec, kind
    if block is None:
        with torch.no_grad():
            result = func(source.base, *args, **kwargs)
        source.set_block(result if number is None else result[number])
    else:
        source.set_block(DTensor(block, spec))
    return _view_of(source, spec).requires_grad_(requires_grad)  # type: ignore[no-any-return]


torch.serialization.add_safe_globals([rebuild_view])  # it runs an op by name on tensors that were loaded


def remember_base(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, kind: Kind = "moved"
) -> Any:
    """The results of a view op as views that remember their base; those that do already are returned as they are."""
    outputs = infer_outputs(func, args, kwargs)
    if outputs is None:
        func(*on_meta(args), **on_meta(kwargs))  # raises what it raises for the strides of the base

    def view(number: int | None, block: DTensor) -> DTensor:
        if block._source is not None:
            return block
        spec = block._spec
        if outputs is not None:  # the block has strides of its own, and so may have what was computed from it
            spec = spec.with_layout(spec.layout, tuple(outputs[number or 0].stride()))
        source = ViewSource(args[0], func, args[1:], kwargs, number)
        source.spec, source.kind = spec, kind
        source.set_block(block)
        return _view_of(source, spec)

    if isinstance(result, Tensor):
        return view(None, result)  # type: ignore[arg-type]
    return type(result)([view(i, r) for i, r in enumerate(result)])


def _view_of(source: ViewSource, spec: Spec) -> MovedView:
    out = MovedView(source.block, spec)
    out._local_tensor = source
    return out
