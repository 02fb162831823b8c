"""Views with memory of their own: writes to them reach their base, and they see writes to their base.

A view of the blocks shares their memory and needs none of this. Where a view had to communicate, or where its values are not
those in memory (`conj`), it is a `MovedView`: a function of its base, computed anew when the base was written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_tensors
from shardwise.call.meta import infer_outputs, on_meta
from shardwise.call.op_call import OpCall
from shardwise.call.overlap import FILLS, check_overlap, computing_operands, is_repeated, repeated_error
from shardwise.call.schema import op_info
from shardwise.call.strides import match_strides, may_overlap
from shardwise.call.view_mode import mode_of_view
from shardwise.call.view_source import Kind, ViewSource, held
from shardwise.call.view_writes import announce_write, overlaps_itself, run_on_memory
from shardwise.comm.local_mode import outside_local_mode
from shardwise.layout import Spec, is_dense
from shardwise.tensor.copy_methods import copy_block
from shardwise.tensor.dtensor import DTensor, local_slot
from shardwise.tensor.inference_data import data_of_inference_tensor
from shardwise.torch_internals.subclass import bump_versions, counts_writes, is_parameter

__all__ = ["MovedView", "move_in_place", "remember_base"]

aten = torch.ops.aten


def _copied_source(source: ViewSource, memo: dict[int, Any]) -> ViewSource:
    """The same view of a copy of its base."""
    found: ViewSource | None = memo.get(id(source))
    if found is None:
        base, above = source.base, source.base._source
        if above is None:
            copy = base._copy_blocks(memo)
        else:
            copy = _view_of(_copied_source(above, memo), base._spec)
        found = memo[id(source)] = source.copied(copy, memo)
    return found


def _write_back(written: Sequence[MovedView]) -> None:
    for t in written:
        if t._source is not None:
            t._source.write_back()


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

    def _same_view(self) -> MovedView:
        """The same view as a tensor object of its own."""
        return _view_of(local_slot.__get__(self), self._spec)

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
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            except RuntimeError:
                if not all(
                    map(counts_writes, written)
                ):  # torch raises for tensors of inference mode after the write
                    _write_back(written)
                raise
            _write_back(written)
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
        return _view_of(_copied_source(source, memo), self._spec)

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


@outside_local_mode  # programs call it, and a view keeps the blocks of all ranks as simulations have them
def move_in_place(x: DTensor, moved: DTensor) -> None:
    """Let a tensor object have another layout, which is no write: it becomes a view of what it was, in the blocks of `moved`.

    What shares memory with `x` still does: writes to either reach the other.
    """
    spec = moved._spec.with_layout(moved._spec.layout, x._spec.stride)
    source = ViewSource(x, aten.alias.default, (), {}, None)
    source.spec = spec
    source.set_block(moved)
    x._adopt(_view_of(source, spec))


def _view_of(source: ViewSource, spec: Spec) -> MovedView:
    out = MovedView(source.block, spec)
    out._local_tensor = source
    return out
