"""Composite ops of torch that write to a plain tensor of their own: as programs of other ops, which have no such tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the usual name)

from shardwise.call.operands import has_dtensor
from shardwise.torch_internals.patches import KernelPatch, beneath_patches

__all__ = ["composite_patches"]

aten = torch.ops.aten


def composite_patches() -> list[KernelPatch]:
    """The patches of these ops."""
    reason = "torch writes to a plain tensor that it creates"
    return [
        KernelPatch(aten.pad_sequence.default, _pad_sequence, reason, has_dtensor),
        KernelPatch(aten.vander.default, _vander, reason, has_dtensor),
    ]


def _pad_sequence(
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    if padding_side not in ("left", "right"):
        raise RuntimeError(f"Expected padding_side to be one of left or right, but got {padding_side}.")
    longest = max(s.size(0) for s in sequences)
    dtype = sequences[0].dtype

    def padded(s: Tensor) -> Tensor:
        missing = longest - s.size(0)
        ends = (missing, 0) if padding_side == "left" else (0, missing)
        return F.pad(s.to(dtype), (*[0] * 2 * (s.dim() - 1), *ends), value=padding_value)

    return torch.stack([padded(s) for s in sequences], 0 if batch_first else 1)


def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:  # noqa: N803 (the name in the schema)
    columns = x.numel() if N is None else N
    if x.dim() != 1 or columns < 0:
        with beneath_patches():
            return torch.vander(x, N, increasing)  # which raises
    out = torch.ones_like(x).unsqueeze(-1)[:, :columns]
    if columns > 1:  # else the result does not depend on the values
        out = torch.cat([out, x.unsqueeze(-1).expand(-1, columns - 1).cumprod(-1)], -1)
    return out.to(x.dtype) if increasing else out.to(x.dtype).flip(-1)
