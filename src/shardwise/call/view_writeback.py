"""Views that had to move data: writes to them reach their base, and they see writes to their base.

A view of the blocks shares their memory and needs none of this. A view that had to communicate has memory of its own: it is a
`MovedView`, which remembers its base and the view op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import tensors_in
from shardwise.call.fallback import gather, write_back
from shardwise.call.op_call import OpCall
from shardwise.call.schema import op_info
from shardwise.comm import map_ranks
from shardwise.plan.settings import override_settings
from shardwise.tensor.dtensor import DTensor, local_slot
from shardwise.tensor.implicit import announce, to_layout
from shardwise.torch_internals.subclass import version

__all__ = ["MovedView", "is_shared_with_inference", "outside_inference", "remember_base"]

aten = torch.ops.aten
_Origin = tuple[DTensor, Any, tuple[Any, ...], dict[str, Any], int | None]


class MovedView(DTensor):
    """A view with memory of its own: the `number`-th result of `func` on `base`, or its only one.

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

    _origin: _Origin
    _seen: tuple[float, ...]
    __slots__ = ("_origin", "_seen")
    __tensor_unflatten__ = DTensor.__tensor_unflatten__  # without an origin it is not a view

    @property
    def _local_tensor(self) -> Tensor:
        """The block of this rank, computed anew if the base was written to."""
        if self._seen != _versions(self._origin[0]):
            base, func, args, kwargs, number = self._origin
            with torch.no_grad():
                result = func(base, *args, **kwargs)
            self._local_tensor = local_slot.__get__(result if number is None else result[number])
            self._seen = _versions(base)
        return local_slot.__get__(self)  # type: ignore[no-any-return]

    @_local_tensor.setter
    def _local_tensor(self, block: Tensor) -> None:
        local_slot.__set__(self, block)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        if torch.is_inference_mode_enabled() and info.is_view and is_shared_with_inference(args[0]):
            with outside_inference():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        for t in tensors_in([*args, *kwargs.values()]):
            if isinstance(t, MovedView):
                t._local_tensor  # noqa: B018  refreshes it before the op, which may write to its base
        written = OpCall(func, args, kwargs).written if info.written else []
        for t in written:
            if isinstance(t, MovedView):
                _announce_write(func, t)
        if torch.Tag.inplace_view in info.tags and isinstance(args[0], MovedView):
            view, before = args[0], _view_of(args[0]._origin, args[0])
            super().__torch_dispatch__(func, types, args, kwargs)
            view._origin = (before, info.out_of_place, args[1:], kwargs, None)
            view._seen = _versions(before)
            return view
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if info.is_view:
            return remember_base(func, args, kwargs, result)
        for t in written:
            if isinstance(t, MovedView):
                _write_through(t)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            copy = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
            memo[id(self)] = copy.__deepcopy__(memo)
        return memo[id(self)]  # type: ignore[no-any-return]


def is_shared_with_inference(base: Any) -> bool:
    """Whether a tensor was created outside inference mode: torch lets its views share its version counter."""
    return isinstance(base, DTensor) and not base.is_inference()


@contextmanager
def outside_inference() -> Iterator[None]:
    """Create normal tensors inside inference mode, without autograd."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def remember_base(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """The results of a view op as views that remember their base."""
    if isinstance(result, Tensor):
        return _view_of((args[0], func, args[1:], kwargs, None), result)
    return type(result)([_view_of((args[0], func, args[1:], kwargs, i), r) for i, r in enumerate(result)])


def _view_of(origin: _Origin, result: Any) -> MovedView:
    out = MovedView(local_slot.__get__(result), result._spec)
    out._origin, out._seen = origin, _versions(origin[0])
    return out


def _versions(base: DTensor) -> tuple[float, ...]:
    """What changes when a base, or anything it is itself a view of, is written to; the same on every rank."""
    # without a version counter it is always out of date
    here = float("nan") if base.is_inference() else version(base)
    # writes by views with another version counter, such as x[0].data
    through = base.__dict__.get("_written_through", 0)
    return (here, through, *(_versions(base._origin[0]) if isinstance(base, MovedView) else ()))


def _announce_write(func: Any, view: MovedView) -> None:
    """Apply the policy before an op writes to a view: afterwards the value must go back to the base."""
    announce(
        func,
        view.numel() * view.dtype.itemsize,
        f"It writes to a view whose data had to move, so the value goes back to its base, {view._origin[0]._spec}.",
        "Write to the base, or to a view along dims that are not split",
    )


def _write_through(view: MovedView) -> None:
    """Write the value of a view into its base: as a slice of it, or else into the gathered base."""
    base, func, args, kwargs, number = view._origin
    copy = aten.copy_.default
    value = DTensor(local_slot.__get__(view), view._spec)
    scatter = _scatter(func, number, base, *args, **kwargs)
    # the view is written already: refusing to communicate now would leave view and base different
    with torch.no_grad(), override_settings(implicit="allow"):
        if scatter is not None:
            updated = scatter(DTensor(base._local_tensor, base._spec), value)
            map_ranks(copy, base._local_tensor, to_layout(func, updated, base._spec.layout)._local_tensor)
        else:
            full = gather(func, base)
            viewed = map_ranks(func, full, *args, **kwargs)
            map_ranks(copy, viewed if number is None else viewed[number], gather(copy, value))
            write_back(func, base, full)
    base.__dict__["_written_through"] = base.__dict__.get("_written_through", 0) + 1
    if isinstance(base, MovedView):
        _write_through(base)


def _scatter(
    func: Any, number: int | None, base: DTensor, *args: Any, **kwargs: Any
) -> Callable[[DTensor, DTensor], DTensor] | None:
    """What writes the value of a view into its base, if the view is a slice or an index of one dim."""
    named = op_info(func).bind((base, *args), kwargs)
    dim = named.get("dim", 0)
    if func is aten.slice.Tensor:
        start, end, step = named["start"], named["end"], named["step"]
        return lambda x, value: aten.slice_scatter.default(x, value, dim, start, end, step)
    if func is aten.select.int or func is aten.unbind.int:
        index = named["index"] if number is None else number
        return lambda x, value: aten.select_scatter.default(x, value, dim, index)
    if number is None or func not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    sizes = named.get("split_sizes") or [named["split_size"]] * number
    start = sum(sizes[:number])
    return lambda x, value: aten.slice_scatter.default(x, value, dim, start, start + value.shape[dim])
