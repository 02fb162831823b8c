"""The user's own collectives in a simulation: `torch.distributed` and functional ones over PerRank tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.codec import reduce_all
from shardwise.comm.mesh import groups_along
from shardwise.comm.per_rank import PerRank

__all__ = ["collective", "watching_meshes"]


def collective(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a collective of torch on the blocks of all ranks."""
    run = _FUNCTIONAL.get(name) or _IN_PLACE.get(name)
    if run is None:
        known = ", ".join(sorted({*_IN_PLACE}))
        raise RuntimeError(
            f"torch.distributed.{name} cannot run on simulated ranks.\n"
            "  why: all ranks are in this process, and this one is not played here\n"
            f"  fix: use one of {known}, or run on real processes with shardwise.launch"
        )
    return run(*args, **kwargs)


class _Done:
    """The handle of a collective that has ended already."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


@contextmanager
def watching_meshes() -> Iterator[None]:
    """Know the meshes that are made inside the block, for a group alone does not tell its siblings."""
    made = DeviceMesh.__init__

    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _meshes.add(self)

    DeviceMesh.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMesh.__init__ = made  # type: ignore[method-assign]
        _meshes.clear()


def _groups(group: Any, held: PerRank) -> list[tuple[int, ...]]:
    """Rank 0's group and, if it is of an axis of a mesh, the groups of the other ranks along that axis."""
    if group is None:
        return [tuple(held._blocks)]
    if isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]
    for mesh in _meshes:
        names = getattr(mesh, "_dim_group_names", ())
        if group.group_name in names and len(names) == mesh.ndim:
            return groups_along(mesh, (names.index(group.group_name),))
    return [tuple(dist.get_process_group_ranks(group))]


def _per_group(x: PerRank, group: Any, fn: Callable[[list[Tensor]], list[Tensor]]) -> PerRank:
    """`fn` of each group's blocks gives each of its ranks' results; ranks in no group keep theirs."""
    out = dict(x._blocks)
    for ranks in _groups(group, x):
        out.update(zip(ranks, fn([x._blocks[r] for r in ranks]), strict=True))
    return PerRank(out)


def _op(op: Any) -> str:
    name = str(op).rsplit(".", 1)[-1].lower()
    if name not in ("sum", "avg", "max", "min", "product"):
        raise RuntimeError(
            f"reduction {op} cannot run on simulated ranks.\n"
            "  why: it is not one of sum, avg, max, min, product\n"
            "  fix: use one of those"
        )
    return name


def _reduced(parts: list[Tensor], op: str) -> Tensor:
    out = reduce_all(parts, "sum" if op == "avg" else op)
    return out / len(parts) if op == "avg" else out


def _all_reduce(x: PerRank, op: Any, group: Any) -> PerRank:
    return _per_group(x, group, lambda parts: [_reduced(parts, _op(op)) for _ in parts])


def _all_gather(x: PerRank, _: int, group: Any) -> PerRank:
    return _per_group(x, group, lambda parts: [torch.cat([_row(p) for p in parts]) for _ in parts])


def _row(t: Tensor) -> Tensor:
    return t.reshape(1) if t.dim() == 0 else t


def _reduce_scatter(x: PerRank, op: Any, _: int, group: Any) -> PerRank:
    return _per_group(x, group, lambda parts: list(_reduced(parts, _op(op)).chunk(len(parts))))


def _all_to_all(x: PerRank, _: Any, send: Any, group: Any) -> PerRank:
    def run(parts: list[Tensor]) -> list[Tensor]:
        cut = [p.split(list(send)) if send else p.chunk(len(parts)) for p in parts]
        return [torch.cat([c[i] for c in cut]) for i in range(len(parts))]

    return _per_group(x, group, run)


def _broadcast(x: PerRank, source: int, group: Any) -> PerRank:
    return _per_group(x, group, lambda parts: [parts[source].clone() for _ in parts])


def _into(target: Any, result: PerRank, async_op: bool) -> _Done | None:
    if not isinstance(target, PerRank):
        raise RuntimeError(
            "a collective in a simulation got a plain tensor to write to.\n"
            "  why: each rank receives a value of its own\n"
            "  fix: make it with shardwise.per_rank(lambda rank: torch.empty(…))"
        )
    for r, block in target._blocks.items():
        block.copy_(result._blocks[r].view(block.shape))
    return _Done() if async_op else None


