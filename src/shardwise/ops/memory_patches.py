"""Composite ops of torch that look at the memory of a tensor: at its storage offset, or at its conjugate bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.patches import KernelPatch, PythonPatch, beneath_patches

__all__ = ["memory_patches"]

aten = torch.ops.aten


def memory_patches() -> list[KernelPatch | PythonPatch]:
    """The patches of these ops."""
    return [
        PythonPatch(
            (torch.utils, "swap_tensors"),
            _swap_tensors,
            "torch reads the block of a view that had to move, where what it is a view of must be exchanged",
        ),
        PythonPatch(
            (torch, "view_as_real"),
            _view_as_real,
            "torch refuses a tensor with a conjugate bit, and a DTensor has none",
        ),
        KernelPatch(
            aten.fill_diagonal_.default,
            _fill_diagonal,
            "torch writes to a strided view at the storage offset of the tensor, and that of a DTensor is not its block's",
            lambda args, kwargs: isinstance(args[0], DTensor),
        ),
        *(
            KernelPatch(
                func,
                lambda x: x.clone(),
                "torch copies where the tensor has a lazy bit; a DTensor has a view without that bit instead",
                lambda args, kwargs, view=view: _is_lazy(args[0], view),  # type: ignore[misc]
            )
            for func, view in (
                (aten.resolve_conj.default, aten._conj.default),
                (aten.resolve_neg.default, aten._neg_view.default),
            )
        ),
    ]


def _swap_tensors(original: Any, t1: Any, t2: Any) -> None:
    views = [x for x in (t1, t2) if isinstance(x, DTensor) and x._source is not None]
    if not views or not (isinstance(t1, DTensor) and isinstance(t2, DTensor)):
        return original(t1, t2)  # type: ignore[no-any-return]
    classes = t1.__class__, t2.__class__
    try:
        for x in views:
            x.__class__ = DTensor  # whose slot is what it is
        original(t1, t2)
        classes = classes[1], classes[0]
    finally:
        t1.__class__, t2.__class__ = classes


def _view_as_real(original: Any, input: Any) -> Any:
    if isinstance(input, DTensor) and input.is_conj():
        raise RuntimeError(
            "view_as_real doesn't work on unresolved conjugated tensors.\n"
            "  why: The result would be a view of the memory, which has the values that are not conjugated.\n"
            "  fix: torch.view_as_real(x.resolve_conj())"
        )
    return original(input)


def _is_lazy(x: Any, view: Any) -> bool:
    """Whether a plain tensor in place of this one would have the bit that a view op sets."""
    found = False
    while isinstance(x, DTensor) and x._source is not None:
        found ^= x._source.func is view
        x = x._source.base
    return found


def _fill_diagonal(x: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    if x.dim() < 2 or (x.dim() > 2 and len(set(x.shape)) > 1):
        with beneath_patches():
            return x.fill_diagonal_(fill_value, wrap)  # torch says what is wrong
    diagonal = x.diagonal()
    for _ in range(x.dim() - 2):
        diagonal = diagonal.diagonal(0, 0, -1)
    diagonal.fill_(fill_value)
    rows, columns = x.shape[:2]
    if wrap and x.dim() == 2:
        for start in range(columns + 1, rows, columns + 1):
            x.diagonal(-start).fill_(fill_value)
    return x
