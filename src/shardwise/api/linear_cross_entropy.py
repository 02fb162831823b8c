"""A projection to classes and its cross entropy, in chunks of tokens, so that the logits of all tokens never exist."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.layout import Layout
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.graph_calls import call_while_tracing

__all__ = ["linear_cross_entropy"]

_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_size: int = 1024,
) -> Tensor:
    """The cross entropy of `linear(input, weight, bias)`, with the logits of one chunk of tokens in memory at a time.

    Args:
        input: activations of shape (..., features), in any layout.
        weight: the projection, (classes, features); its classes may be split.
        target: class indices of shape (...), or class probabilities of shape (..., classes).
        bias: added to the logits.
        class_weight: a weight for each class.
        ignore_index: the target of tokens that do not count.
        reduction: "mean" over the tokens that count (by their class weights), "sum", or "none".
        label_smoothing: how much of each target is spread over all classes.
        chunk_size: the number of tokens per chunk on each rank. The logits of a chunk are computed again in the backward pass.

    Returns:
        The loss; of the shape (...) for reduction "none".

    Raises:
        ValueError: `reduction` is unknown, or `chunk_size` is not positive.

    It sends what the ops of the loss send for each chunk: of logits whose classes are split, the maxima and sums.

    >>> import shardwise as sw
    >>> x, w, y = torch.randn(6, 4), torch.randn(5, 4), torch.tensor([0, 1, 2, -100, 3, 4])
    >>> loss = linear_cross_entropy(x, w, y, chunk_size=2)
    >>> torch.allclose(loss, F.cross_entropy(F.linear(x, w), y))
    True
    """
    if reduction not in _REDUCTIONS or chunk_size < 1:
        raise ValueError(
            f"linear_cross_entropy got reduction={reduction!r} and chunk_size={chunk_size}.\n"
            f"  why: The reduction is one of {', '.join(_REDUCTIONS)}, and a chunk has at least one token.\n"
            '  fix: linear_cross_entropy(x, w, y, reduction="mean", chunk_size=1024)'
        )
    probabilities = target.dim() == input.dim()
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}

    def chunk_loss(x: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(x, weight, bias).flatten(0, -2)
        labels = y.flatten(0, -2) if probabilities else y.flatten()
        kind = "none" if reduction == "none" else "sum"
        return F.cross_entropy(logits, labels, class_weight, reduction=kind, **options)  # type: ignore[arg-type]

    dim, count = _chunking(input, chunk_size)
    pairs = zip(input.chunk(count, dim), target.chunk(count, dim), strict=True)
    losses = [
        _recomputed(chunk_loss, x, y).view(y.shape[:-1] if probabilities else y.shape)
        if reduction == "none"
        else _recomputed(chunk_loss, x, y)
        for x, y in pairs
    ]
    if reduction == "none":
        return torch.cat(losses, dim)
    total = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
    if reduction == "sum":
        return total
    return total / (
        math.prod(target.shape[:-1]) if probabilities else _count(target, class_weight, ignore_index)
    )


def _recomputed(fn: Any, x: Tensor, y: Tensor) -> Tensor:
    return checkpoint(fn, x, y, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _chunking(x: Tensor, chunk_size: int) -> tuple[int, int]:
    """The dim of the tokens to cut, and into how many chunks."""
    return _choose_chunks(tuple(x.shape), x.sharding if isinstance(x, DTensor) else None, chunk_size)


@call_while_tracing
def _choose_chunks(shape: tuple[int, ...], layout: Layout | None, chunk_size: int) -> tuple[int, int]:
    """A dim that no axis splits, the largest, since cutting it sends nothing; and the number of chunks."""
    splits = [1] * (len(shape) - 1)
    if layout is not None:
        splits = [math.prod(layout.axes.sizes[a] for f in dim for a in f.axes) for dim in layout.dims[:-1]]
    tokens = math.prod(shape[:-1]) // math.prod(splits)
    whole = [d for d, n in enumerate(splits) if n == 1]
    dim = max(whole or range(len(shape) - 1), key=lambda d: shape[d])
    return dim, max(1, min(shape[dim], -(-tokens // chunk_size)))


def _count(target: Tensor, class_weight: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean divides by: the number of tokens that count, or the sum of their class weights."""
    valid = target != ignore_index
    if class_weight is None:
        return valid.sum()
    weights = F.embedding(target.masked_fill(~valid, 0), class_weight[:, None]).squeeze(-1)
    return (weights * valid).sum()
