"""Autograd nodes of all simulated ranks at once: `torch.autograd.Function` on PerRank tensors, and hooks of nodes.

On real processes each rank calls the function, and its code may call collectives. Here one node has the blocks of all
ranks as its inputs and outputs, and the function's code runs once, on PerRank tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.per_rank import PerRank, check_no_shared_leaves, join, on_all_ranks, ranks_in, spread
from shardwise.torch_internals.autograd_function import bind_arguments, has_setup_context, intercept_functions

__all__ = ["Bundle", "RankNodes", "replace_function"]

Ranks = tuple[int, ...]


class Bundle:
    """How a list of values with PerRank tensors among them is written as a flat list of blocks.

    >>> x = PerRank({0: torch.ones(1), 1: torch.zeros(2)})
    >>> bundle, flat = Bundle.of([x, 3], (0, 1))
    >>> flat
    [tensor([1.]), tensor([0., 0.]), 3]
    >>> bundle.join(flat)[1]
    3
    """

    def __init__(self, kinds: Sequence[tuple[int, ...] | None], ranks: Ranks) -> None:
        self.kinds, self.ranks = tuple(kinds), ranks

    @staticmethod
    def of(values: Sequence[Any], ranks: Ranks) -> tuple[Bundle, list[Any]]:
        """The form of some values, and their blocks."""
        kinds = [tuple(v._blocks) if isinstance(v, PerRank) else None for v in values]
        return Bundle(kinds, ranks), [b for v in values for b in _flat(v)]

    def join(self, flat: Sequence[Any]) -> list[Any]:
        """The values of these blocks; a rank without one is left out, and None on all ranks is None."""
        rest = iter(flat)
        return [next(rest) if kind is None else _joined({r: next(rest) for r in kind}) for kind in self.kinds]

    def split(self, values: Sequence[Any]) -> list[Any]:
        """The blocks of other values of this form; one that is not a PerRank tensor is the same on all ranks."""
        out: list[Any] = []
        for kind, value in zip(self.kinds, values, strict=True):
            if kind is None:
                out.append(value)
            elif isinstance(value, PerRank):
                out.extend(value._blocks.get(r) for r in kind)
            else:
                out.extend([value] * len(kind))
        return out


def _flat(value: Any) -> list[Any]:
    return list(value.tracked._blocks.values()) if isinstance(value, PerRank) else [value]


def _joined(blocks: dict[int, Any]) -> PerRank | None:
    found = {r: b for r, b in blocks.items() if b is not None}
    return PerRank(found) if found else None


class _Context:
    """The `ctx` that the code of a function gets: it saves and returns PerRank tensors."""

    def __init__(self, inputs: Bundle) -> None:
        self._inputs, self._saved = inputs, inputs
        self._node: Any = None

    def save_for_backward(self, *tensors: Any) -> None:
        self._saved, flat = Bundle.of(tensors, self._inputs.ranks)
        self._node.save_for_backward(*flat)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(self._saved.join(self._node.saved_tensors))

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        _, *flat = self._node.needs_input_grad
        rest = iter(flat)
        return tuple(any(list(islice(rest, _count(kind)))) for kind in self._inputs.kinds)

    def mark_dirty(self, *tensors: Any) -> None:
        self._node.mark_dirty(*[b for t in tensors for b in _flat(t)])

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._node.mark_non_differentiable(*[b for t in tensors for b in _flat(t)])

    def set_materialize_grads(self, value: bool) -> None:
        self._node.set_materialize_grads(value)


def _count(kind: Ranks | None) -> int:
    return 1 if kind is None else len(kind)


class _Call:
    """One call of a function: its arguments before, and its results after the call."""

    def __init__(self, cls: Any, args: Sequence[Any], ranks: Ranks) -> None:
        self.cls = cls
        self.inputs, self.flat = Bundle.of(args, ranks)
        self.tensors, _ = Bundle.of(
            [a for a in args if isinstance(a, Tensor)], ranks
        )  # hooks of a node see these
        self.outputs, self.is_tuple = self.inputs, False


class _Joint(torch.autograd.Function):
    """`apply(call, *blocks)`: the function of a call, on the blocks of all ranks."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *flat: Any) -> Any:
        ctx.call, ctx.user = call, _Context(call.inputs)
        ctx.user._node = ctx
        args = call.inputs.join(flat)
        if has_setup_context(call.cls):
            results = call.cls.forward(*args)
            call.cls.setup_context(ctx.user, tuple(args), results)
        else:
            results = call.cls.forward(ctx.user, *args)
        ctx.user._node = None  # no cycle of references
        call.is_tuple = isinstance(results, tuple)
        values = [_own(v, call.inputs.ranks) for v in (results if call.is_tuple else (results,))]
        call.outputs, blocks = Bundle.of(values, call.inputs.ranks)
        ctx.blanks = [(b.shape, b.dtype, b.device) if isinstance(b, Tensor) else None for b in blocks]
        return tuple(blocks)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        ctx.user._node = ctx
        try:
            found = call.cls.backward(ctx.user, *call.outputs.join(_filled(call.outputs, grads, ctx.blanks)))
        finally:
            ctx.user._node = None
        out = list(found) if isinstance(found, tuple) else [found]
        n = len(call.inputs.kinds)
        if len(out) < n or any(g is not None for g in out[n:]):
            raise RuntimeError(
                f"{call.cls.__name__}.backward returned {len(out)} gradients for {n} arguments.\n"
                "  why: There is one gradient for each argument of forward; None where there is none.\n"
                f"  fix: Return {n} values from {call.cls.__name__}.backward."
            )
        return (None, *call.inputs.split(out[:n]))


