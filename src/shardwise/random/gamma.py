"""Gamma numbers, exactly, by rejection."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.layout.errors import LayoutError
from shardwise.random.block_indices import Cells
from shardwise.random.normal import box_muller
from shardwise.random.numpy_or_torch import root
from shardwise.random.philox import Draw
from shardwise.random.rejection import Tries, log, parts_of, pick, power

__all__ = ["gamma"]


@torch.no_grad()
def gamma(draw: Draw, cells: Cells, alpha: Tensor) -> Tensor:
    """A block of standard gamma numbers, in the dtype of their shape parameters, a tensor of the block's shape."""
    if alpha.numel() and not bool(((alpha > 0) & alpha.isfinite()).all()):
        raise LayoutError(
            "gamma of a shape that is not positive or not finite.",
            why="there is no such number",
            fix="clamp them",
        )
    least = torch.finfo(alpha.dtype).tiny
    out = torch.empty(cells.numel, dtype=alpha.dtype, device=alpha.device)
    for part, tries, (shape,) in parts_of(draw, cells, alpha):
        boosted = shape < 1.0
        every = torch.arange(len(shape), device=shape.device)
        boost, _ = tries.uniforms(every)
        shape_up = torch.where(boosted, shape + 1.0, shape)
        value = torch.empty_like(shape)

        def attempt(at: Tensor, shape: Tensor = shape_up, tries: Tries = tries) -> tuple[Tensor, Tensor]:
            return _try_gamma(pick(shape, at), at, tries)

        tries.until_accepted(every, attempt, value)
        # of shape a: one of shape a + 1 times u**(1/a)
        value *= torch.where(boosted, power(log(boost) / shape), 1.0)
        out[part] = value.clamp_(min=least)
    return out.view(cells.shape)


def _try_gamma(shape: Tensor, places: Tensor, tries: Tries) -> tuple[Tensor, Tensor]:
    """G. Marsaglia and W. W. Tsang, A simple method for generating gamma variables, 2000."""
    x, _ = box_muller(*tries.words(places))
    u, _ = tries.uniforms(places)
    d = shape - 1 / 3
    c = 1.0 / (3.0 * root(d.clone()))
    base = 1.0 + c * x
    positive = base > 0
    base = torch.where(positive, base, 1.0)
    v = base * base * base
    square = x * x
    right = 0.5 * square
    right += d
    right -= d * v
    right += d * log(v)
    return d * v, positive & (log(u) < right)
