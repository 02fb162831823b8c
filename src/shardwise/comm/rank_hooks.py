"""Hooks of PerRank tensors: each is called once per backward pass, with the gradients of all ranks.

On real processes a hook runs on each rank and may call collectives, which need the gradients of all ranks. So the blocks
of a tensor with hooks get one autograd node in common; what uses the tensor later uses the outputs of that node.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.per_rank import PerRank, RankHandles, on_all_ranks
from shardwise.torch_internals.autograd_function import queue_callback

__all__ = ["install_hooks"]

Hook = Callable[[Any], Any]


class _Handle:
    """What `register_hook` returns."""

    def __init__(self, hooks: dict[int, Hook], key: int) -> None:
        self._hooks, self._key = hooks, key

    def remove(self) -> None:
        self._hooks.pop(self._key, None)

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class _Hooks:
    """The hooks of one PerRank tensor, in the order in which they were registered."""

    def __init__(self) -> None:
        self.hooks: dict[int, Hook] = {}
        self.results: dict[int, Tensor] = {}  # by rank: what the hooks returned in this backward pass
        self._next = 0

    def add(self, hook: Hook) -> _Handle:
        self.hooks[self._next] = hook
        self._next += 1
        return _Handle(self.hooks, self._next - 1)

    def run(self, grads: dict[int, Tensor]) -> dict[int, Tensor]:
        """The gradients after all hooks."""
        for hook in tuple(self.hooks.values()):
            new: Any = hook(PerRank(grads))
            if new is not None:
                grads = (
                    new._blocks if isinstance(new, PerRank) else PerRank(dict.fromkeys(grads, new))._blocks
                )
        return grads

    def check(self, rank: int, grad: Tensor) -> Tensor | None:
        """See that the gradient of a block came through the hooks; run them on this rank alone if none did."""
        done = self.results.pop(rank, None)
        if not self.hooks or done is grad:
            return None
        if done is None:
            return self.run({rank: grad})[rank]
        if torch.equal(done, grad):
            return None
        raise RuntimeError(
            "A hook was registered on a PerRank tensor that had been used before, and that was used again.\n"
            "  why: In a simulation a hook gets the gradients of what uses the tensor after register_hook only.\n"
            "  fix: Call register_hook before the tensor is used."
        )


class _HookNode(torch.autograd.Function):
    """`apply(hooks, ranks, *blocks)`: the blocks; in the backward pass the hooks change their gradients."""

    @staticmethod
    def forward(ctx: Any, hooks: _Hooks, ranks: tuple[int, ...], *blocks: Tensor) -> tuple[Tensor, ...]:
        ctx.hooks, ctx.ranks = hooks, ranks
        ctx.set_materialize_grads(False)
        return tuple(b.detach() for b in blocks)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = {r: g for r, g in zip(ctx.ranks, grads, strict=True) if g is not None}
        results = ctx.hooks.run(found) if found else {}
        ctx.hooks.results.update(results)
        return (None, None, *(results.get(r) for r in ctx.ranks))


def _register_hook(x: PerRank, hook: Hook) -> Any:
    if not all(b.requires_grad for b in x.ranks):
        raise RuntimeError(
            "cannot register a hook on a tensor that doesn't require gradient.\n"
            "  why: The hook would never be called.\n"
            "  fix: x.requires_grad_() first"
        )
    if x._hooked is None:
        hooks, ranks = _Hooks(), tuple(x._blocks)
        with torch.enable_grad():
            blocks = _HookNode.apply(hooks, ranks, *x.ranks)  # type: ignore[no-untyped-call]
        for r, b in x._blocks.items():
            b.register_hook(partial(hooks.check, r))
        x._hooked, x._hooks = PerRank(dict(zip(ranks, blocks, strict=True))), hooks
    return x._hooks.add(hook)


class _Arrivals:
    """The ranks whose gradient a backward pass has accumulated into a leaf; the hook runs when all have theirs."""

    def __init__(self, x: PerRank, hook: Hook) -> None:
        self.x, self.hook = x, hook
        self.ranks: list[int] = []

    def add(self, rank: int, _: Tensor) -> None:
        if not self.ranks:
            queue_callback(self.finish)
        self.ranks.append(rank)
        if len(self.ranks) == len(self.x._blocks):
            self.finish()

    def finish(self) -> None:
        """Call the hook; on a rank that got no gradient in this pass, it is not called."""
        ranks, self.ranks = self.ranks, []
        if len(ranks) == len(self.x._blocks):
            self.hook(self.x)
        elif ranks:
            self.hook(PerRank({r: b for r, b in self.x._blocks.items() if r in ranks}))


def _register_post_accumulate(x: PerRank, hook: Hook) -> Any:
    arrivals = _Arrivals(x, hook)
    handles = {
        r: b.register_post_accumulate_grad_hook(partial(arrivals.add, r)) for r, b in x._blocks.items()
    }
    return RankHandles(handles)


def _refuse_storage(x: PerRank) -> Any:
    raise RuntimeError(
        "The storage of a PerRank tensor was asked for.\n"
        "  why: In a simulation each rank has one; fake tensors, as of make_fx(tracing_mode='fake') and torch.compile, would "
        "stand for one tensor.\n"
        "  fix: make_fx(f, tracing_mode='real'), or x.ranks[0].untyped_storage(), or real processes: shardwise.launch(f, 2)"
    )


def install_hooks() -> None:
    """Have the methods of PerRank tensors that register hooks call those of this module."""
    on_all_ranks(torch.Tensor.register_hook, _register_hook)
    on_all_ranks(torch.Tensor.register_post_accumulate_grad_hook, _register_post_accumulate)
    on_all_ranks(torch.Tensor.untyped_storage, _refuse_storage)
