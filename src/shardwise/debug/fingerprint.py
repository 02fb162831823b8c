"""Fingerprints of tensors: numbers of 63 bits that differ, for all practical purposes, if one bit of two tensors does."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardwise.comm import is_sparse, parts_of
from shardwise.comm.codec import bytes_of
from shardwise.torch_internals.lazy_bits import is_lazy_zero

__all__ = ["fingerprint", "fingerprint_on_device"]

_SMALL_BYTES = 16384
_COLUMNS = 1021
"""A prime, so that rows of a tensor that change places do not keep the sums of the columns."""
_SALT = 0x5DEECE66


def fingerprint(block: Tensor, order: Sequence[int] | None = None) -> int | Tensor:
    """The fingerprint of a block; on an accelerator a tensor with one element, so that nothing waits for it.

    Small blocks are hashed byte by byte. Of large ones 1021 sums of every 1021st word of 64 bits are hashed, and the first and
    last bytes: that takes less time than one op that reads the block.

    Args:
        block: the block.
        order: an order of its dims in which its elements are likely to be next to each other in memory.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> fingerprint(x) == fingerprint(x.clone()), fingerprint(x) == fingerprint(x.flip(0))
    (True, False)
    """
    if is_lazy_zero(block):
        return 0
    if is_sparse(block):
        return zlib.crc32(repr([fingerprint(part) for part in parts_of(block)]).encode())
    if order is not None and block.dim() == len(order) > 1:
        block = block.detach().permute(*order)
    if not block.is_cpu:
        return fingerprint_on_device(block.detach())
    if not block.is_contiguous() or block.is_neg() or block.is_conj():
        block = bytes_of(block.detach().reshape(-1))
    size = block.nbytes
    if size <= _SMALL_BYTES:
        return zlib.crc32(_memory(block.data_ptr(), size)) | _SALT << 32 if size else 0
    sums, used = _column_sums(block.detach())
    start = block.data_ptr()
    found = zlib.crc32(_memory(sums.data_ptr(), 8 * _COLUMNS))
    ends = zlib.crc32(_memory(start, 4096))
    ends = zlib.crc32(_memory(start + used, size - used), ends)
    return (found << 31) ^ ends


_array_types: dict[int, Callable[[int], ctypes.Array[ctypes.c_char]]] = {}


def _memory(start: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """The bytes at an address."""
    kind = _array_types.get(size)
    if kind is None:
        kind = _array_types[size] = (ctypes.c_char * size).from_address
    return kind(start)


def _column_sums(block: Tensor) -> tuple[Tensor, int]:
    """The sums of the columns of a contiguous tensor in rows of 1021 words, and how many bytes these rows have."""
    words = bytes_of(block.reshape(-1))
    used = words.numel() // (8 * _COLUMNS) * 8 * _COLUMNS
    return words[:used].view(torch.int64).view(-1, _COLUMNS).sum(0), used


def fingerprint_on_device(block: Tensor) -> Tensor:
    """A fingerprint that is computed where the block is.

    >>> x = torch.arange(9000.0)
    >>> fingerprint_on_device(x).equal(fingerprint_on_device(x.roll(1)))
    False
    """
    words = bytes_of(block.reshape(-1))
    rest = words.new_zeros(-words.numel() % (8 * _COLUMNS))
    rows = torch.cat([words, rest]).view(torch.int64).view(-1, _COLUMNS)
    weights = _weights(_COLUMNS, block.device)
    if rows.shape[0] == 0:
        return torch.zeros((), dtype=torch.int64, device=block.device)
    return (rows.sum(0) * weights).sum() ^ (rows[0] * weights.flip(0)).sum() * 3


@lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers, one for each column."""
    index = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    return (index * 0x1E3779B97F4A7C15) ^ (index << 29) | 1
