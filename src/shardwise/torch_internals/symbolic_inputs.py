"""Inputs of a compiled program that are tensor subclasses of symbolic sizes, while torch makes tensors without values of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaConverter

from shardwise.torch_internals.aliased_inputs import keep_memory_of
from shardwise.torch_internals.module_fixer import after_import
from shardwise.torch_internals.symbolic_sizes import belongs_to_layouts

__all__ = ["as_block_of", "is_new_input", "note_new_inputs"]

_converting: list[Any] = []


def note_new_inputs(cls: type) -> None:
    """Have `is_new_input` know when torch converts an input of a class, and have no symbols created for its parts."""
    converter: Any = MetaConverter
    original = converter._empty_create_subclass

    def create(
        self: Any, description: Any, size: Any, stride: Any, env: Any, context: Any, *rest: Any
    ) -> Any:
        if description.type is None or not issubclass(description.type, cls) or context is None:
            return original(self, description, size, stride, env, context, *rest)
        for (
            name,
            part,
        ) in context.inner_contexts.items():  # of this object: torch reads it again for the guards
            context.inner_contexts[name] = _static(part)
        _converting.append(None)
        try:
            out = original(self, description, size, stride, env, context, *rest)
        finally:
            _converting.pop()
        for name, part in description.attrs.items():
            self.set_tensor_memo(part, getattr(out, name))  # which `as_block_of` may have replaced
        return out

    convert = converter.meta_tensor

    def meta_tensor(self: Any, description: Any, env: Any, callback: Any, source: Any, context: Any) -> Any:
        if description.is_view and _is_dynamic(description, context, cls):
            # torch would compute it from its base, with sizes and offsets of the view as symbols that no input has
            description = replace(description, is_view=False, base=None, view_func=None)
        return convert(self, description, env, callback, source, context)

    converter._empty_create_subclass, converter.meta_tensor = create, meta_tensor
    after_import("torch._dynamo.variables.builder", lambda module: _forget_bases(module, cls))
    # loaded by the first compilation, with a library for algebra
    after_import("torch.fx.experimental.symbolic_shapes", _take_blocks_for_large)
    after_import("torch.fx.experimental.symbolic_shapes", _equate_blocks)


def _forget_bases(builder: Any, cls: type) -> None:
    """Have torch not record the bases of inputs that are views: they have symbols of their own, which then no input has."""
    original = builder.wrap_to_fake_tensor_and_record

    def wrap(tensor: Any, *args: Any, source: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, cls) and getattr(source, "member", None) == "_base":
            return None
        return original(tensor, *args, source=source, **kwargs)

    builder.wrap_to_fake_tensor_and_record = wrap


def _is_dynamic(description: Any, context: Any, cls: type) -> bool:
    """Whether some size of a tensor of a class, or of that which it is a view of, is a symbol."""
    if context is None or description.type is None or not issubclass(description.type, cls):
        return False
    contexts = [c for c in (context, context.view_base_context) if c is not None]
    return any(kind is not type(kind).STATIC for c in contexts for kind in c.dynamic_sizes)


def _static(context: Any) -> Any:
    """The context of a tensor whose sizes are numbers."""
    if context is None:
        return None
    kinds: Any = type(context.dynamic_sizes[0]) if context.dynamic_sizes else None
    static = [kinds.STATIC for _ in context.dynamic_sizes]
    base = _static(context.view_base_context)
    return replace(
        context, dynamic_sizes=static, constraint_sizes=[None] * len(static), view_base_context=base
    )


def _take_blocks_for_large(shapes: Any) -> None:
    """Have torch not ask whether a block has no or one element, where it can do without the answer.

    The compiled code would depend on it, and the last blocks of an uneven split have any size. Torch does so for sizes that
    depend on data, and for all if its setting `backed_size_oblivious` is on.
    """
    original = shapes._guard_or

    def guard_or(question: Any, default: bool) -> bool:
        if belongs_to_layouts(question) and _asks_for_few(question.node.expr, shapes.FloorDiv):
            known = shapes._static_eval_sym_bool(question)
            return default if known is None else known
        return original(question, default)  # type: ignore[no-any-return]

    shapes._guard_or = guard_or


def _equate_blocks(shapes: Any) -> None:
    """Have `torch.export` know that the block of an input has the size of the input in a dim where it has the same symbol.

    For inputs whose sizes have the name of a `Dim`, it asks the user about others that are equal.
    """
    holder: Any = shapes.EqualityConstraint
    original = holder.is_equal

    def is_equal(self: Any, a: Any, b: Any) -> bool:
        return _of_input(a) == _of_input(b) or bool(original(self, a, b))

    holder.is_equal = is_equal


def _of_input(source: Any) -> Any:
    """The size of an input, for that of its block."""
    base: Any = getattr(source, "base", None)
    return replace(source, base=base.base) if getattr(base, "member", None) == "_local_tensor" else source


_FEW: dict[str, tuple[int, ...]] = {
    "Equality": (0, 1),
    "Unequality": (0, 1),
    "LessThan": (0, 1),
    "StrictGreaterThan": (0, 1),
    "StrictLessThan": (1, 2),
    "GreaterThan": (1, 2),
}


def _asks_for_few(question: Any, floor_div: Any) -> bool:
    """Whether a question is whether a block has no element or one: a size that was rounded up is compared with 0 or 1."""
    if getattr(question, "rhs", None) not in _FEW.get(type(question).__name__, ()):
        return False
    return any(
        f.divisor.is_Integer and f.base.as_coeff_Add()[0] == f.divisor - 1 for f in question.atoms(floor_div)
    )


def is_new_input(block: Tensor) -> bool:
    """Whether a tensor is a part of an input that torch is converting: no op has read it, and no graph knows it.

    >>> is_new_input(torch.zeros(2))
    False
    """
    return bool(_converting) and type(block) is FakeTensor


def as_block_of(block: Any, shape: Sequence[Any]) -> Tensor | None:
    """A new tensor without values in place of a part of an input, with sizes that are expressions of others.

    To the compiler each size of each part is a symbol of its own, or a number if it is 0 or 1 or was the same before. Torch
    checks at each call of the compiled code that the parts have the sizes that these expressions give.

    Strides that do not follow from the sizes, as those of some columns, are numbers, and so is the offset.

    Returns:
        The tensor, or None if it cannot be made.
    """
    sizes, strides = ([_hint(n) for n in some] for some in (block.shape, block.stride()))
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
    stride: list[Any] = [0] * len(sizes)
    step: Any = 1
    known = 1
    for d in reversed(order):
        if strides[d] != known and sizes[d] != 1:
            known = step = strides[d]
        stride[d] = step
        known *= max(sizes[d], 1)
        step = step * (shape[d] if isinstance(shape[d], int) else torch.sym_max(shape[d], 1))
    if block.requires_grad:
        return None
    offset = _hint(block.storage_offset())
    with block.fake_mode, torch.no_grad():
        new = torch.empty_strided(tuple(shape), tuple(stride), dtype=block.dtype, device=block.device)
        if offset:
            size = new.untyped_storage().nbytes() // block.dtype.itemsize
            memory = torch.empty((size + offset,), dtype=block.dtype, device=block.device)
            new.set_(memory.untyped_storage(), offset, tuple(shape), tuple(stride))
    return keep_memory_of(new, block)


def _hint(size: Any) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size  # type: ignore[no-any-return]
