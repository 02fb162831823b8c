"""Context parallelism of programs on plain tensors: sequences are split between ranks, and attention sees all of them.

Programs on DTensors need none of it: `F.scaled_dot_product_attention` of tensors whose sequence dim is split is right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F  # noqa: N812 (the usual name)

from shardwise.comm import PerRank, is_simulated, on_mesh
from shardwise.experimental._context_parallel.attention import attend, gather_sequence
from shardwise.experimental._context_parallel.token_order import HeadTailLoadBalancer, is_balanced, runs_of
from shardwise.layout import LayoutError, Shard
from shardwise.tensor.dtensor import DTensor

__all__ = [
    "ContextParallelOptions",
    "RotateMethod",
    "attention_over",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "disable_dispatcher",
    "enable_dispatcher",
    "options",
    "set_rotate_method",
]


class RotateMethod(Enum):
    """How torch passes keys and values on; here they are gathered."""

    ALL_TO_ALL = 1
    ALL_GATHER = 2


@dataclass
class ContextParallelOptions:
    """Settings of the process, which programs assign to.

    Attributes:
        convert_to_f32: torch's; accepted, and without effect, since nothing is merged here.
        enable_load_balance: tokens are split in head-tail order, where the sequence allows it.
        rotate_method: torch's; accepted, and without effect.
    """

    convert_to_f32: bool = True
    enable_load_balance: bool = True
    rotate_method: RotateMethod = RotateMethod.ALL_GATHER


options = ContextParallelOptions()

_original = F.scaled_dot_product_attention
_contexts: list[
    DeviceMesh
] = []  # of all threads: autograd may run a checkpointed forward pass in another one
_dispatcher = False
_inside = threading.local()


def set_rotate_method(rotate_method: str) -> None:
    """Accept torch's choices, "allgather" and "alltoall"; keys and values are gathered in either case.

    Raises:
        NotImplementedError: another method.
    """
    methods = {"allgather": RotateMethod.ALL_GATHER, "alltoall": RotateMethod.ALL_TO_ALL}
    if rotate_method not in methods:
        raise NotImplementedError(
            f"set_rotate_method got {rotate_method!r}.\n"
            "  why: Blocks of keys and values are gathered or exchanged.\n"
            '  fix: set_rotate_method("allgather") or set_rotate_method("alltoall")'
        )
    options.rotate_method = methods[rotate_method]


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Split buffers along their sequences, and have attention of plain tensors attend to whole sequences.

    Inside, `torch.nn.functional.scaled_dot_product_attention` takes the queries, keys and values of this rank's tokens and
    gathers the keys and values of the others; the backward pass reduces their gradients. Call it by that name: a
    function that was imported from the module before is torch's own. Everything else of a model acts on single
    tokens and needs no change.

    Args:
        mesh: the ranks that share a sequence, a mesh of one axis.
        buffers: tensors with a sequence dim, such as tokens, labels and positions, the same on each rank. Inside, they
            hold this rank's part; afterwards they are what they were. In head-tail order (`_cp_options.enable_load_balance`,
            the default) a rank has a part of the beginning and one of the end, so that a causal mask leaves each rank as much to do.
        buffer_seq_dims: the sequence dim of each buffer.
        no_restore_buffers: buffers that are no longer needed, and stay split.

    Raises:
        ValueError: the lengths of `buffers` and `buffer_seq_dims` differ, one of `no_restore_buffers` is no buffer, a
            buffer requires grad, or sequences have different lengths or cannot be split evenly.

    Attention sends the keys and values of each rank to the others, in one all-gather; its backward pass sends a
    reduce-scatter. A causal call holds a mask of as many elements as it has scores on this rank.
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    restored = _checked(mesh, buffers, dims, no_restore_buffers or set())
    before = options.enable_load_balance
    if buffers:
        options.enable_load_balance = is_balanced(before, buffers[0].shape[dims[0]] // mesh.size())
    undo = _replace(buffers, _split(mesh, buffers, dims, options.enable_load_balance), restored)
    try:
        with attention_over(mesh):
            yield
    finally:
        options.enable_load_balance = before
        undo()


@contextmanager
def attention_over(mesh: DeviceMesh) -> Iterator[None]:
    """Inside, attention of plain tensors is that of the whole sequence, whose tokens the ranks of a mesh have."""
    _contexts.append(mesh)
    _patch()
    try:
        yield
    finally:
        _contexts.pop()
        _patch()


def context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor] | Mapping[str, Tensor],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: HeadTailLoadBalancer | None = None,
) -> Any:
    """Return this rank's parts of some tensors, in a list, or in a dict if they are given in one; nothing is communicated.

    From then on attention expects the order of `load_balancer`: head-tail, or with None that of the tokens.

    Args:
        mesh: the ranks that share a sequence, a mesh of one axis.
        buffers: tensors with a sequence dim, the same on each rank.
        seq_dims: the sequence dim of each.
        load_balancer: the order of tokens.

    Raises:
        ValueError: as for `context_parallel`.
        NotImplementedError: another order of tokens than head-tail, or a block mask.
    """
    if load_balancer is not None and type(load_balancer) is not HeadTailLoadBalancer:
        raise NotImplementedError(
            f"_context_parallel_shard got the load balancer {type(load_balancer).__name__}.\n"
            "  why: Attention has to know the order of tokens to mask those that come later; it knows head-tail order.\n"
            "  fix: load_balancer=_HeadTailLoadBalancer(length, mesh.size(), device), or None"
        )
    names = list(buffers) if isinstance(buffers, Mapping) else list(range(len(buffers)))
    if len(buffers) != len(seq_dims):
        raise _lengths(len(buffers), len(seq_dims))
    tensors, dims = [buffers[n] for n in names], [seq_dims[n] for n in names]  # type: ignore[index]
    if any(not isinstance(t, Tensor) for t in tensors):
        raise NotImplementedError(
            f"_context_parallel_shard got {', '.join(sorted({type(t).__name__ for t in tensors}))}.\n"
            "  why: Flex attention with block masks is not split along sequences.\n"
            "  fix: F.scaled_dot_product_attention(q, k, v, is_causal=True)"
        )
    _checked(mesh, tensors, dims, set())
    options.enable_load_balance = load_balancer is not None
    parts = _split(mesh, tensors, dims, load_balancer is not None)
    return dict(zip(names, parts, strict=True)) if isinstance(buffers, Mapping) else parts


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: HeadTailLoadBalancer | None = None,
) -> list[Tensor]:
    """Whole sequences, in their own order, of this rank's parts of some tensors; one all-gather of each.

    Args:
        mesh: the ranks that share a sequence.
        buffers: this rank's parts.
        seq_dims: the sequence dim of each.
        load_balancer: the order in which they were split; by default that of `context_parallel`.
    """
    if len(buffers) != len(seq_dims):
        raise _lengths(len(buffers), len(seq_dims))
    return [
        gather_sequence(
            b, mesh, dim, load_balancer is not None or is_balanced(options.enable_load_balance, b.shape[dim])
        )
        for b, dim in zip(buffers, seq_dims, strict=True)
    ]


def enable_dispatcher() -> None:
    """Have attention of DTensors whose mesh has one axis, which splits the sequence, read `options`."""
    global _dispatcher
    _dispatcher = True
    _patch()


def disable_dispatcher() -> None:
    """End what `enable_dispatcher` began."""
    global _dispatcher
    _dispatcher = False
    _patch()


def _patch() -> None:
    """Put our attention where programs look for it while it is needed, and torch's own otherwise."""
    needed = bool(_contexts) or _dispatcher
    setattr(F, "scaled_dot_product_attention", _attention if needed else _original)  # noqa: B010 - mypy refuses it


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`F.scaled_dot_product_attention` inside `context_parallel`."""
    if getattr(_inside, "active", False):  # the attention of one rank
        return _original(query, key, value, *args, **kwargs)
    _inside.active = True
    try:
        return _run(query, key, value, *args, **kwargs)
    finally:
        _inside.active = False


def _run(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    def on_blocks(mesh: DeviceMesh) -> Callable[..., Tensor]:
        return lambda q, k, v: attend(_original, mesh, options.enable_load_balance, q, k, v, *args, **kwargs)

    if not isinstance(query, DTensor):
        return (
            on_blocks(_contexts[-1])(query, key, value)
            if _contexts
            else _original(query, key, value, *args, **kwargs)
        )
    mesh = query.device_mesh
    by_sequence = [Shard(query.dim() - 2)]
    splits_sequence = all(
        isinstance(t, DTensor) and list(t.placements) == by_sequence for t in (query, key, value)
    )
    if splits_sequence and (_dispatcher or mesh == _contexts[-1]):
        blocks = [t.to_local() for t in (query, key, value)]  # type: ignore[attr-defined]
        return DTensor.from_local(on_blocks(mesh)(*blocks), mesh, by_sequence)
    if _contexts:
        raise LayoutError(
            f"Inside context_parallel, scaled_dot_product_attention got a DTensor with placements {query.placements}.",
            why="It computes on the plain tensors of this rank's tokens; a DTensor says by its own layout what is split.",
            fix="Pass query.to_local(), ..., or leave context_parallel and split the sequence dim of the DTensors.",
        )
    return _original(query, key, value, *args, **kwargs)


def _checked(mesh: DeviceMesh, buffers: list[Tensor], dims: list[int], kept: set[Tensor]) -> list[bool]:
    """Whether each buffer is to be restored, after checking all of them."""
    if mesh.ndim != 1:
        raise ValueError(
            f"context_parallel got a mesh of {mesh.ndim} axes, {mesh.mesh_dim_names}.\n"
            "  why: A sequence is split along one axis.\n"
            '  fix: context_parallel(mesh["cp"], ...)'
        )
    if len(buffers) != len(dims):
        raise _lengths(len(buffers), len(dims))
    if any(all(b is not k for b in buffers) for k in kept):
        raise ValueError("`no_restore_buffers` must be a subset of `buffers`.")
    if any(b.requires_grad for b in buffers):
        raise ValueError(
            "context_parallel got a buffer that requires grad.\n"
            "  why: A buffer is replaced by this rank's part of it, and its gradient would be that of the part.\n"
            "  fix: Pass buffer.detach(), and have it require grad inside."
        )
    lengths = sorted({b.shape[d] for b, d in zip(buffers, dims, strict=True)})
    if len(lengths) > 1 or any(n % mesh.size() for n in lengths):
        raise ValueError(
            f"context_parallel got buffers with sequences of length {', '.join(map(str, lengths))} for {mesh.size()} ranks.\n"
            "  why: Each rank holds the same tokens of all buffers, and equally many of them, so one length is\n"
            "       needed that the number of ranks divides.\n"
            f"  fix: Pad or cut them to a multiple of {mesh.size()}; {2 * mesh.size()} if the load is to be balanced."
        )
    return [all(b is not k for k in kept) for b in buffers]


def _lengths(buffers: int, dims: int) -> ValueError:
    return ValueError(
        f"`seq_dims` must have the same number of elements as `buffers`: got {dims} for {buffers}."
    )


def _split(mesh: DeviceMesh, buffers: list[Tensor], dims: list[int], balanced: bool) -> list[Tensor]:
    def part(dim: int) -> Callable[..., Tensor]:
        def of_rank(coord: tuple[int, ...], full: Tensor) -> Tensor:
            runs = runs_of(coord[0], mesh.size(), full.shape[dim] // mesh.size(), balanced)
            return torch.cat([full.narrow(dim, start, length) for start, length in runs], dim)

        return of_rank

    with torch.no_grad():
        parts = [on_mesh(mesh, part(dim), full) for full, dim in zip(buffers, dims, strict=True)]
    if any(p is None for p in parts):
        raise ValueError(
            "context_parallel runs on a rank that is not on its mesh.\n"
            "  why: Such a rank has no part of the sequences.\n"
            "  fix: Call it on the ranks of the mesh only."
        )
    return parts


def _replace(buffers: list[Tensor], parts: list[Tensor], restored: list[bool]) -> Callable[[], None]:
    """Let each buffer be its part; the result undoes it.

    The memory of a buffer is left alone, so that views of it, and what it is a view of, keep their values. In a simulation the
    object becomes a tensor of each rank.
    """
    if is_simulated() or any(isinstance(p, PerRank) for p in parts):
        for b, part in zip(buffers, parts, strict=True):
            torch.utils.swap_tensors(b, part)
        restoring = [i for i, wanted in enumerate(restored) if wanted]

        def swap_back() -> None:
            for i in restoring:
                torch.utils.swap_tensors(buffers[i], parts[i])

        return swap_back
    full = [b.data for b in buffers]

    def assign(b: Tensor, data: Tensor) -> None:
        b.data = data
        increment_version(b)  # a backward pass that would read the other tensor is an error

    def undo() -> None:
        for b, data, wanted in zip(buffers, full, restored, strict=True):
            if wanted:
                assign(b, data)

    for b, part in zip(buffers, parts, strict=True):
        assign(b, part)
    return undo
