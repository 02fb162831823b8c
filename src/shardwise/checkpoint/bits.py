"""Tensors as arrays of their bits, which share their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["bits_of", "empty_bits", "tensor_of"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> NDArray[Any]:
    """The bits of a tensor on the CPU as integers; elements of 16 bytes get a last dim of two.

    >>> bits_of(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)).tolist()
    [16256, 16384]
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.dtype.itemsize]).numpy()


def empty_bits(shape: tuple[int, ...], itemsize: int) -> NDArray[Any]:
    """An array for the bits of a tensor of this shape."""
    if itemsize == 16:
        return np.empty((*shape, 2), np.int64)
    return np.empty(shape, {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[itemsize])


def tensor_of(bits: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """The tensor with these bits, in the same memory."""
    found = torch.from_numpy(bits)
    if dtype.itemsize == 16:
        return torch.view_as_complex(found.view(torch.float64))
    return found.view(dtype)
