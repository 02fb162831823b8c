"""Backward passes of PerRank tensors: one for all ranks, so that collectives in the graph see all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.per_rank import PerRank, on_all_ranks

__all__ = ["install_autograd"]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _blocks_of(value: Any) -> list[Any]:
    return list(value.ranks) if isinstance(value, PerRank) else [value]


def _roots_of(value: Any) -> list[Any]:
    return list(value.tracked.ranks) if isinstance(value, PerRank) else [value]


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """Run backward on all ranks at once, so that collectives in the graph see all of them."""
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = [b for x in _as_list(kwargs["inputs"]) for b in _blocks_of(x)]
    torch.autograd.backward(*_roots_and_seeds(tensors, grad_tensors), *args, **kwargs)


def _roots_and_seeds(tensors: Any, grads: Any) -> tuple[list[Any], list[Any]]:
    """The blocks of all ranks, and the gradient of each."""
    roots = _as_list(tensors)
    seeds = _as_list(grads) or [None] * len(roots)
    pairs = [(_roots_of(root), seed) for root, seed in zip(roots, seeds, strict=True)]
    every = [list(seed.ranks) if isinstance(seed, PerRank) else [seed] * len(bs) for bs, seed in pairs]
    return [b for blocks, _ in pairs for b in blocks], [g for some in every for g in some]


def _tensor_backward(
    self: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    _backward(self, gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> tuple[Any, ...]:
    leaves = _as_list(inputs)
    roots, seeds = _roots_and_seeds(outputs, grad_outputs)
    rest = iter(torch.autograd.grad(roots, [b for x in leaves for b in _blocks_of(x)], seeds, **kwargs))
    every = [(leaf, [next(rest) for _ in _blocks_of(leaf)]) for leaf in leaves]
    return tuple(_grads_of(leaf, g) if isinstance(leaf, PerRank) else g[0] for leaf, g in every)


def _grads_of(leaf: PerRank, grads: Sequence[Any]) -> PerRank | None:
    if all(g is None for g in grads):
        return None
    # on a rank whose block was not used, the gradient is zero
    pairs = zip(leaf._blocks.items(), grads, strict=True)
    return PerRank({r: torch.zeros_like(b) if g is None else g for (r, b), g in pairs})


def _get_grad(self: PerRank) -> PerRank | None:
    return _grads_of(self, [b.grad for b in self.ranks])


def install_autograd() -> None:
    """Have the functions of autograd run on all ranks at once."""
    on_all_ranks(torch.Tensor.backward, _tensor_backward)
    on_all_ranks(torch.autograd.backward, _backward)
    on_all_ranks(torch.autograd.grad, _grad)
    on_all_ranks(torch.Tensor.grad.__get__, _get_grad)  # type: ignore[union-attr]
