"""From an op on DTensors to ops on blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import PerRank, map_ranks
from shardwise.layout import Layout, LayoutError, Spec, global_stride
from shardwise.plan import plan_redistribute
from shardwise.tensor.autograd import contiguous_stride, redistributed
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.errors import MeshError

__all__ = ["dispatch"]

aten = torch.ops.aten
_log = logging.getLogger("shardwise")


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op: on the blocks as they lie where its row says so, else on the whole."""
    row = _ROWS.get(func)
    if row is not None:
        result = row(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return on_whole(func, args, kwargs)


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    return map_ranks(func, *args, **kwargs)


def _like(local: Tensor, spec: Spec, layout: Layout | None = None) -> Spec:
    """The spec of a result whose blocks have this block's dtype and strides."""
    first = local.ranks[0] if isinstance(local, PerRank) else local
    layout = layout or spec.layout
    stride = (
        global_stride(spec.shape, first.stride())
        if first.dim() == spec.ndim
        else contiguous_stride(spec.shape)
    )
    return Spec(spec.mesh, layout, first.dtype, spec.shape, stride)


def _keeps(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops that give the same tensor: they keep its layout, what is pending included."""
    x, *rest = args
    local = _run(func, x._local_tensor, *rest, **kwargs)
    return DTensor(local, x._spec if func in _ALIASES else _like(local, x._spec))


def _casts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dtype = kwargs.get("dtype") or x.dtype
    # the sum of rounded parts is not the rounded sum: only widening a float may pass what is pending
    widens = x.dtype.is_floating_point and dtype.is_floating_point and dtype.itemsize >= x.dtype.itemsize
    if x.layout.partial and dtype != x.dtype and not (widens and dtype.itemsize > 2):
        x = redistributed(x, x.layout.with_partial({}))
    return _keeps(func, (x, *args[1:]), kwargs)


def _fills(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops that give other values of the same shape: nothing of them is pending."""
    x, *rest = args
    local = _run(func, x._local_tensor, *rest, **kwargs)
    return DTensor(local, _like(local, x._spec, x.layout.with_partial({})))


def _adds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums of two tensors that lie alike; of pending ones, only where sums pass through."""
    x, y = args[0], args[1]
    if not (isinstance(x, DTensor) and isinstance(y, DTensor)) or len(args) > 2:
        return NotImplemented
    alike = x.layout is y.layout and x.device_mesh == y.device_mesh
    if not alike or any(op not in ("sum", "avg") for _, op in x.layout.partial):
        return NotImplemented
    local = _run(func, x._local_tensor, y._local_tensor, **kwargs)
    return x if func in _IN_PLACE else DTensor(local, _like(local, x._spec))


def _scales(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor times a number: linear, so sums and means stay pending."""
    x, factor = args[0], args[1] if len(args) > 1 else 1
    if not isinstance(x, DTensor) or isinstance(factor, Tensor) or len(args) > 2 or kwargs:
        return NotImplemented
    if any(op not in ("sum", "avg") for _, op in x.layout.partial):
        return NotImplemented
    local = _run(func, x._local_tensor, *args[1:])
    return DTensor(local, _like(local, x._spec))


def _copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`copy_`: the source moves to where the target lies."""
    x, y, *rest = args
    if not (isinstance(x, DTensor) and isinstance(y, DTensor)) or x.shape != y.shape:
        return NotImplemented
    if x.device_mesh != y.device_mesh:
        return NotImplemented
    moved = redistributed(y, x.layout)
    _run(func, x._local_tensor, moved._local_tensor, *rest, **kwargs)
    return x


_ALIASES = {aten.detach.default, aten.alias.default}
_IN_PLACE = {aten.add_.Tensor, aten.sub_.Tensor}
_ROWS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys([*_ALIASES, aten.clone.default], _keeps),
    aten._to_copy.default: _casts,
    **dict.fromkeys(
        [aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default],
        _fills,
    ),
    **dict.fromkeys([aten.add.Tensor, aten.sub.Tensor, *_IN_PLACE], _adds),
    **dict.fromkeys(
        [aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.neg.default], _scales
    ),
    aten.copy_.default: _copies,
}


def on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The last rung: gather the inputs, run the op on the whole, and say so once."""
    found = _tensors_in([*args, *kwargs.values()])
    first = next(t for t in found if isinstance(t, DTensor))
    _check_operands(func, found, first)
    _say_once(func, tuple(t for t in found if isinstance(t, DTensor)))
    written = _written(func, args, kwargs)
    whole: dict[int, Tensor] = {}
    for t in found:
        if isinstance(t, DTensor) and id(t) not in whole:
            whole[id(t)] = redistributed(t, Layout.replicated(t.shape, t.layout.axes))._local_tensor
    if (
        isinstance(first._local_tensor, Tensor)
        and first._local_tensor.dim() != first.dim()
        and 0 not in first.shape
    ):
        raise LayoutError(
            f"{func} ran on a rank that is not on the mesh {first.device_mesh}.",
            why="this rank holds nothing of the tensor",
            fix="call it only where mesh.get_coordinate() is not None",
        )
    result = _run(func, *_swap(args, whole), **_swap(kwargs, whole))
    for t in written:
        _write_back(t, whole[id(t)])
    return _wrap(result, first._spec, {id(whole[id(t)]): t for t in written}, written)


def _tensors_in(values: Sequence[Any]) -> list[Tensor]:
    out: list[Tensor] = []
    for v in values:
        if isinstance(v, Tensor):
            out.append(v)
        elif isinstance(v, list | tuple):
            out.extend(_tensors_in(v))
    return out


def _swap(value: Any, whole: dict[int, Tensor]) -> Any:
    if isinstance(value, DTensor):
        return whole[id(value)]
    if isinstance(value, list | tuple):
        return type(value)(_swap(v, whole) for v in value)
    if isinstance(value, dict):
        return {k: _swap(v, whole) for k, v in value.items()}
    return value


def _check_operands(func: Any, found: list[Tensor], first: DTensor) -> None:
    for t in found:
        if isinstance(t, DTensor):
            if t.device_mesh != first.device_mesh:
                raise MeshError(
                    f"{func} got tensors on {first.device_mesh} and on {t.device_mesh}.",
                    why="an op runs on one mesh",
                    fix="distribute both over one mesh",
                )
        elif t.dim() > 0 and torch._C._current_graph_task_id() == -1:
            # numbers are the same everywhere, and so is what autograd makes inside a backward pass
            raise LayoutError(
                f"{func}: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor: "
                f"a plain tensor of shape {tuple(t.shape)} beside {first._spec}.",
                why="nothing says whether the plain one is replicated, a block, or a part of a sum",
                fix="wrap it: distribute_tensor(t, mesh, [Replicate()]), or DTensor.from_local(t, mesh, …)",
            )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """The arguments that the op writes to, by its schema."""
    out: list[DTensor] = []
    for i, arg in enumerate(func._schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(arg.name)
            out.extend(t for t in _tensors_in([value]) if isinstance(t, DTensor))
    return out


def _write_back(t: DTensor, whole: Tensor) -> None:
    """Bring what the op wrote to the whole back into the blocks."""
    if t._local_tensor is whole:
        return
    if tuple(whole.shape) != tuple(t.shape):
        raise LayoutError(
            f"an in-place op changed {t._spec} to shape {tuple(whole.shape)}.",
            why="blocks cannot follow a change of shape in place",
            fix="use the op that returns a new tensor",
        )
    spec = t._spec.with_layout(Layout.replicated(t.shape, t.layout.axes))
    _run(aten.copy_.default, t._local_tensor, redistributed(DTensor(whole, spec), t.layout)._local_tensor)


def _wrap(result: Any, spec: Spec, written_whole: dict[int, DTensor], written: list[DTensor]) -> Any:
    if isinstance(result, Tensor):
        if id(result) in written_whole:
            return written_whole[id(result)]
        if len(written) == 1 and tuple(result.shape) == tuple(written[0].shape):
            return written[0]
        axes = spec.layout.axes
        stride = tuple(result.ranks[0].stride() if isinstance(result, PerRank) else result.stride())
        out = Spec(spec.mesh, Layout.replicated(result.shape, axes), result.dtype, result.shape, stride)
        return DTensor(result, out)
    if isinstance(result, list | tuple):
        return type(result)(_wrap(r, spec, written_whole, []) for r in result)
    return result


_said: set[Any] = set()


def _say_once(func: Any, found: tuple[DTensor, ...]) -> None:
    layouts = tuple(t.layout for t in found)
    if (func, layouts) in _said:
        return
    if len(_said) < 10_000:
        _said.add((func, layouts))
    sent = 0
    for t in found:
        goal = Layout.replicated(t.shape, t.layout.axes)
        sent += plan_redistribute(t.layout, goal, t.dtype.itemsize).bytes
    if sent:
        shown = ", ".join(str(t._spec) for t in found)
        _log.warning("%s ran on the whole of %s: gathering it sent %s bytes", func, shown, f"{sent:,}")
