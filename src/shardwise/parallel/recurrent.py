"""Recurrent layers on blocks of a split batch, by torch's kernels of whole layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api.local_map import local_map
from shardwise.layout import Replicate, Shard
from shardwise.tensor.dtensor import DTensor

__all__ = ["run_batches_on_blocks"]

_KERNELS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


def run_batches_on_blocks(module: nn.Module) -> None:
    """Let a recurrent layer of torch run on the blocks of a split batch.

    Its kernels have no rule: they keep values for the backward pass in a buffer without a documented layout, so op by op the
    batch would be gathered.
    """
    if type(module) in (nn.LSTM, nn.GRU, nn.RNN) and "forward" not in vars(module):
        vars(module)["forward"] = MethodType(
            _forward, module
        )  # bound, so that a copy of the module binds its copy


def _forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """The forward method, on blocks where the batch alone is split."""
    states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
    if not _splits_only_the_batch(self, input, states):
        return type(self).forward(self, input, hx)
    weights = [w for layer in self.all_weights for w in layer]
    split = input.placements
    of_states = [p if p == Replicate() else Shard(1) for p in split]
    count = 2 if self.mode == "LSTM" else 1

    def on_blocks(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        given = others[: len(states)] or _zeros(self, x)
        how = (self.bias, self.num_layers, 0.0, self.training, self.bidirectional, self.batch_first)
        return _KERNELS[self.mode](x, given if count == 2 else given[0], list(others[len(states) :]), *how)

    out = local_map(on_blocks, (split, *[of_states] * count))(input, *states, *weights)
    return (out[0], out[1:] if count == 2 else out[1])


def _zeros(module: nn.RNNBase, x: Tensor) -> tuple[Tensor, ...]:
    """The first states of a block."""
    layers = module.num_layers * (2 if module.bidirectional else 1)
    batch = x.shape[0 if module.batch_first else 1]
    sizes = (module.proj_size or module.hidden_size, module.hidden_size)
    return tuple(x.new_zeros(layers, batch, size) for size in (sizes if module.mode == "LSTM" else sizes[1:]))


def _splits_only_the_batch(module: nn.RNNBase, x: Any, states: tuple[Any, ...]) -> bool:
    """Whether every rank has equally many whole sequences and all weights, and no random numbers are drawn."""
    if not isinstance(x, DTensor) or x.dim() != 3 or not x.is_floating_point():
        return False
    if module.training and module.dropout > 0 and module.num_layers > 1:
        return False
    dim, mesh = 0 if module.batch_first else 1, x.device_mesh
    split = [i for i, p in enumerate(x.placements) if p == Shard(dim)]
    if not split or any(p not in (Shard(dim), Replicate()) for p in x.placements):
        return False
    batch, ranks = x.shape[dim], math.prod(mesh.size(i) for i in split)
    if not batch or batch % ranks or not x.shape[1 - dim]:
        return False
    wanted = [Shard(1) if i in split else Replicate() for i in range(mesh.ndim)]
    if any(
        not isinstance(s, DTensor) or s.device_mesh != mesh or list(s.placements) != wanted for s in states
    ):
        return False
    weights = list(module.parameters())
    return all(
        isinstance(w, DTensor) and w.device_mesh == mesh and not w.sharding.sharded and not w.sharding.partial
        for w in weights
    )
