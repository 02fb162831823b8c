"""`torch.autograd.Function`: calls on tensors of a class whose autograd graph is not torch's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.function import _is_setup_context_defined

__all__ = ["applied_directly", "bind_arguments", "has_setup_context", "intercept_functions", "queue_callback"]

_Function = torch.autograd.Function
_apply: Any = _Function.__dict__["apply"]  # before anything replaces it; a C function from torch 2.15 on
_C = TypeVar("_C", bound=type[torch.autograd.Function])
_Intercept = Callable[[type[torch.autograd.Function], tuple[Any, ...], dict[str, Any]], Any]


def intercept_functions(kind: type, run: _Intercept) -> None:
    """Have `F.apply(*args, **kwargs)` of every autograd function call `run(F, args, kwargs)` if an argument is a `kind`.

    `apply` reads the autograd metadata of its arguments, which tensors of such a class do not have.

    >>> class Example(torch.Tensor):
    ...     pass
    >>> intercept_functions(Example, lambda cls, args, kwargs: cls.__name__)
    >>> class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x * 2
    >>> Double.apply(torch.ones(1).as_subclass(Example)), Double.apply(torch.ones(1))
    ('Double', tensor([2.]))
    """
    previous: Any = _Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kind in map(type, args) or (kwargs and kind in map(type, kwargs.values())):
            return run(cls, args, kwargs)
        return previous.__get__(None, cls)(*args, **kwargs)

    apply.__doc__ = _apply.__doc__
    _Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


def applied_directly(cls: _C) -> _C:
    """Have a function never be intercepted; a decorator for those that run for each op.

    >>> @applied_directly
    ... class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x * 2
    >>> Double.apply(torch.ones(1))
    tensor([2.])
    """
    cls.apply = _apply  # type: ignore[method-assign]
    return cls


def has_setup_context(cls: type[torch.autograd.Function]) -> bool:
    """Whether the `forward` of a function has no context, since its `setup_context` gets it.

    >>> has_setup_context(torch.autograd.Function)
    False
    """
    return bool(_is_setup_context_defined(cls.setup_context))


def bind_arguments(
    cls: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments of `F.apply` by position, with defaults where the function has a `setup_context`."""
    if not has_setup_context(cls):
        if kwargs:
            raise TypeError(
                f"{cls.__name__}.apply got the keyword arguments {', '.join(kwargs)}.\n"
                "  why: torch takes them only for a function that has a setup_context.\n"
                f"  fix: {cls.__name__}.apply(...) with all arguments by position."
            )
        return args
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def queue_callback(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs in this thread has ended.

    >>> seen = []
    >>> x = torch.ones(1, requires_grad=True)
    >>> _ = x.register_hook(lambda grad: queue_callback(lambda: seen.append(x.grad)))
    >>> (x * 2).sum().backward()
    >>> seen
    [tensor([2.])]
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