def _filled(outputs: Bundle, grads: Sequence[Any], blanks: Sequence[Any]) -> list[Any]:
    """Gradients of which those of an output that only some ranks used are zero on the others."""
    out, at = list(grads), 0
    for kind in outputs.kinds:
        n = _count(kind)
        if any(g is not None for g in out[at : at + n]):
            for i in range(at, at + n):
                if out[i] is None:
                    shape, dtype, device = blanks[i]
                    out[i] = torch.zeros(shape, dtype=dtype, device=device)
        at += n
    return out


def _own(value: Any, ranks: Ranks) -> Any:
    """A plain tensor as one tensor per rank, as on real processes."""
    return spread(value, ranks) if type(value) in (Tensor, torch.nn.Parameter) else value


_replacements: dict[str, Callable[..., Any]] = {}


def replace_function(name: str, run: Callable[..., Any]) -> None:
    """Have a function of torch, whose code has another branch for each rank, call `run` on PerRank tensors."""
    _replacements[name] = run


_joint_classes: weakref.WeakKeyDictionary[type, type[_Joint]] = weakref.WeakKeyDictionary()


def _apply(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`cls.apply(*args, **kwargs)` where PerRank tensors are among the arguments."""
    args = bind_arguments(cls, args, kwargs)
    if (run := _replacements.get(f"{cls.__module__}.{cls.__name__}")) is not None:
        return run(*args)
    if torch.is_grad_enabled():
        check_no_shared_leaves(cls.apply, args)
    call = _Call(cls, args, ranks_in(list(args)) or ())
    if (joint := _joint_classes.get(cls)) is None:
        joint = _joint_classes[cls] = type(cls.__name__, (_Joint,), {})  # nodes are named after their class
    flat, call.flat = call.flat, []
    blocks = joint.apply(call, *flat)  # type: ignore[no-untyped-call]
    results = call.outputs.join(blocks)
    return tuple(results) if call.is_tuple else results[0]


class RankNodes:
    """The `grad_fn` of a PerRank tensor: the nodes of all ranks, or the one node that they have in common."""

    def __init__(self, nodes: dict[int, Any]) -> None:
        self._nodes = nodes
        first, *others = nodes.values()
        self._joint = first if hasattr(first, "call") and all(n is first for n in others) else None

    def name(self) -> str:
        """The name of the nodes, which is the same on all ranks."""
        return join({r: n.name() for r, n in self._nodes.items()}, "grad_fn.name()")  # type: ignore[no-any-return]

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Register `hook(grad_inputs, grad_outputs)`, as torch's nodes do."""
        call: _Call = self._shared("register_hook").call

        def run(grad_inputs: Any, grad_outputs: Any) -> Any:
            new = hook(tuple(call.tensors.join(grad_inputs)), tuple(call.outputs.join(grad_outputs)))
            return None if new is None else tuple(call.tensors.split(_tuple(new)))

        return self._joint.register_hook(run)  # type: ignore[union-attr]

    def register_prehook(self, hook: Callable[..., Any]) -> Any:
        """Register `hook(grad_outputs)`, as torch's nodes do."""
        call: _Call = self._shared("register_prehook").call

        def run(grad_outputs: Any) -> Any:
            new = hook(tuple(call.outputs.join(grad_outputs)))
            return None if new is None else tuple(call.outputs.split(_tuple(new)))

        return self._joint.register_prehook(run)  # type: ignore[union-attr]

    def _shared(self, what: str) -> Any:
        if self._joint is None:
            raise RuntimeError(
                f"grad_fn.{what} on simulated ranks: each rank has its own {self.name()}.\n"
                "  why: The hook would run rank by rank, before the gradients of other ranks are known.\n"
                "  fix: x.register_hook(hook), which gets the gradients of all ranks."
            )
        return self._joint


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _grad_fn(x: PerRank) -> RankNodes | None:
    nodes = {r: b.grad_fn for r, b in x._blocks.items()}
    return None if all(n is None for n in nodes.values()) else RankNodes(nodes)


on_all_ranks(torch.Tensor.grad_fn.__get__, _grad_fn)  # type: ignore[union-attr]
intercept_functions(PerRank, _apply)
