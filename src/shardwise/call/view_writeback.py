"""Views that had to move data: what is written to them reaches the tensor they are of, and they see what it becomes.

A view of the blocks shares their memory, and then there is nothing to do. One that had to gather them does not, and
is a `View`: it remembers what it is of. It is a class of its own so that no other tensor pays for the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.exchange import named
from shardwise.call.fallback import gathered, write_back, written_by
from shardwise.comm import map_ranks
from shardwise.tensor.autograd import redistributed
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import policy

__all__ = ["View", "as_its_base", "is_view", "outlives_inference", "remembered", "returning"]


_held: Any = DTensor._local_tensor  # the slot itself: no view is brought up to date by reading it


class View(DTensor):
    """A view in memory of its own: the `number`-th result of `func` on `base`, or the only one.

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

    _origin: tuple[DTensor, Any, tuple[Any, ...], dict[str, Any], int | None]
    _seen: tuple[float, ...]
    __slots__ = ("_origin", "_seen")

    @property
    def _local_tensor(self) -> Tensor:
        """The block of this rank, made anew if the base was written to."""
        if self._seen != _versions(self._origin[0]):
            base, func, args, kwargs, number = self._origin
            with torch.no_grad():
                result = func(base, *args, **kwargs)
            self._local_tensor = _held.__get__(result if number is None else result[number])
            self._seen = _versions(base)
        return _held.__get__(self)  # type: ignore[no-any-return]

    @_local_tensor.setter
    def _local_tensor(self, block: Tensor) -> None:
        _held.__set__(self, block)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_view(func) and outlives_inference(args[0]):
            with as_its_base():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        _bring_up(args, kwargs)
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], View):
            view, before = args[0], _of(args[0]._origin, args[0])
            super().__torch_dispatch__(func, types, args, kwargs)
            view._origin = (before, returning(func), args[1:], kwargs, None)
            view._seen = _versions(before)
            return view
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if is_view(func):
            return remembered(func, args, kwargs, result)
        for t in written_by(func, args, kwargs):
            if isinstance(t, View):
                _write_through(t)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            plain = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
            memo[id(self)] = plain.__deepcopy__(memo)
        return memo[id(self)]  # type: ignore[no-any-return]


def is_view(func: Any) -> bool:
    """Whether an op's results share the memory of its first argument, by its schema."""
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return first is not None and not first.is_write


def outlives_inference(base: Any) -> bool:
    """Whether inference mode did not make a tensor: torch has its views count their writes together with it."""
    return isinstance(base, DTensor) and not base.is_inference()


@contextmanager
def as_its_base() -> Iterator[None]:
    """Make tensors that are not inference mode's, and no graph either."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def returning(func: Any) -> Any:
    """The form that returns a new tensor of an op that changes its tensor's own shape."""
    forms = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::")[:-1])
    named = [a.name for a in func._schema.arguments]
    return next(
        f
        for f in (getattr(forms, o) for o in forms.overloads())
        if [a.name for a in f._schema.arguments] == named and "out" not in f._overloadname
    )


def remembered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """What a view op returned, as views that know what they are of."""
    if isinstance(result, Tensor):
        return _of((args[0], func, args[1:], kwargs, None), result)
    return type(result)(_of((args[0], func, args[1:], kwargs, i), r) for i, r in enumerate(result))


def _of(origin: tuple[Any, ...], result: Any) -> View:
    out = View(_held.__get__(result), result._spec)
    out._origin, out._seen = origin, _versions(origin[0])
    return out


def _versions(base: DTensor) -> tuple[float, ...]:
    """What changes when a base or anything it is a view of is written to, the same on every rank."""
    here = float("nan") if base.is_inference() else base._version  # nobody counts there: always out of date
    through = base.__dict__.get("_written_through", 0)  # also by views that do not count, as x[0].data
    return (here, through, *(_versions(base._origin[0]) if isinstance(base, View) else ()))


def _bring_up(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for value in [*args, *kwargs.values()]:
        for t in value if isinstance(value, list | tuple) else (value,):
            if isinstance(t, View):
                t._local_tensor  # noqa: B018


def _write_through(view: View) -> None:
    """Bring the value of a view into its base: where it belongs, or else on the whole, where a view is one."""
    base, func, args, kwargs, number = view._origin
    copy = torch.ops.aten.copy_.default
    value = DTensor(_held.__get__(view), view._spec)
    if (put := _scatter(func, number, base, *args, **kwargs)) is not None:
        # the view is written already: to be refused now would leave the two apart
        with torch.no_grad(), policy(implicit="allow"):
            made = put(DTensor(base._local_tensor, base._spec), value)
        map_ranks(copy, base._local_tensor, redistributed(made, base._spec.layout)._local_tensor)
    else:
        whole = gathered(func, base)
        seen = map_ranks(func, whole, *args, **kwargs)
        map_ranks(copy, seen if number is None else seen[number], gathered(copy, value))
        write_back(base, whole)
    base.__dict__["_written_through"] = base.__dict__.get("_written_through", 0) + 1
    if isinstance(base, View):
        _write_through(base)


def _scatter(
    func: Any, number: int | None, base: DTensor, *args: Any, **kwargs: Any
) -> Callable[[DTensor, DTensor], DTensor] | None:
    """What sets the value of a view into its base, if it is a range or a position of one dim."""
    aten = torch.ops.aten
    given = named(func, (base, *args), kwargs)
    dim = given.get("dim", 0)
    if func is aten.slice.Tensor:
        low, high, step = given["start"], given["end"], given["step"]
        return lambda x, value: aten.slice_scatter.default(x, value, dim, low, high, step)
    if func is aten.select.int or func is aten.unbind.int:
        index = given["index"] if number is None else number
        return lambda x, value: aten.select_scatter.default(x, value, dim, index)
    if number is None or func not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    sizes = given.get("split_sizes") or [given["split_size"]] * number
    low = sum(sizes[:number])
    return lambda x, value: aten.slice_scatter.default(x, value, dim, low, low + value.shape[dim])
