"""Ops over lists of tensors: one kernel on all the blocks where each place of the lists allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise.call.fallback import on_whole
from shardwise.call.resolve import prepare
from shardwise.comm import PerRank, map_ranks
from shardwise.layout import Layout
from shardwise.tensor.autograd import redistributed
from shardwise.tensor.dtensor import DTensor

__all__ = ["FUSED", "each", "fused", "prepare_foreach"]

_Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_new: Any = torch.Tensor._dtensor__new__  # without the detour through Python that `DTensor(…)` is
_FORMS = {"List": "Tensor", "ScalarList": "Scalar"}


def _single(func: Any) -> Any | None:
    """The op that a foreach op does to each place of its lists, or None if torch has none."""
    name, said = func._schema.name.removeprefix("aten::_foreach_"), func._overloadname
    if said in ("Scalar", "ScalarList"):
        name = name.replace("maximum", "clamp_min").replace("minimum", "clamp_max")
    packet = getattr(torch.ops.aten, {"norm": "linalg_vector_norm", "max": "amax"}.get(name, name), None)
    if packet is None:
        return None
    if name == "pow":
        said = {"ScalarAndTensor": "Scalar", "List": "Tensor_Tensor"}.get(said, "Tensor_Scalar")
    if said in ("Scalar", "ScalarList") and name.startswith("clamp"):
        said = "default"
    for overload in (_FORMS.get(said, said), "default", "Tensor", "Scalar"):
        if overload in packet.overloads():
            return getattr(packet, overload)
    return None


def _places(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """The arguments at each place of the lists, as the op for one tensor takes them."""
    name = func._schema.name.removeprefix("aten::_foreach_").rstrip("_")
    count = len(next(a for a in args if isinstance(a, list | tuple)))
    for i in range(count):
        here = [a[i] if isinstance(a, list | tuple) else a for a in args]
        keyed = {k: v[i] if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
        if name in ("addcdiv", "addcmul") and len(here) > 3:
            value = here.pop()
            keyed["value"] = value[i] if isinstance(value, torch.Tensor) and value.dim() else value
        if name == "norm" and len(here) > 2:
            keyed["dtype"] = here.pop()
        if name == "copy" and len(here) > 2:
            here.pop()
        yield here, keyed


def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def prepare_foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run | None:
    """How to run the kernel on the blocks themselves: if at each place the op for one tensor would move nothing."""
    single = _single(func)
    if single is None:
        return None
    specs = []
    for here, keyed in _places(func, args, kwargs):
        recipe = prepare(single, tuple(here), keyed) if any(isinstance(a, DTensor) for a in here) else None
        if recipe is None or any(recipe.moves) or recipe.programs is not None:
            return None
        specs.append(recipe.outputs[0])
    writes = _writes(func)
    lists = [_is_list_of_blocks(a) for a in args]
    if kwargs or not any(lists) or any(isinstance(a, DTensor) for a in args):

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found = map_ranks(func, *[_blocks(a) for a in args], **{k: _blocks(v) for k, v in kwargs.items()})
            return None if writes else [DTensor(r, spec) for r, spec in zip(found, specs, strict=True)]

        return run
    op = getattr(torch, func._schema.name.removeprefix("aten::"))  # quicker than the op's boxed call

    def direct(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = op(*[[t._local_tensor for t in a] if li else a for a, li in zip(args, lists, strict=True)])
        return (
            None if writes else [_new(DTensor, r, spec, False) for r, spec in zip(found, specs, strict=True)]
        )

    return direct


def _is_list_of_blocks(value: Any) -> bool:
    """Whether an argument is a list of nothing but DTensors, each with one block: that of this rank."""
    return isinstance(value, list | tuple) and all(
        isinstance(t, DTensor) and not isinstance(t._local_tensor, PerRank) for t in value
    )


def _blocks(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._local_tensor
    return [_blocks(v) for v in value] if isinstance(value, list | tuple) else value


def each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op for one tensor at each place, one after the other."""
    single = _single(func)
    if single is None:
        return on_whole(func, args, kwargs)
    out = [single(*here, **keyed) for here, keyed in _places(func, args, kwargs)]
    return None if _writes(func) else out


FUSED = frozenset(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
"""Steps of optimizers: pointwise in what lies at one place of the lists, and each parameter is on a mesh of its own."""


def fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A step of an optimizer, mesh by mesh, on the blocks as the parameters lie."""
    places: dict[Any, list[int]] = {}
    for i, p in enumerate(args[0]):
        places.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(i)
    for some in places.values():
        _fused_on_one(func, [[a[i] for i in some] if a else a for a in args], kwargs)


def _fused_on_one(func: Any, lists: list[list[Any]], kwargs: dict[str, Any]) -> None:
    goals = [p.layout.with_partial({}) if isinstance(p, DTensor) else None for p in lists[0]]
    moved = [[_lying(t, goal) for t, goal in zip(a, goals, strict=False)] for a in lists]
    keyed = {k: _blocks(_lying(v, None)) for k, v in kwargs.items()}
    map_ranks(func, *[_blocks(a) for a in moved], **keyed)
    for number, (a, m) in enumerate(zip(lists, moved, strict=True)):
        if number == 1 and kwargs.get("grad_scale") is None:
            continue  # gradients change only where they are scaled
        for t, new in zip(a, m, strict=True):
            if new is not t:
                map_ranks(
                    torch.ops.aten.copy_.default, t._local_tensor, redistributed(new, t.layout)._local_tensor
                )


def _lying(t: Any, goal: Layout | None) -> Any:
    if not isinstance(t, DTensor):
        return t
    here = t.layout
    alike = goal is not None and goal.shape == here.shape
    return redistributed(t, goal if alike else Layout.replicated(t.shape, here.axes))  # type: ignore[arg-type]
