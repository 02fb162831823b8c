"""Ops of our own in graphs, and among them ops with an effect, which compilers neither reorder, repeat nor remove."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.effects import EffectType
from torch._library.simple_registry import singleton

__all__ = ["define_op"]

_library = torch.library.Library("shardwise", "FRAGMENT")


def define_op(
    schema: str, run: Callable[..., Any], infer: Callable[..., Any], *, has_effect: bool = False
) -> Any:
    """A new op `torch.ops.shardwise.NAME`, without a gradient.

    Args:
        schema: its name, arguments and results, as `torch.library.Library.define` takes them.
        run: computes it.
        infer: the same for tensors without values.
        has_effect: it depends on the order of calls: graphs keep it where it is, and a checkpoint saves its result.

    >>> double = define_op("doctest_double(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
    >>> double(torch.ones(1))
    tensor([2.])
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwise::{name}", infer, lib=_library)
    if has_effect:
        singleton.find(f"shardwise::{name}").effect.register(EffectType.ORDERED)
    return getattr(torch.ops.shardwise, name).default
