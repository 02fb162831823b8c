"""All patches of torch: what shardwise replaces for DTensors where dispatch alone does not suffice.

>>> from shardwise.ops.patches import PATCHES
>>> all(patch.reason for patch in PATCHES)
True
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.call.fallback import gather
from shardwise.call.operands import has_dtensor
from shardwise.comm import PerRank, first_rank
from shardwise.ops.composite_programs import composite_patches
from shardwise.ops.dropout import dropout_patches
from shardwise.ops.indices import index_patches
from shardwise.ops.inner_plain import inner_plain_patches
from shardwise.ops.memory_patches import memory_patches
from shardwise.ops.packed_sequences import packed_sequence_patches
from shardwise.ops.pending_gradients import gradient_patches, settle_before_steps
from shardwise.ops.pooling import pooling_patches
from shardwise.ops.prod import prod_patches
from shardwise.ops.sparse_factories import sparse_patches
from shardwise.ops.traced_constants import tracing_patches
from shardwise.ops.zero_gradients import zero_gradient_patches
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.shape_methods import CHANGE_SHAPES, STRIDED
from shardwise.torch_internals.autograd import without_optional_hooks
from shardwise.torch_internals.patches import (
    AnyPatch,
    KernelPatch,
    OpPatch,
    PythonPatch,
    install,
    python_functions,
)
from shardwise.torch_internals.python_functions import READ_MEMORY

__all__ = ["PATCHES", "install_patches"]

aten = torch.ops.aten


def _tensor_split(x: Tensor, indices: Any, dim: int = 0) -> Any:
    values: Any = first_rank(gather(aten.tensor_split.tensor_indices_or_sections, indices)).tolist()
    func = aten.tensor_split.indices if indices.dim() else aten.tensor_split.sections
    return func(x, values, dim)


def _refusing(name: str, fix: str) -> Any:
    """A function that reads the memory of tensors: a DTensor has none, and some functions crash."""

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        if has_dtensor(args, kwargs):
            raise TypeError(
                f"{name} got a DTensor.\n"
                "  why: It reads the memory of a tensor, and each rank has the memory of its own block only.\n"
                f"  fix: {fix}"
            )
        return original(*args, **kwargs)

    return run


def _as_method(name: str) -> Any:
    """A function of torch as the method of the same name, if its tensor is a DTensor."""

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], DTensor):
            return getattr(args[0], name)(*args[1:], **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return getattr(args[0], name)(*args[1:], **kwargs)  # traced as torch's own method
        if not args and isinstance(x := kwargs.get("self", kwargs.get("input")), DTensor):
            return getattr(x, name)(**{k: v for k, v in kwargs.items() if v is not x})
        return original(*args, **kwargs)

    return run


def _multi_grad_hook(original: Any, tensors: Any, fn: Any, *, mode: str = "all") -> Any:
    if mode == "all" and any(isinstance(t, PerRank) for t in tensors):
        raise RuntimeError(
            "register_multi_grad_hook got the blocks of simulated ranks.\n"
            "  why: It waits for one node of the graph per tensor, and in a simulation each rank has a node.\n"
            "  fix: Register it on the DTensors, or x.to_local().register_hook(...) on each block."
        )
    return original(tensors, fn, mode=mode)


def _is_lazy(args: Any, kwargs: Any) -> bool:
    x = args[0]
    return isinstance(x, DTensor) and x._source is not None and (x.is_conj() or x.is_neg())


def _resolve(is_lazy: Any) -> Any:
    """`resolve_conj` or `resolve_neg`: a copy of a tensor that would have the bit, if it were plain."""
    return lambda x: x.clone() if is_lazy(x) else x


_METHODS = "as_strided as_strided_ as_strided_copy as_strided_scatter detach_ resize_as_".split()

PATCHES: tuple[AnyPatch, ...] = (
    KernelPatch(
        aten.tensor_split.tensor_indices_or_sections,
        _tensor_split,
        "torch reads the values of the indices before any op runs",
        lambda args, kwargs: isinstance(args[1], DTensor),
    ),
    *(
        KernelPatch(func, _resolve(is_lazy), "a DTensor has no conjugate or negative bit", _is_lazy)
        for func, is_lazy in (
            (aten.resolve_conj.default, lambda x: x.is_conj()),
            (aten.resolve_neg.default, lambda x: x.is_neg()),
        )
    ),
    *(
        PythonPatch(target, _refusing(name, fix), "torch reads memory that a DTensor does not have")
        for name, fix in READ_MEMORY.items()
        for target in python_functions([name])
    ),
    *(
        PythonPatch(target, _as_method(target[1]), "as a method, which is DTensor's own")
        for target in python_functions(f"torch.{name}" for name in _METHODS)
    ),
    *(
        OpPatch(
            getattr(aten, name),
            _as_method(name),
            "the object must become another tensor, and an op has no object",
        )
        for name in CHANGE_SHAPES
    ),
    *(
        OpPatch(
            getattr(aten, name), _as_method(name), "offsets count in the memory that the tensor is a view of"
        )
        for name in STRIDED
    ),
    *(
        PythonPatch((torch.Tensor, name), _as_method(name), "the same, of `torch.Tensor.t_(x)`")
        for name in (*CHANGE_SHAPES, *STRIDED)
        if not name.startswith(("resize", "detach")) and hasattr(torch.Tensor, name)
    ),
    PythonPatch(
        (torch.autograd.graph, "register_multi_grad_hook"),
        _multi_grad_hook,
        "torch asks the engine about the node of a block, and in a simulation there are several",
    ),
    PythonPatch(
        (torch.autograd.graph, "disable_saved_tensors_hooks"),
        without_optional_hooks,
        "torch.func refuses hooks, and those that free gathered parameters can be done without",
    ),
    *composite_patches(),
    *dropout_patches(),
    *gradient_patches(),
    *index_patches(),
    *inner_plain_patches(),
    *memory_patches(),
    *packed_sequence_patches(),
    *pooling_patches(),
    *prod_patches(),
    *zero_gradient_patches(),
    *sparse_patches(),
    *tracing_patches(),
)


def install_patches() -> None:
    """Apply all patches; `shardwise.torch_internals.rng` applies those of torch's seeding functions."""
    install(PATCHES)
    settle_before_steps()
