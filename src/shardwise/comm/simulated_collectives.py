"""Collectives that the user calls in a simulation: those of `torch.distributed` and functional ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.codec import reduce_all
from shardwise.comm.joint_node import replace_function
from shardwise.comm.per_rank import PerRank, map_ranks, spread
from shardwise.comm.simulated_groups import groups_like
from shardwise.torch_internals.collectives import BROADCAST_FUNCTION
from shardwise.torch_internals.process_groups import reduce_op_name

__all__ = ["run_collective"]


def run_collective(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a collective, by its name in `collective_name`, on the blocks of all ranks."""
    run = _RUN.get(name)
    if run is None:
        known = ", ".join(sorted(name for name in _RUN if name.isidentifier()))
        raise RuntimeError(
            f"torch.distributed.{name} cannot run on simulated ranks.\n"
            "  why: In a simulation all ranks are in this process, and this collective is not simulated.\n"
            f"  fix: Use one of {known}, or run on real processes with shardwise.launch."
        )
    if not name.isidentifier():  # a functional collective
        return run(*args, **kwargs)
    bound = _signature(name).bind(*args, **kwargs)
    bound.apply_defaults()
    async_op = bound.arguments.pop("async_op")
    run(*bound.arguments.values())
    return _Done() if async_op else None


@lru_cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(dist, name))


class _Done:
    """The handle of a collective that has already completed."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _on_ranks(x: Any) -> PerRank:
    """A tensor with a block for each rank; a plain one is the same on all of them."""
    return x if isinstance(x, PerRank) else spread(x, range(dist.get_world_size()))


def _per_group(x: Any, group: Any, fn: Callable[[list[Tensor]], list[Tensor]]) -> PerRank:
    """Apply `fn` to the blocks of each group, which returns one result per rank; ranks in no group keep their blocks."""
    x = _on_ranks(x)
    blocks = x.tracked._blocks
    out = dict(blocks)
    for ranks in groups_like(group):
        if lack := [r for r in ranks if r not in blocks]:
            raise RuntimeError(
                f"A collective over ranks {ranks} got a PerRank tensor of ranks {tuple(blocks)}.\n"
                f"  why: On real processes it would wait for {', '.join(map(str, lack))}, which did not call it.\n"
                "  fix: Have all ranks of the group use the tensor, or use a group of these ranks."
            )
        out.update(zip(ranks, fn([blocks[r] for r in ranks]), strict=True))
    return PerRank(out)


def _op(op: Any) -> str:
    name = reduce_op_name(op)
    if name not in ("sum", "avg", "max", "min", "product"):
        raise RuntimeError(
            f"A reduction by {op} cannot run on simulated ranks.\n"
            "  why: Only sum, avg, max, min and product are simulated.\n"
            "  fix: Use one of these, or run on real processes with shardwise.launch."
        )
    return name


def _reduced(parts: list[Tensor], op: str) -> Tensor:
    out = reduce_all(parts, "sum" if op == "avg" else op)
    return out / len(parts) if op == "avg" else out


class _GivenGradient(torch.autograd.Function):
    """`apply(block, value, reason)`: the value; its gradient is that of the block, or an error for this reason."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, value: Tensor, reason: str) -> Tensor:
        ctx.reason = reason
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.reason:
            raise RuntimeError(ctx.reason)
        return grads[0], None, None


def _with_gradient(x: Any, value: PerRank, reason: str) -> PerRank:
    """A result whose gradient is not that of the sums and copies that computed it."""
    return map_ranks(lambda b, v: _GivenGradient.apply(b, v, reason), x, value)  # type: ignore[no-any-return, no-untyped-call]


def _functional_all_reduce(x: Any, op: Any, group: Any) -> PerRank:
    out = _all_reduce(x, op, group)
    if _op(op) == "sum":
        return out
    return _with_gradient(
        x,
        out,
        f"all_reduce backward only supports 'sum' reduction, got '{op}'.\n"
        "  why: Functional collectives of torch have no gradient of other reductions.\n"
        "  fix: all_reduce(x, 'sum', group), or DTensor.from_local(x, mesh, [Partial('max')])",
    )


