"""Sparse COO tensors: their parts, without the requirement that they are coalesced."""

from __future__ import annotations

from torch import Tensor

__all__ = ["coo_parts"]


def coo_parts(t: Tensor) -> list[Tensor]:
    """The indices and the values of a COO tensor, in which elements may occur several times.

    >>> import torch
    >>> coo_parts(torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=False))
    [tensor([[1, 1]]), tensor([2., 3.])]
    """
    return [t._indices(), t._values()]
