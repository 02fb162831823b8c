"""Ops that only torch's own generator serves: it is seeded from the stream for the call, and then as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.random.philox import Draw, philox

__all__ = ["borrowing", "draws_now"]

_UNTAGGED = ("aten::binomial", "aten::_standard_gamma", "aten::_sample_dirichlet")


def draws_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws numbers: ops that can drop out do so only where they are told how often."""
    if torch.Tag.nondeterministic_seeded not in func.tags and func._schema.name not in _UNTAGGED:
        return False
    for i, arg in enumerate(func._schema.arguments):
        if arg.name in ("dropout_p", "dropout"):
            return bool(args[i] if i < len(args) else kwargs.get(arg.name))
    return True


def borrowing(func: Callable[..., Any], draw: Draw) -> Callable[..., Any]:
    """The op, drawing numbers that depend on the place in the stream and on nothing else."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        generators = _generators([*args, *kwargs.values()])
        before = [g.get_state() for g in generators]
        seed = _seed(draw)
        for g in generators:
            g.manual_seed(seed)
        try:
            return func(*args, **kwargs)
        finally:
            for g, state in zip(generators, before, strict=True):
                g.set_state(state)

    return run


def _generators(values: list[Any]) -> list[torch.Generator]:
    """The default generators of the devices that an op's tensors are on, and of the CPU."""
    out = [torch.default_generator]
    devices = {t.device for t in tree_leaves(values) if isinstance(t, Tensor)}
    for device in devices:
        module = torch.get_device_module(device) if device.type not in ("cpu", "meta") else None
        if module is not None and hasattr(module, "default_generators"):
            out.append(module.default_generators[device.index or 0])
    return out


def _seed(draw: Draw) -> int:
    """A number of 63 bits that no other call has: two words of a lane that nothing else uses."""
    low, high, _, _ = philox((0, 0xFFFF0000, draw.position & 0xFFFFFFFF, draw.position >> 32), draw.seed)
    return int(low | high >> 1 << 32)
