"""Writes to memory that the same op reads: refused where one device refuses them.

Blocks that share memory are checked by their kernel. This module finds the overlaps that it does not see, because a view had
to move or an operand was gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_tensors
from shardwise.call.op_call import OpCall
from shardwise.call.strides import may_overlap
from shardwise.call.view_scatter import COMPUTED
from shardwise.call.writes import shares_memory
from shardwise.comm import PerRank
from shardwise.layout import LayoutError, is_dense
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.view_places import known_offset
from shardwise.torch_internals.subclass import view_base

__all__ = [
    "FILLS",
    "FORBIDS_ALIAS",
    "are_same_elements",
    "check_overlap",
    "computing_operands",
    "copy_to_repeated",
    "is_repeated",
    "repeated_error",
    "writes_overlapping",
    "writes_repeated",
]

FORBIDS_ALIAS = frozenset(
    "aten::" + name
    for name in (
        "scatter_ scatter_add_ scatter_reduce_ index_copy_ index_add_ index_fill_ index_reduce_ put_ index_put_ "
        "_index_put_impl_"
    ).split()
)
"""In-place ops that refuse an operand that is the tensor itself; elementwise ops refuse only one that is shifted."""

_OUT_FORBIDS_ALIAS = frozenset(
    "aten::" + name for name in "index_select gather cat stack take masked_select linalg_cross".split()
)
"""Ops whose out variants refuse a target that shares memory with an operand."""

_OUT_FORBIDS_SHIFTED = frozenset(
    "aten::" + name
    for name in (
        "cumsum cumprod logcumsumexp index_copy index_add index_reduce scatter scatter_add scatter_reduce sort renorm where "
        "normal bernoulli addmm addmv addbmm baddbmm addr floor_divide softplus softshrink hardshrink gelu"
    ).split()
)
"""Ops whose out variants refuse a target that shares some elements with an operand, as elementwise ops do."""

_COMPUTES_FIRST = frozenset({"aten::mvlgamma"})
"""Elementwise ops that torch computes into memory of their own before they write."""

_TAKES_NUMBER = frozenset({"aten::fill_", "aten::masked_fill_", "aten::index_fill_"})
"""Ops that read their zero-dimensional operand before they write."""


FILLS = frozenset({"aten::fill_", "aten::zero_"})
"""Ops that write one value to all elements."""

_ALLOWS_REPEATED = frozenset(
    "aten::" + name
    for name in "masked_fill_ index_fill_ index_put_ _index_put_impl_ triu_ tril_ fill_diagonal_".split()
)
"""In-place ops that may write to an expanded tensor; what they write to one element of it is in all that share its memory."""


def is_repeated(x: Tensor) -> bool:
    """Whether elements of a tensor are one element of memory, as far as torch looks for it: along dims of stride 0.

    >>> is_repeated(torch.ones(1).expand(2)), is_repeated(torch.ones(3).unfold(0, 2, 1))
    (True, False)
    """
    return x.layout is torch.strided and any(
        n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)
    ) and x.numel() > 0  # fmt: skip


def writes_repeated(call: OpCall) -> bool:
    """Whether an op writes several values to one element of memory, in a way that torch allows; raise if it does not.

    Filling blocks writes the same value everywhere, and is not meant.
    """
    if torch.Tag.inplace_view in call.info.tags:
        return False
    target = next((t for t in call.written if is_repeated(t)), None)
    if target is None:
        return False
    if call.info.qualified_name in FILLS:
        return isinstance(target, DTensor) and bool(target._spec.layout.partial)
    if call.info.qualified_name == "aten::copy_" and are_same_elements(target, call.args[1]):
        return False
    if call.info.qualified_name not in _ALLOWS_REPEATED:
        raise repeated_error(call.func)
    return True


def copy_to_repeated(func: Any, args: tuple[Any, ...]) -> DTensor | None:
    """`copy_` to an expanded tensor: nothing if the source is the same elements of memory, which torch looks at first.

    Raises for another source.
    """
    if not are_same_elements(args[0], args[1]):
        raise repeated_error(func)
    return args[0]  # type: ignore[no-any-return]


def writes_overlapping(call: OpCall) -> bool:
    """Whether an op writes to a DTensor of which several elements are one element of memory, as far as its strides tell."""
    return call.info.writes and any(
        isinstance(t, DTensor) and t._spec.stride is not None and may_overlap(t.shape, t._spec.stride)
        for t in call.written
    )


def repeated_error(func: Any) -> Exception:
    """The error about a write to an expanded tensor."""
    return LayoutError(
        f"{func}: unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
        "Please clone() the tensor before performing the operation.",
        why="The op writes to an expanded tensor.",
        fix="Write to x.clone().",
    )


def check_overlap(call: OpCall) -> None:
    """Raise if an op writes to memory that another operand has, too, where one device raises."""
    name = call.info.qualified_name
    is_out = bool(call.info.out_names)
    forbids_alias = name in FORBIDS_ALIAS or (is_out and name in _OUT_FORBIDS_ALIAS)
    is_pointwise = torch.Tag.pointwise in call.info.tags and name not in _COMPUTES_FIRST
    forbids_shifted = is_pointwise or (is_out and name in _OUT_FORBIDS_SHIFTED)
    if not forbids_alias and not forbids_shifted and name != "aten::copy_":
        return  # its kernel allows it
    for target in call.written:
        for other in call.tensors:
            if name in _TAKES_NUMBER and other.dim() == 0:
                continue
            if not (isinstance(target, DTensor) and isinstance(other, DTensor)) or other is target:
                continue
            if name == "aten::copy_" or not (_is_computed(target) or _is_computed(other)):
                _check_pair(call, target, other, forbids_alias)
    if (
        forbids_alias
        and not _is_computed(call.returned)
        and sum(t is call.returned for t in call.tensors) > 1
    ):
        raise _error(call, call.returned)


def computing_operands(call: OpCall) -> tuple[Any, ...]:
    """The arguments of an in-place op, with copies of the operands that torch computes before it runs.

    With a conjugated or negated target it computes both, and the op writes to a copy that goes back afterwards.
    """
    if (
        call.info.qualified_name == "aten::copy_"
        or not isinstance(call.returned, DTensor)
        or call.info.out_names
    ):
        return call.args
    target = call.returned
    root = _root_tensor(target)._local_tensor

    def separate(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor) or not (_is_computed(target) or _is_computed(x)):
            return x
        with torch.no_grad():
            return x.clone() if shares_memory(root, _root_tensor(x)._local_tensor) else x

    return (target, *map_tensors(separate, call.args[1:]))


def _is_computed(x: Tensor) -> bool:
    """Whether torch computes a conjugated or negated operand before the kernel runs, which then sees a copy."""
    return x.is_conj() or x.is_neg()


def _check_pair(call: OpCall, target: DTensor, other: DTensor, forbids_alias: bool) -> None:
    roots = _root_tensor(target), _root_tensor(other)
    if roots[0]._spec.stride is None or roots[1]._spec.stride is None:
        return  # a sparse tensor
    if not shares_memory(roots[0]._local_tensor, roots[1]._local_tensor):
        return
    if not (_is_dense(target) and _is_dense(other)) or 0 in (*target.shape, *other.shape):
        return  # torch does not find out whether they overlap
    bases = _base(target), _base(other)
    has_one_base = bases[0] is bases[1] or bases[0]._local_tensor is bases[1]._local_tensor
    extents = [e for e in (_extent(target), _extent(other)) if e is not None] if has_one_base else []
    if len(extents) == 2:  # known alike on all ranks, also on those with empty blocks
        first_bytes, last_bytes = sorted(extents)
        overlap = last_bytes[0] < first_bytes[1]
        same = _place(target) == _place(other) and target.dtype is other.dtype
    elif _is_same_memory(*roots):
        a, b = _on_meta(roots[0], target), _on_meta(roots[1], other)
        first, last = sorted((a, b), key=Tensor.storage_offset)
        overlap = last.storage_offset() < first.storage_offset() + first.numel()
        same = _place(a) == _place(b)
    else:
        # the place of a view within its root is known, but not that of one root within another
        blocks = [None if t._source is not None else t._local_tensor for t in (target, other)]
        overlap = (blocks[0] is not None and _covers(blocks[0], roots[1]._local_tensor)) or (
            blocks[1] is not None and _covers(blocks[1], roots[0]._local_tensor)
        )
        same = False
    if overlap and (forbids_alias or not same):
        raise _error(call, target)


def _base(x: DTensor) -> DTensor:
    base = view_base(x)
    return base if isinstance(base, DTensor) else x


def _extent(x: DTensor) -> tuple[int, int] | None:
    """The bytes of its base that a dense tensor occupies; None if that is not known."""
    offset = known_offset(x)
    return None if offset is None else (offset * x.dtype.itemsize, (offset + x.numel()) * x.dtype.itemsize)


def are_same_elements(a: Tensor, b: Any) -> bool:
    """Whether two DTensors are the same elements of memory in the same order."""
    if not isinstance(a, DTensor) or not isinstance(b, DTensor) or a.dtype != b.dtype:
        return False
    if (a.is_conj(), a.is_neg(), a.shape, a.stride()) != (b.is_conj(), b.is_neg(), b.shape, b.stride()):
        return False
    roots = _root_tensor(a), _root_tensor(b)
    return _is_same_memory(*roots) and _place(_on_meta(roots[0], a)) == _place(_on_meta(roots[1], b))


def _on_meta(root: DTensor, x: DTensor) -> Tensor:
    """The view of a tensor without data that a view of `root` is."""
    return _on(torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device="meta"), x)


def _place(x: Tensor) -> tuple[object, ...]:
    return x.storage_offset(), x.shape, x.stride()


def _covers(a: Tensor, b: Tensor) -> bool:
    """Whether a block contains all the memory of another; in a simulation, on a rank where both have elements."""
    if isinstance(a, PerRank) and isinstance(b, PerRank):
        return any(_covers(x, b.of_rank(r)) for r, x in a._blocks.items())
    if not a.numel() or not b.numel() or not _is_dense(a):
        return False
    extent = 1 + sum((n - 1) * s for n, s in zip(b.shape, b.stride(), strict=True))
    start = b.storage_offset() - a.storage_offset()
    return start >= 0 and start + extent <= a.numel()


def _error(call: OpCall, target: DTensor) -> Exception:
    return LayoutError(
        f"{call.func}: unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
        f"memory location. Please clone() the tensor before performing the operation.",
        why=f"An operand shares memory with {target._spec}, which the op writes to.",
        fix="Pass x.clone() for the operand.",
    )


def _root_tensor(x: DTensor) -> DTensor:
    while x._source is not None:
        x = x._source.base
    return x


def _is_same_memory(a: DTensor, b: DTensor) -> bool:
    """Whether two tensors that share memory are the same elements of it, in the same order of memory."""
    if _same_blocks(a._local_tensor, b._local_tensor):
        return True
    # one may be the other in another shape
    are_contiguous = a.dtype is b.dtype and a.is_contiguous() and b.is_contiguous()
    return are_contiguous and _same_blocks(a._local_tensor, b._local_tensor, whole=True)


def _same_blocks(a: Tensor, b: Tensor, whole: bool = False) -> bool:
    """Whether two blocks that share memory are the same elements of it; `whole` ignores the shape of contiguous ones."""
    if isinstance(a, PerRank) and isinstance(b, PerRank):
        return all(_same_blocks(x, b.of_rank(r), whole) for r, x in a._blocks.items())
    if a.data_ptr() != b.data_ptr():
        return False
    if whole:
        return a.numel() == b.numel() and a.is_contiguous() and b.is_contiguous()
    return (a.shape, a.stride()) == (b.shape, b.stride())


def _on(whole: Tensor, x: DTensor) -> Tensor:
    """The view of a full tensor that a DTensor is."""
    source = x._source
    if source is None:
        return whole
    if source.func in COMPUTED:
        return _on(whole, source.base)  # the same memory
    if source.is_grown:
        whole = whole.detach().resize_(source.offset + source.spec.shape.numel())
        return whole.as_strided(source.spec.shape, source.spec.stride, source.offset)
    out = source.func(_on(whole, source.base), *source.args, **source.kwargs)
    return out if source.number is None else out[source.number]  # type: ignore[no-any-return]


def _is_dense(x: Tensor) -> bool:
    return is_dense(x.shape, x.stride())
