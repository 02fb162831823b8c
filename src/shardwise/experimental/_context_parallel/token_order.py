"""The order of tokens in context parallelism: which of them each rank has."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HeadTailLoadBalancer", "LoadBalancer", "is_balanced", "restoring_order", "runs_of"]


class LoadBalancer:
    """An order of tokens."""

    def _generate_indices(self, restore: bool = False) -> Tensor | None:
        """The positions of the tokens, rank by rank, of shape (1, length); or with `restore` the order that undoes it."""
        raise NotImplementedError(f"{type(self).__name__} does not define _generate_indices")


class HeadTailLoadBalancer(LoadBalancer):
    """Rank r of n has parts r and 2n - 1 - r of 2n, so that a causal mask leaves each rank as much to do.

    Args:
        seq_length: the number of tokens, a multiple of `2 * world_size`.
        world_size: the number of ranks.
        device: where the indices are.

    >>> HeadTailLoadBalancer(8, 2, "cpu")._generate_indices()
    tensor([[0, 1, 6, 7, 2, 3, 4, 5]], dtype=torch.int32)
    """

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device) -> None:
        if seq_length % (2 * world_size):
            raise ValueError(
                f"_HeadTailLoadBalancer got a sequence of length {seq_length} for {world_size} ranks.\n"
                "  why: Each rank has two parts of one size.\n"
                f"  fix: Pad the sequence to a multiple of {2 * world_size}."
            )
        self.seq_length, self.world_size, self.device = seq_length, world_size, device

    def _generate_indices(self, restore: bool = False) -> Tensor:
        order = _order(self.world_size, self.seq_length // self.world_size, balanced=True)
        if restore:
            order = torch.argsort(order)
        return order.to(device=self.device, dtype=torch.int).unsqueeze(0)


def is_balanced(wanted: bool, length: int) -> bool:
    """Whether blocks of some length are in head-tail order, if that is wanted: they need two parts of one size."""
    return wanted and length % 2 == 0


def runs_of(rank: int, ranks: int, length: int, balanced: bool) -> list[tuple[int, int]]:
    """The tokens of a rank as runs (first, number), in the order in which it has them.

    Args:
        rank: its position among the ranks.
        ranks: their number.
        length: the number of tokens of a rank.
        balanced: in head-tail order.

    >>> [runs_of(rank, 2, 4, balanced=True) for rank in (0, 1)]
    [[(0, 2), (6, 2)], [(2, 2), (4, 2)]]
    """
    if not balanced:
        return [(rank * length, length)]
    half = length // 2
    return [(rank * half, half), ((2 * ranks - 1 - rank) * half, half)]


def restoring_order(ranks: int, length: int, device: torch.device) -> Tensor:
    """Where each token is among the blocks in head-tail order, one after the other."""
    return torch.argsort(_order(ranks, length, balanced=True)).to(device)


def _order(ranks: int, length: int, *, balanced: bool) -> Tensor:
    runs = [run for rank in range(ranks) for run in runs_of(rank, ranks, length, balanced)]
    return torch.cat([torch.arange(start, start + number) for start, number in runs])
