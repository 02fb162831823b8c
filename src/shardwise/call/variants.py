"""Ops as programs of other ops: torch's decompositions, and the returning form of an op that writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_composite", "program_for", "returning_form", "writing_form"]

# Ops whose decomposition rounds elsewhere than the kernel: it computes these in float64 or float32, where the kernel
# rounds the ends to the dtype asked for and goes on in that.
_ROUNDED_ELSEWHERE = {"aten::linspace", "aten::logspace"}
_DRAWN_OR_SEEN = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}


@lru_cache(maxsize=4096)
def program_for(func: Any) -> Callable[..., Any] | None:
    """The op as a program of others that gives the same, or None if there is none."""
    if _DRAWN_OR_SEEN & set(func.tags) or torch.Tag.inplace_view in func.tags:
        return None
    targets = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if targets:
        form = returning_form(func)
        first = func._schema.arguments[0].name
        plain = all(a.is_out for a in targets) or [a.name for a in targets] == [first]
        return writing_form(func, form) if form is not None and plain else None
    if any(a.alias_info is not None for a in func._schema.arguments):
        return None  # a view: what shares memory is not made anew
    if func._schema.name in _ROUNDED_ELSEWHERE:
        return None
    from torch._decomp import decomposition_table  # a second to import, and seldom needed

    return decomposition_table.get(func)


@lru_cache(maxsize=4096)
def is_composite(func: Any) -> bool:
    """Whether torch itself runs the op as others, and only ever hands it on whole beneath autograd."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def returning_form(func: Any) -> Any | None:
    """The op that returns what this one writes: `add` of `add_` and of `add.out`."""
    namespace, _, name = func._schema.name.partition("::")
    in_place = name.endswith("_") and not name.endswith("__")
    forms = getattr(getattr(torch.ops, namespace), name[:-1] if in_place else name, None)
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    for overload in () if forms is None else forms.overloads():
        form = getattr(forms, overload)
        plain = all(a.alias_info is None for a in form._schema.arguments)
        if plain and [(a.name, str(a.type)) for a in form._schema.arguments] == wanted:
            return form
    return None


def writing_form(func: Any, form: Callable[..., Any]) -> Callable[..., Any]:
    """Make what is to be written, by a form that returns it, and copy it there, in the layout that is there."""
    names = [a.name for a in func._schema.arguments]
    targets = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    outs = {a.name: a.is_out for a in func._schema.arguments}

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        into: list[Tensor] = [given[name] for name in targets]
        results = form(*args, **{k: v for k, v in kwargs.items() if not outs[k]})
        made = [results] if isinstance(results, Tensor) else list(results)
        for t, r in zip(into, made, strict=True):
            (t if t.shape == r.shape else _resized(t, r.shape)).copy_(r)
        return into[0] if len(into) == 1 else tuple(into)

    return run


def _resized(t: Tensor, shape: torch.Size) -> Tensor:
    """A target in the shape of what is written to it, as torch has it: with a warning if it held anything."""
    if t.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(t.shape)}, which does not "
            f"match the required output shape {list(shape)}. Pass an empty tensor, or one of that shape.",
            stacklevel=2,
        )
    return t.resize_(shape)
