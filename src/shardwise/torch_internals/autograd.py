"""The state of autograd: backward passes, the order in which they run nodes, forward-mode derivatives, and hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, forward_ad

__all__ = [
    "PROBE",
    "accumulates_everywhere",
    "accumulating_leaf",
    "are_hooked",
    "at_backward_end",
    "current_backward",
    "has_accumulation_hooks",
    "has_saved_tensor_hooks",
    "has_tangent",
    "in_backward",
    "optional_saved_tensor_hooks",
    "restore_hooks",
    "run_when_ready",
    "without_optional_hooks",
]

_current_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread is inside a backward pass.

    >>> seen = []
    >>> x = torch.ones(1, requires_grad=True)
    >>> _ = x.register_hook(lambda grad: seen.append(in_backward()))
    >>> (x * 2).sum().backward()
    >>> seen, in_backward()
    ([True], False)
    """
    return _current_task() != -1


def has_tangent(x: Tensor) -> bool:
    """Whether a tensor carries a forward-mode derivative.

    >>> has_tangent(torch.ones(1))
    False
    """
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def current_backward() -> int:
    """A number for the backward pass that this thread works for; -1 outside of one.

    >>> current_backward()
    -1
    """
    return _current_task()


def at_backward_end(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that runs, if it completes.

    >>> seen = []
    >>> x = torch.ones(1, requires_grad=True)
    >>> _ = x.register_hook(lambda grad: at_backward_end(lambda: seen.append("end")))
    >>> (x * 2).sum().backward()
    >>> seen
    ['end']
    """
    Variable._execution_engine.queue_callback(callback)


PROBE = torch.empty(0, requires_grad=True)
"""A leaf for nodes to have among their inputs that ask `accumulates_everywhere`."""
_probe_node = torch.autograd.graph.get_gradient_edge(PROBE).node


def accumulates_everywhere() -> bool:
    """Whether the backward pass that runs sets the gradients of all leaves, asked by a node that has `PROBE` as an input.

    `torch.autograd.grad` and `backward(inputs=…)` do not, and nobody can ask for the gradient of the probe.

    >>> seen = []
    >>> class F(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, probe, x):
    ...         return x * 2
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         seen.append(accumulates_everywhere())
    ...         return None, grad * 2
    >>> x = torch.ones(1, requires_grad=True)
    >>> F.apply(PROBE, x).backward()
    >>> _ = torch.autograd.grad(F.apply(PROBE, x), x)
    >>> seen
    [True, False]
    """
    return torch._C._will_engine_execute_node(_probe_node)


def are_hooked(leaves: Sequence[Tensor]) -> bool:
    """Whether one of the leaves has hooks that get its gradient.

    >>> x, y = (torch.ones(1, requires_grad=True) for _ in range(2))
    >>> _ = x.register_post_accumulate_grad_hook(print)
    >>> are_hooked([y, x]), are_hooked([y])
    (True, False)
    """
    for t in leaves:  # noqa: SIM110 - a generator takes twice as long
        if t._backward_hooks or t._post_accumulate_grad_hooks:
            return True
    return False


def accumulating_leaf() -> Tensor | None:
    """In a gradient hook: the tensor whose `grad` the running pass accumulates into next; None if it is returned instead.

    >>> x, seen = torch.ones(1, requires_grad=True), []
    >>> _ = x.register_hook(lambda grad: seen.append(accumulating_leaf() is x))
    >>> (x * 2).sum().backward()
    >>> _ = torch.autograd.grad((x * 2).sum(), x)
    >>> seen, accumulating_leaf()
    ([True, False], None)
    """
    if not in_backward():
        return None
    node = torch._C._current_autograd_node()
    leaf: Tensor | None = getattr(node, "variable", None)
    if leaf is None:
        return None
    try:
        return leaf if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # which torch raises for a leaf in `autograd.grad`
        return None


def has_accumulation_hooks(x: Tensor) -> bool:
    """Whether a tensor has hooks that run right after its gradient was accumulated.

    >>> x = torch.ones(1, requires_grad=True)
    >>> before = has_accumulation_hooks(x)
    >>> _ = x.register_post_accumulate_grad_hook(print)
    >>> before, has_accumulation_hooks(x)
    (False, True)
    """
    return bool(x._post_accumulate_grad_hooks)


def run_when_ready(result: Tensor) -> None:
    """Let a backward pass run the node of this result as soon as its gradients are there, before all other nodes."""
    # the engine takes the ready node with the highest sequence number first
    node: Any = result.grad_fn
    if node is not None and hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr((1 << 64) - 1)


_optional_hooks: set[Callable[[Tensor], Any]] = set()
_hooks = torch._C._autograd


@contextmanager
def optional_saved_tensor_hooks(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Iterator[None]:
    """Inside, autograd saves tensors as `pack` returns them, except where `torch.func` allows no such hooks.

    >>> seen = []
    >>> x = torch.ones(2, requires_grad=True)
    >>> with optional_saved_tensor_hooks(lambda t: seen.append(1) or t, lambda t: t):
    ...     y = x * x
    ...     z = torch.func.grad(lambda w: (w * w).sum())(torch.ones(2))
    >>> seen
    [1, 1]
    """
    if not _hooks._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        yield
        return
    _optional_hooks.add(pack)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def without_optional_hooks(
    original: Callable[[str], AbstractContextManager[None]], message: str
) -> Iterator[None]:
    """`torch.autograd.graph.disable_saved_tensors_hooks`, which refuses to run where there are hooks; `original` is torch's."""
    left = []
    while (top := _hooks._top_saved_tensors_default_hooks(True)) is not None and top[0] in _optional_hooks:
        left.append(top)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        with original(message):
            yield
    finally:
        for pack, unpack in reversed(left):
            _hooks._push_saved_tensors_default_hooks(pack, unpack)


def has_saved_tensor_hooks() -> bool:
    """Whether the call is inside a `saved_tensors_hooks` block, such as that of activation checkpointing.

    >>> with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
    ...     has_saved_tensor_hooks()
    True
    >>> has_saved_tensor_hooks()
    False
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def restore_hooks(x: Tensor) -> list[Callable[..., Any]]:
    """Connect the gradient hooks of a tensor again, and return them.

    `torch.utils.swap_tensors`, with which `to_empty()`, `to()` and the like replace the parameters of a module, leaves hooks on
    the Python object but not in the new tensor's part of the graph, where autograd looks for them.

    >>> x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> _ = x.register_hook(lambda grad: grad * 5)
    >>> torch.utils.swap_tensors(x, y)
    >>> len(restore_hooks(x))
    1
    >>> x.backward()
    >>> x.grad
    tensor([5.])
    """
    hooks = x._backward_hooks
    if hooks is None:
        return []
    x._backward_hooks = hooks
    return list(hooks.values())
