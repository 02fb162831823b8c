"""Attention inside `context_parallel`, compared with one device; on processes or simulated ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import shardwise as sw
from shardwise.comm import PerRank
from shardwise.debug import CommDebugMode
from shardwise.experimental._attention import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)


def dense(t: Tensor) -> Tensor:
    """The tensor of the first rank."""
    return t.ranks[0] if isinstance(t, PerRank) else t


def operands(length: int, heads: int = 4, keys: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, h, length, 6, generator=generator, dtype=torch.float64) for h in (heads, keys, keys)
    ]


def attention(
    length: int, is_causal: bool, balance: bool, keys: int = 4, **kwargs: Any
) -> list[tuple[Tensor, Tensor]]:
    """The output and the gradients of q, k and v: what was computed, and what one device computes."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    _cp_options.enable_load_balance = balance
    set_rotate_method("alltoall")
    q, k, v = operands(length, keys=keys)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=is_causal, **kwargs)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    (expected * weights).sum().backward()
    buffers = [q, k, v, weights]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        parts = [sw.per_rank(lambda _, t: t.clone().requires_grad_(), t) for t in (q, k, v)]
        assert parts[0].shape[2] == length // 4
        with CommDebugMode() as sent:
            out = F.scaled_dot_product_attention(*parts, is_causal=is_causal, **kwargs)
            (out * weights).sum().backward()
        assert sent.get_total_counts() == 2, sent.get_comm_counts()
        gradients = [t.grad for t in parts]
        results = context_parallel_unshard(mesh, [out.detach(), *gradients], [2] * 4)
    after = context_parallel_unshard(mesh, [out.detach()], [2])
    pairs = list(zip(map(dense, results), [expected, *(t.grad for t in whole)], strict=True))
    _cp_options.enable_load_balance = True
    pairs += zip(buffers, [*operands(length, keys=keys), weights], strict=True)  # as they were
    return [*pairs, (dense(after[0]), expected)] if balance else pairs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(20, 8, dtype=torch.float64)
        self.positions = nn.Embedding(64, 8, dtype=torch.float64)
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)
        self.head = nn.Linear(8, 20, dtype=torch.float64)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(positions)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(y.transpose(1, 2).flatten(-2))


def model(length: int) -> list[tuple[Tensor, Tensor]]:
    """A model on processes: the loss, and the gradients of its parameters summed over ranks."""
    mesh = sw.init_device_mesh("cpu", (4,))
    tokens = torch.randint(20, (2, length), generator=torch.Generator().manual_seed(2))
    labels, positions = tokens.roll(-1, 1), torch.arange(length).expand(2, -1)
    net, reference = Net(), Net()
    loss = F.cross_entropy(reference(tokens, positions).flatten(0, 1), labels.flatten())
    loss.backward()
    buffers = [tokens, labels, positions]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers={labels}):
        mine = F.cross_entropy(net(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum") / (
            2 * length
        )
        mine.backward()
    assert positions.shape == (2, length)
    assert labels.shape == (2, length // 4)
    total = sw.DTensor.from_local(mine.detach(), mesh, [sw.Partial()]).full_tensor()
    gradients = [
        (sw.DTensor.from_local(p.grad, mesh, [sw.Partial()]).full_tensor(), r.grad)
        for p, r in zip(net.parameters(), reference.parameters(), strict=True)
    ]
    return [(total, loss.detach()), *gradients]


def dispatched(length: int, balanced: bool) -> list[tuple[Tensor, Tensor]]:
    """torchtitan's way: blocks in head-tail order as DTensors; and the style of a module."""
    mesh = sw.init_device_mesh("cpu", (4,))
    q, k, v = operands(length)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    balancer = _HeadTailLoadBalancer(length, 4, "cpu") if balanced else None
    parts = _context_parallel_shard(mesh, [q, k, v], [2] * 3, balancer)
    _enable_context_parallel_dispatcher()
    tensors = [sw.DTensor.from_local(t, mesh, [sw.Shard(2)]) for t in parts]
    first = F.scaled_dot_product_attention(*tensors, is_causal=True).to_local()
    _disable_context_parallel_dispatcher()

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
    second = sw.parallel.parallelize_module(Attention(), mesh, style)(*parts)
    results = context_parallel_unshard(mesh, [first, second], [2, 2], balancer)
    _cp_options.enable_load_balance = True
    return [(dense(r), expected) for r in results]


def all_runs() -> list[tuple[Tensor, Tensor]]:
    """All of it, on processes."""
    pairs = []
    for length, causal, balance in itertools.product((8, 12, 16), (True, False), (True, False)):
        pairs += attention(length, causal, balance)
    pairs += attention(16, True, True, keys=2, enable_gqa=True, scale=0.3)
    return [*pairs, *model(16), *model(12), *dispatched(16, True), *dispatched(12, False)]