def _functional_broadcast(x: Any, source: int, group: Any) -> PerRank:
    # torch's has no gradient of its own: each rank's gradient passes to its own tensor
    return _with_gradient(x, _broadcast(x, source, group), "")


def _all_reduce(x: PerRank, op: Any, group: Any) -> PerRank:
    return _per_group(x, group, lambda parts: [_reduced(parts, _op(op)) for _ in parts])


def _all_gather(x: PerRank, _: int, group: Any) -> PerRank:
    return _per_group(x, group, lambda parts: [torch.cat([_at_least_1d(p) for p in parts]) for _ in parts])


def _at_least_1d(t: Tensor) -> Tensor:
    return t.reshape(1) if t.dim() == 0 else t


def _reduce_scatter(x: PerRank, op: Any, _: int, group: Any) -> PerRank:
    return _per_group(x, group, lambda parts: list(_reduced(parts, _op(op)).chunk(len(parts))))


def _all_to_all(x: PerRank, receive: Any, send: Any, group: Any) -> PerRank:
    def run(parts: list[Tensor]) -> list[Tensor]:
        if len({*(send or ()), *(receive or ())}) > 1:
            raise RuntimeError(
                f"all_to_all_single on simulated ranks got split sizes {list(send or ())} to send and {list(receive or ())} to "
                "receive.\n"
                "  why: One call stands for those of all ranks, which would all send these sizes, so that none receives them.\n"
                "  fix: Use equal sizes, or run on real processes with shardwise.launch."
            )
        sent = [p.split(list(send)) if send else p.chunk(len(parts)) for p in parts]
        return [torch.cat([s[i] for s in sent]) for i in range(len(parts))]

    return _per_group(x, group, run)


def _broadcast(x: PerRank, source: int, group: Any) -> PerRank:
    return _per_group(x, group, lambda parts: [parts[source].clone() for _ in parts])


def _copy_into(target: Any, result: PerRank) -> None:
    """Write the results of a collective to its output; autograd does not see it, nor on real processes."""
    if isinstance(target, PerRank):
        for r, block in target._blocks.items():
            block.data.copy_(result._blocks[r].view(block.shape))
        return
    first, *others = result.ranks
    if not all(same_values(first, other) for other in others):
        raise _plain_output(target)
    target.data.copy_(first.view(target.shape))


def _plain_output(target: Any) -> RuntimeError:
    return RuntimeError(
        f"A collective in a simulation got a {type(target).__name__} as its output.\n"
        "  why: Each rank receives another value, so the output must be a PerRank tensor.\n"
        "  fix: Create it with shardwise.per_rank(lambda rank: torch.empty(…))."
    )


def _receiver(target: Any) -> dict[int, Tensor]:
    """The blocks of an output that ranks write different values to."""
    if not isinstance(target, PerRank):
        raise _plain_output(target)
    return target._blocks


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same elements, NaN included."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _index_in_group(rank: Any, group: Any, group_rank: Any) -> int:
    """The index of a rank in its group, given by global rank or by index; 0 if neither is given, as in torch."""
    if group_rank is not None:
        return int(group_rank)
    rank = 0 if rank is None else rank
    return int(rank if group is None else dist.get_group_rank(group, rank))


# The functions of torch.distributed: their arguments are torch's, in its order, except async_op.


def _c10d_all_reduce(tensor: Any, op: Any, group: Any) -> None:
    _copy_into(tensor, _all_reduce(tensor, op, group))


def _c10d_all_reduce_coalesced(tensors: Any, op: Any, group: Any) -> None:
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        _c10d_all_reduce(tensor, op, group)


def _c10d_broadcast(tensor: Any, src: Any, group: Any, group_src: Any) -> None:
    _copy_into(tensor, _broadcast(tensor, _index_in_group(src, group, group_src), group))


def _c10d_reduce(tensor: Any, dst: Any, op: Any, group: Any, group_dst: Any) -> None:
    at = _index_in_group(dst, group, group_dst)

    def run(parts: list[Tensor]) -> list[Tensor]:
        return [_reduced(parts, _op(op)) if i == at else p for i, p in enumerate(parts)]

    _copy_into(tensor, _per_group(tensor, group, run))


