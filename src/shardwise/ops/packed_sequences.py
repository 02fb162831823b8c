"""Packed sequences: the sizes of their batches are plain tensors on the CPU, whose memory torch's recurrent layers read.

Packing and unpacking are programs of slices, so a packed sequence of DTensors has the same plain sizes on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the usual name)

from shardwise.call.fallback import gather
from shardwise.call.operands import compare_plain
from shardwise.comm import first_rank
from shardwise.ops.inner_plain import replicated_states
from shardwise.tensor.dtensor import DTensor, is_simulated_tensor
from shardwise.torch_internals.patches import KernelPatch, beneath_patches

__all__ = ["packed_sequence_patches"]

aten = torch.ops.aten


def packed_sequence_patches() -> list[KernelPatch]:
    """The patches of packing, unpacking and of recurrent layers on packed sequences."""
    reason = "torch reads the sizes of batches from memory, and a DTensor has none"
    layers = (aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data)
    return [
        KernelPatch(aten._pack_padded_sequence.default, _pack, reason, _first_is_dtensor),
        KernelPatch(aten._pad_packed_sequence.default, _unpack, reason, _first_is_dtensor),
        *(KernelPatch(func, _layer(func), reason, _first_is_dtensor) for func in layers),
    ]


def _first_is_dtensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args) and isinstance(args[0], DTensor)


def _numbers(func: Any, t: Tensor, beside: DTensor) -> list[int]:
    """The values of lengths or sizes, which are the same on every rank."""
    if isinstance(t, DTensor):
        t = first_rank(gather(func, t))
    elif not is_simulated_tensor(beside):
        compare_plain(func, [t], [0], beside.device_mesh)
    return [int(n) for n in first_rank(t).tolist()]


def _pack(x: Any, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    func = aten._pack_padded_sequence.default
    counts = _numbers(func, lengths, x)
    x = x.transpose(0, 1) if batch_first else x
    if len(counts) != x.size(1):
        raise RuntimeError(f"Expected `len(lengths)` to be equal to batch_size, but got {len(counts)}")
    if counts != sorted(counts, reverse=True):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass "
            "`enforce_sorted=False` to pack_padded_sequence and/or pack_sequence to sidestep this requirement if you do "
            "not need ONNX exportability."
        )
    if not counts or counts[-1] <= 0:
        raise RuntimeError(
            "Length of all samples has to be greater than 0, but found an element that is <= 0"
        )
    sizes = [sum(n > t for n in counts) for t in range(counts[0])]
    return torch.cat([x[t, :n] for t, n in enumerate(sizes)]), torch.tensor(sizes)


def _unpack(
    data: Any, batch_sizes: Tensor, batch_first: bool, padding_value: Any, total_length: int
) -> tuple[Tensor, Tensor]:
    sizes = _numbers(aten._pad_packed_sequence.default, batch_sizes, data)
    lengths = torch.tensor([sum(n > i for n in sizes) for i in range(sizes[0])])
    if 0 < total_length < len(sizes):
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={total_length} and max sequence length being {len(sizes)}"
        )
    rest = [0] * 2 * (data.dim() - 1)
    steps = [F.pad(s, (*rest, 0, sizes[0] - len(s)), value=padding_value) for s in data.split(sizes)]
    out = torch.stack(steps)
    if total_length > len(sizes):
        out = F.pad(out, (*rest, 0, 0, 0, total_length - len(sizes)), value=padding_value)
    return out.transpose(0, 1) if batch_first else out, lengths


def _layer(func: Any) -> Callable[..., Any]:
    """A recurrent layer: its initial states, which torch's modules create, are compared between ranks and replicated."""

    def run(data: Any, batch_sizes: Tensor, hx: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = torch.tensor(_numbers(func, batch_sizes, data))
        states = replicated_states(func, data, hx)
        with beneath_patches():
            return func(data, sizes, states, *args, **kwargs)

    return run
