"""Exact gamma numbers, by rejection."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.random.block_indices import BlockIndices
from shardwise.random.normal import box_muller
from shardwise.random.numpy_or_torch import sqrt_
from shardwise.random.philox import Draw
from shardwise.random.rejection import Attempts, attempts_by_part, exp, log

__all__ = ["gamma"]


@torch.no_grad()
def gamma(draw: Draw, indices: BlockIndices, alpha: Tensor) -> Tensor:
    """A block of standard gamma numbers with finite shape parameters `alpha` > 0, of the block's shape and dtype."""
    out = torch.empty(indices.numel, dtype=alpha.dtype, device=alpha.device)
    for part, attempts, (shape,) in attempts_by_part(draw, indices, alpha):
        small = shape < 1.0
        every = torch.arange(len(shape), device=shape.device)
        u, _ = attempts.uniforms(every)
        value = torch.empty_like(shape)
        attempts.until_accepted(every, value, _attempt, torch.where(small, shape + 1.0, shape))
        # gamma(a) is gamma(a + 1) * u**(1/a)
        value *= torch.where(small, exp(log(u) / shape), 1.0)
        out[part] = value.clamp_(min=torch.finfo(alpha.dtype).tiny)
    return out.view(indices.shape)


def _attempt(attempts: Attempts, positions: Tensor, shape: Tensor) -> tuple[Tensor, Tensor]:
    """G. Marsaglia and W. W. Tsang, A simple method for generating gamma variables, 2000."""
    x, _ = box_muller(*attempts.words(positions))
    u, _ = attempts.uniforms(positions)
    d = shape - 1 / 3
    c = 1.0 / (3.0 * sqrt_(d.clone()))
    base = 1.0 + c * x
    positive = base > 0
    base = torch.where(positive, base, 1.0)
    v = base * base * base
    return d * v, positive & (log(u) < 0.5 * (x * x) + d - d * v + d * log(v))