def _c10d_scatter(tensor: Any, scatter_list: Any, src: Any, group: Any, group_src: Any) -> None:
    at = _index_in_group(src, group, group_src)
    out = dict(_receiver(tensor))
    for ranks in groups_like(group):
        for i, r in enumerate(ranks):
            part = scatter_list[i]
            out[r] = part._blocks[ranks[at]] if isinstance(part, PerRank) else part
    _copy_into(tensor, PerRank(out))


def _c10d_gather(tensor: Any, gather_list: Any, dst: Any, group: Any, group_dst: Any) -> None:
    at = _index_in_group(dst, group, group_dst)
    for ranks in groups_like(group):
        for i, r in enumerate(ranks):
            _receiver(gather_list[i])[ranks[at]].copy_(_on_ranks(tensor)._blocks[r])


def _c10d_reduce_scatter(output: Any, input_list: Any, op: Any, group: Any) -> None:
    for i, part in enumerate(input_list):
        whole = _all_reduce(part, op, group)
        for ranks in groups_like(group):
            _receiver(output)[ranks[i]].copy_(whole._blocks[ranks[i]])


def _c10d_all_to_all(outputs: Any, inputs: Any, group: Any) -> None:
    for ranks in groups_like(group):
        for i, receiver in enumerate(ranks):
            for j, sender in enumerate(ranks):
                _receiver(outputs[j])[receiver].copy_(_on_ranks(inputs[i])._blocks[sender])


def _c10d_all_gather_single(output: Any, input: Any, group: Any) -> None:
    _copy_into(output, _all_gather(input, 0, group))


def _c10d_all_gather(outputs: Any, tensor: Any, group: Any) -> None:
    whole = _per_group(tensor, group, lambda parts: [torch.stack(parts) for _ in parts])
    for i, out in enumerate(outputs):
        _copy_into(out, PerRank({r: t[i] for r, t in whole._blocks.items()}))


def _c10d_reduce_scatter_single(output: Any, input: Any, op: Any, group: Any) -> None:
    _copy_into(output, _reduce_scatter(input, op, 0, group))


def _c10d_all_to_all_single(output: Any, input: Any, receive: Any, send: Any, group: Any) -> None:
    _copy_into(output, _all_to_all(input, receive, send, group))


_RUN: dict[str, Callable[..., Any]] = {
    "functional.all_gather": _all_gather,
    "functional.all_reduce": _functional_all_reduce,
    "_c10d_functional::all_reduce_coalesced": lambda xs, op, group: [
        _functional_all_reduce(x, op, group) for x in xs
    ],
    "_c10d_functional::all_gather_into_tensor_coalesced": lambda xs, size, group: [
        _all_gather(x, size, group) for x in xs
    ],
    "_c10d_functional::reduce_scatter_tensor_coalesced": lambda xs, op, size, group: [
        _reduce_scatter(x, op, size, group) for x in xs
    ],
    "functional.all_to_all": _all_to_all,
    "functional.broadcast": _functional_broadcast,
    "functional.reduce_scatter": _reduce_scatter,
    "functional.wait": lambda x: x,
    "all_gather": _c10d_all_gather,
    "all_gather_into_tensor": _c10d_all_gather_single,
    "all_gather_single": _c10d_all_gather_single,
    "all_reduce": _c10d_all_reduce,
    "all_reduce_coalesced": _c10d_all_reduce_coalesced,
    "all_to_all": _c10d_all_to_all,
    "all_to_all_single": _c10d_all_to_all_single,
    "broadcast": _c10d_broadcast,
    "gather": _c10d_gather,
    "reduce": _c10d_reduce,
    "reduce_scatter": _c10d_reduce_scatter,
    "reduce_scatter_single": _c10d_reduce_scatter_single,
    "reduce_scatter_tensor": _c10d_reduce_scatter_single,
    "scatter": _c10d_scatter,
}
replace_function(
    BROADCAST_FUNCTION,
    lambda source, group, x: _broadcast(x, _index_in_group(source, group, None), group),
)
