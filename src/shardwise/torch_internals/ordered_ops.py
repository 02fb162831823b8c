"""Ops of our own in graphs, and among them ops with an effect, which compilers neither reorder, repeat nor remove."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._library.effects import EffectType
from torch._library.simple_registry import singleton
from torch.utils.checkpoint import CheckpointPolicy

from shardwise.torch_internals.module_fixer import after_import

__all__ = ["define_op"]

_with_effect: set[Any] = set()
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
    op = getattr(torch.ops.shardwise, name).default
    if has_effect:
        _with_effect.add(op)
    return op


def _save_effects(partitioners: ModuleType) -> None:
    """Have checkpoints in compiled code save the results of ops with an effect; torch would run the op again."""
    original = partitioners.force_save_effectful_ops

    def force_save(joint_module: torch.fx.GraphModule) -> None:
        for node in joint_module.graph.nodes:
            called = node.args[1] if node.op == "call_function" and len(node.args) > 1 else None
            if any(called is op for op in _with_effect):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        original(joint_module)

    partitioners.force_save_effectful_ops = force_save  # type: ignore[attr-defined]


after_import("torch._functorch.partitioners", _save_effects)