def _c10d_all_reduce(
    tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    return _into(tensor, _all_reduce(tensor, op, group), async_op)


def _c10d_broadcast(
    tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None
) -> Any:
    return _into(tensor, _broadcast(tensor, _place(src, group, group_src), group), async_op)


def _place(rank: Any, group: Any, group_rank: Any) -> int:
    """A rank's place in its group, given as either; 0 where neither is, as in torch."""
    if group_rank is not None:
        return int(group_rank)
    rank = 0 if rank is None else rank
    return int(rank if group is None else dist.get_group_rank(group, rank))


def _c10d_reduce(
    tensor: Any,
    dst: Any = None,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: Any = None,
) -> Any:
    at = _place(dst, group, group_dst)

    def run(parts: list[Tensor]) -> list[Tensor]:
        return [_reduced(parts, _op(op)) if i == at else p for i, p in enumerate(parts)]

    return _into(tensor, _per_group(tensor, group, run), async_op)


def _c10d_scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_src: Any = None,
) -> Any:
    at = _place(src, group, group_src)
    out = dict(tensor._blocks)
    for ranks in _groups(group, tensor):
        for i, r in enumerate(ranks):
            part = scatter_list[i]
            out[r] = part._blocks[ranks[at]] if isinstance(part, PerRank) else part
    return _into(tensor, PerRank(out), async_op)


def _c10d_gather(
    tensor: Any,
    gather_list: Any = None,
    dst: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: Any = None,
) -> Any:
    at = _place(dst, group, group_dst)
    for ranks in _groups(group, tensor):
        for i, r in enumerate(ranks):
            gather_list[i]._blocks[ranks[at]].copy_(tensor._blocks[r])
    return _Done() if async_op else None


def _c10d_reduce_scatter(
    output: Any, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    for i, part in enumerate(input_list):
        whole = _all_reduce(part, op, group)
        for ranks in _groups(group, part):
            output._blocks[ranks[i]].copy_(whole._blocks[ranks[i]])
    return _Done() if async_op else None


def _c10d_all_to_all(outputs: Any, inputs: Any, group: Any = None, async_op: bool = False) -> Any:
    for ranks in _groups(group, inputs[0]):
        for i, receiver in enumerate(ranks):
            for j, sender in enumerate(ranks):
                outputs[j]._blocks[receiver].copy_(inputs[i]._blocks[sender])
    return _Done() if async_op else None


def _c10d_all_gather_single(output: Any, input: Any, group: Any = None, async_op: bool = False) -> Any:
    return _into(output, _all_gather(input, 0, group), async_op)


def _c10d_all_gather(outputs: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    whole = _per_group(tensor, group, lambda parts: [torch.stack(parts) for _ in parts])
    for i, out in enumerate(outputs):
        _into(out, PerRank({r: t[i] for r, t in whole._blocks.items()}), False)
    return _Done() if async_op else None


def _c10d_reduce_scatter_single(
    output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    return _into(output, _reduce_scatter(input, op, 0, group), async_op)


def _c10d_all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    return _into(output, _all_to_all(input, output_split_sizes, input_split_sizes, group), async_op)


def _same(x: Any) -> Any:
    return x


_FUNCTIONAL: dict[str, Callable[..., Any]] = {
    "_c10d_functional::all_reduce": _all_reduce,
    "_c10d_functional::all_gather_into_tensor": _all_gather,
    "_c10d_functional::reduce_scatter_tensor": _reduce_scatter,
    "_c10d_functional::all_to_all_single": _all_to_all,
    "_c10d_functional::broadcast": _broadcast,
    "_c10d_functional::wait_tensor": _same,
    "_c10d_functional::_wrap_tensor_autograd": _same,
}
# torch's old names and its newer ones for the same functions
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "all_reduce": _c10d_all_reduce,
    "broadcast": _c10d_broadcast,
    "all_gather": _c10d_all_gather,
    "all_gather_into_tensor": _c10d_all_gather_single,
    "all_gather_single": _c10d_all_gather_single,
    "reduce_scatter_tensor": _c10d_reduce_scatter_single,
    "reduce_scatter_single": _c10d_reduce_scatter_single,
    "all_to_all_single": _c10d_all_to_all_single,
    "all_to_all": _c10d_all_to_all,
    "reduce": _c10d_reduce,
    "reduce_scatter": _c10d_reduce_scatter,
    "scatter": _c10d_scatter,
    "gather": _c10d_gather,
}
