"""What a captured program depends on: of its arguments, and of the objects that the step refers to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm import PerRank
from shardwise.plan.settings import current_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.subclass import storage_id

__all__ = ["REFERENCES", "Signature", "keys_of", "known_ids"]

REFERENCES = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes of recurrent layers that refer to their parameters once more; torch keeps them up to date."""
_SIMPLE = (int, float, bool, str, type(None), torch.dtype, torch.device)


def keys_of(leaves: Sequence[Any], known: Collection[int] = ()) -> list[Any]:
    """What a program depends on of its arguments: the kinds of tensors, which of them share memory, and other values.

    Args:
        leaves: the arguments.
        known: the ids of tensors that the step has besides; an argument that is one of them is part of the program.
    """
    places: dict[int, int] = {}
    return [_key_of(x, i, places, known) for i, x in enumerate(leaves)]


def _key_of(leaf: Any, i: int, places: dict[int, int], known: Collection[int]) -> Any:
    if not isinstance(leaf, Tensor):
        return (type(leaf), leaf)
    grad = leaf.grad if leaf.is_leaf else None
    same = places.setdefault(_memory(leaf), i)
    me = id(leaf) if id(leaf) in known else 0
    return (_kind(leaf), leaf.requires_grad, leaf.is_leaf, _kind(grad), same, me)


def _memory(x: Any) -> int:
    block = x._local_tensor if isinstance(x, DTensor) else x
    if isinstance(block, PerRank):
        block = block.ranks[0]
    return id(x) if block.is_meta else storage_id(block)


def _kind(x: Tensor | None) -> Any:
    """What ops on a tensor depend on besides its values."""
    if x is None:
        return None
    if isinstance(x, DTensor):
        return x._spec
    return (type(x), tuple(x.shape), x.dtype, x.device, x.stride() if x.layout is torch.strided else x.layout)


def known_ids(optimizer: Optimizer | None, modules: Sequence[nn.Module]) -> set[int]:
    """The ids of the tensors of an optimizer and of modules."""
    found = {id(t) for m in modules for t in (*m.parameters(), *m.buffers())}
    if optimizer is not None:
        found |= {id(p) for g in optimizer.param_groups for p in g["params"]}
    return found


class Signature:
    """The objects that a training step refers to, and the modes that it runs in, at one time.

    Two are equal if a program that was captured at one time is right at the other: modules, parameters, buffers, hooks and the
    other attributes are the same objects, or equal numbers and texts; parameters have the same kinds, and gradients of the same
    kinds; autocast, grad mode, policy and cost model are the same. Objects are held, so that no other takes their address.
    """

    __slots__ = ("modes", "objects")

    def __init__(self, model: nn.Module, params: Sequence[Tensor], read: Sequence[Any] = ()) -> None:
        settings = current_settings()
        self.modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            settings.implicit,
            settings.plain,
            settings.decisions.model,
            _autocast("cpu"),
            _autocast("cuda"),
        )
        objects: list[Any] = [*read]
        for module in model.modules():
            for name, value in module.__dict__.items():
                if isinstance(value, dict):
                    objects.extend(value.values())
                elif name not in REFERENCES:
                    objects.append(value)
        for p in params:
            objects.append(p)
            objects.append(p.requires_grad)
            objects.append(_Kind(p))
            objects.append(_Kind(p.grad))
        self.objects = objects

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Signature)
            and self.modes == other.modes
            and len(self.objects) == len(other.objects)
            and all(map(_same, self.objects, other.objects))
        )

    __hash__ = None  # type: ignore[assignment]


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


class _Kind:
    """The kind of a tensor, compared by value."""

    __slots__ = ("of",)

    def __init__(self, x: Tensor | None) -> None:
        self.of = _kind(x)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is _Kind:
        return bool(a.of == b.of)
    return type(a) in _SIMPLE and bool(a == b)
