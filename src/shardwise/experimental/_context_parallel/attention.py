"""Attention of the queries of one rank to the keys of all ranks, on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import on_mesh
from shardwise.experimental._context_parallel.token_order import is_balanced, restoring_order, runs_of
from shardwise.layout import Partial, Replicate, Shard
from shardwise.tensor.dtensor import DTensor

__all__ = ["attend", "gather_sequence"]


def gather_sequence(block: Tensor, mesh: DeviceMesh, dim: int, balanced: bool) -> Tensor:
    """The whole sequence in the order of its tokens, from the blocks of all ranks: one all-gather.

    The gradient of a block is the sum of what each rank has for it: one reduce-scatter.
    """
    parts = DTensor.from_local(block.contiguous(), mesh, [Shard(dim % block.dim())])
    full = parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    if not balanced:
        return full
    return full.index_select(dim, restoring_order(mesh.size(), block.shape[dim], block.device))


def attend(
    attention: Callable[..., Tensor],
    mesh: DeviceMesh,
    balance: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """The attention of this rank's queries to the keys of all ranks.

    Args:
        attention: torch's function.
        mesh: the ranks that share the sequence.
        balance: tokens are in head-tail order if each rank has an even number of them.
        query, key, value: blocks, with the sequence as the last dim but one.
        attn_mask, dropout_p, is_causal, **options: as for `attention`; a mask and dropout are refused.
    """
    if attn_mask is not None or dropout_p:
        what = "attn_mask" if attn_mask is not None else f"dropout_p={dropout_p}"
        raise NotImplementedError(
            f"scaled_dot_product_attention inside context_parallel got {what}.\n"
            "  why: A plain mask does not say which tokens its rows and columns are; dropout would not be that of one device.\n"
            "  fix: is_causal=True, and dropout_p=0.0; or DTensors whose sequence dim is split, which take both."
        )
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"scaled_dot_product_attention inside context_parallel got {query.shape[-2]} queries and {key.shape[-2]} keys on a rank.\n"
            "  why: A causal mask compares the positions of both.\n"
            "  fix: Queries and keys of the same tokens, or is_causal=False."
        )
    # without a mask the order of keys does not matter
    keys, values = _gather_both(key, value, mesh, is_causal and is_balanced(balance, key.shape[-2]))
    if not is_causal:
        return attention(query, keys, values, **options)

    def on_rank(coord: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        runs = runs_of(coord[0], mesh.size(), length, is_balanced(balance, length))
        parts = q.split([number for _, number in runs], dim=-2)
        results = []
        for (start, number), part in zip(runs, parts, strict=True):
            seen = (x.narrow(-2, 0, start + number) for x in (k, v))
            if start == 0:
                results.append(attention(part, *seen, is_causal=True, **options))
            else:
                mask = torch.ones(number, start + number, dtype=torch.bool, device=q.device).tril(start)
                results.append(attention(part, *seen, attn_mask=mask, **options))
        return torch.cat(results, dim=-2)

    return on_mesh(mesh, on_rank, query, keys, values)  # type: ignore[no-any-return]


def _gather_both(key: Tensor, value: Tensor, mesh: DeviceMesh, balanced: bool) -> tuple[Tensor, Tensor]:
    """Whole keys and values, in one collective where their shapes allow it."""
    if key.shape[:-1] != value.shape[:-1] or key.dtype != value.dtype:
        return gather_sequence(key, mesh, -2, balanced), gather_sequence(value, mesh, -2, balanced)
    both = gather_sequence(torch.cat([key, value], dim=-1), mesh, -2, balanced)
    keys, values = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    return keys, values
