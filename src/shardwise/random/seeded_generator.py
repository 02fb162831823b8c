"""Ops that draw from torch's own generator, which is seeded from the stream for the call and restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.random.philox import Draw, philox

__all__ = ["with_seeded_generator"]


def with_seeded_generator(func: Callable[..., Any], draw: Draw) -> Callable[..., Any]:
    """The op with torch's default generators seeded from the stream, unless the call passes a generator."""

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
    """The default generators of the CPU and of the devices of an op's tensors."""
    out = [torch.default_generator]
    for device in set(_devices(values)):
        module = torch.get_device_module(device) if device.type not in ("cpu", "meta") else None
        if module is not None and hasattr(module, "default_generators"):
            out.append(module.default_generators[device.index or 0])
    return out


def _devices(values: Iterable[Any]) -> Iterator[torch.device]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.device
        elif isinstance(value, list | tuple):
            yield from _devices(value)


def _seed(draw: Draw) -> int:
    """A 63-bit seed that differs from call to call: two words of a lane that no distribution uses."""
    low, high, _, _ = philox((0, 0xFFFF0000, draw.position & 0xFFFFFFFF, draw.position >> 32), draw.seed)
    return int(low | high >> 1 << 32)
