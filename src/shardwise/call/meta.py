"""Inferring the outputs of an op from the global shapes: by torch's meta kernel, or here where that is missing or wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_leaves
from shardwise.call.cpu_strides import CPU_KERNELS
from shardwise.call.empty_strides import may_differ_when_empty, strides_of_kernel
from shardwise.call.half_strides import depends_on_precision, in_single_precision, with_strides_of
from shardwise.call.memory_formats import convolution
from shardwise.call.schema import op_info
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.symbolic_sizes import untraced

__all__ = [
    "MASKED",
    "REFUSALS",
    "infer_outputs",
    "on_meta",
    "remember_outputs",
    "statistic_dtype",
    "without_masked",
]

aten = torch.ops.aten
_log = logging.getLogger("shardwise")

REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, ArithmeticError)
"""What ops and meta kernels raise for a call that they refuse or whose outputs depend on values.

Other exceptions are not about the call, and are not caught.
"""


_remembered: ContextVar[dict[Any, list[Any] | None] | None] = ContextVar("remembered_outputs", default=None)


@contextmanager
def remember_outputs() -> Iterator[None]:
    """Infer the outputs of equal calls once inside the block, for a proof that runs one call in many layouts."""
    token = _remembered.set({})
    try:
        yield
    finally:
        _remembered.reset(token)


def infer_outputs(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, warn: bool = False
) -> list[Any] | None:
    """The outputs of a call as meta tensors, and numbers as they are; None where they cannot be inferred.

    Args:
        func: the op.
        args: its arguments.
        kwargs: its keyword arguments.
        warn: log if the outputs cannot be inferred, because a registered rule of the op is then not used.
    """
    known = _remembered.get()
    if known is None:
        return _infer_outputs(func, args, kwargs, warn)
    try:
        key = (func, *map(_described, args), *((k, _described(v)) for k, v in kwargs.items()))
        is_known = key in known
    except (TypeError, RuntimeError):  # an argument that cannot be hashed, or has no strides
        return _infer_outputs(func, args, kwargs, warn)
    if not is_known:
        known[key] = _infer_outputs(func, args, kwargs, warn)
    found = known[key]
    return None if found is None else list(found)


def _described(value: Any) -> Any:
    """What a meta kernel can see of an argument, as part of a key."""
    if isinstance(value, list | tuple):
        return (type(value), *map(_described, value))
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return type(value), value


def _infer_outputs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], warn: bool) -> list[Any] | None:
    kernel = _KERNELS.get(func, func)
    if func in CPU_KERNELS and _device_type(args[0]) == "cpu":
        kernel = CPU_KERNELS[func]
    try:
        with untraced():  # a graph that is being recorded has no use for it
            result = kernel(*on_meta(args), **on_meta(kwargs))
            if depends_on_precision(func, [*args, *kwargs.values()]):
                like = kernel(*in_single_precision(on_meta(args)), **in_single_precision(on_meta(kwargs)))
                result = with_strides_of(like, result)
            elif may_differ_when_empty(func, [*args, *kwargs.values()], _device_type):
                result = strides_of_kernel(func, args, kwargs, result)
    except REFUSALS as error:  # if the call is wrong, the op itself says so when it runs
        if warn:
            _warn_unused(func, error)
        return None
    if result is None and not op_info(func).returns:
        return []  # it only writes
    out: list[Any]
    out = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, list | tuple) else []
    tensors = [t for t in out if isinstance(t, Tensor)]
    if not tensors or any(t.layout is not torch.strided for t in tensors):
        return None
    # an output that a mask excludes is None
    if any(t is not None and not isinstance(t, Tensor | int | torch.SymInt) for t in out):
        return None
    if func in MASKED:
        out = without_masked(func, args, kwargs, out)
    if func in _STATISTICS:
        out[1:] = [t.to(statistic_dtype(args)) for t in out[1:]]
    if func is aten.log_sigmoid_forward.default and _device_type(args[0]) in _UNBUFFERED:
        out[1] = out[1].new_empty(0)
    return out


def without_masked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Sequence[Any]) -> list[Any]:
    """The results of an op of `MASKED`, with None for those that its arguments do not ask for."""
    name, position = MASKED[func]
    mask = kwargs[name] if name in kwargs else args[position]
    wanted = mask if isinstance(mask, list | tuple) else [*[True] * (len(out) - 1), mask]
    return [t if want else None for t, want in zip(out, wanted, strict=True)]


_warned: set[Any] = set()


def _warn_unused(func: Any, error: Exception) -> None:
    if func not in _warned:
        _warned.add(func)
        _log.warning(
            "%s has a registered rule, but it runs on the gathered tensors: its outputs cannot be inferred before it runs "
            "(%s). Register a meta kernel with torch.library.register_fake.",
            func,
            str(error).partition(". ")[0],
        )


def on_meta(tree: Any) -> Any:
    """The tree with each tensor, and each device, on the meta device."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    return map_leaves(leaf, tree)


# Norms whose statistics have the dtype of the weights on the CPU, if the input's is narrower; their meta kernels differ.
_STATISTICS = {
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.no_stats,
}


MASKED = {
    aten.native_batch_norm_backward.default: ("output_mask", 9),
    aten.batch_norm_backward.default: ("output_mask", 9),
    aten._efficient_attention_backward.default: ("bias_requires_grad", 15),
}
"""Ops with an argument that says which outputs are computed, of all or of the last one; their meta kernels ignore it."""

_UNBUFFERED = ("cuda", "xpu")  # whose kernel of log_sigmoid has an empty buffer


def _device_type(x: Tensor) -> str:
    """The type of the device of a tensor, also in a dry run, where tensors are on the meta device."""
    return x.device_mesh.device_type if isinstance(x, DTensor) else x.device.type


def statistic_dtype(args: tuple[Any, ...]) -> torch.dtype:
    """The dtype of a norm's statistics, for its arguments: the input, then weights and running statistics, if any."""
    x = args[0]
    if _device_type(x) != "cpu":
        return torch.promote_types(x.dtype, torch.float32)
    weights = [t for t in args[1:5] if isinstance(t, Tensor)]
    dtype: torch.dtype = (weights or args)[0].dtype
    return dtype


def _like(position: int, form: torch.memory_format = torch.preserve_format) -> Callable[..., Tensor]:
    # unlike empty_like on the meta device, clone keeps the strides of dims of size 1, too, by which later ops are guided
    return lambda *args, **kwargs: args[position].clone(memory_format=form)


def _abs(x: Tensor) -> Tensor:
    """The output of `abs`, which for complex numbers has the very strides of the input."""
    if not x.is_complex():
        return aten.abs.default(x)  # type: ignore[no-any-return]
    return x.new_empty_strided(x.shape, x.clone().stride(), dtype=x.dtype.to_real())


def _geqrf(x: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of `geqrf`: column-major matrices, and a factor for each reflector."""
    *batch, m, n = x.shape
    return x.new_empty((*batch, n, m)).mT, x.new_empty((*batch, min(m, n)))


def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """The output of `index`, with the strides that its kernel gives: in the order of the indices' strides."""
    out: Tensor = aten.index.Tensor(x, indices)
    given = [i for i, t in enumerate(indices) if t is not None]
    if not given:
        return out
    shape = torch.broadcast_shapes(*[t.shape for t in indices if t is not None])
    adjacent = given[-1] - given[0] == len(given) - 1
    others = [d for d in range(x.dim()) if d not in given]
    before = [d for d in others if adjacent and d < given[0]]
    after = others[len(before) :]
    strides = [*[x.stride(d) for d in before], *[0] * len(shape), *[x.stride(d) for d in after]]
    operands = [x.new_empty(0).as_strided(out.shape, strides)]
    for t in indices:
        if t is not None:  # dims of size 1 keep the strides that reshaping gives them, which orders dims, too
            t = t.expand(shape).reshape([*[1] * len(before), *shape, *[1] * len(after)])
            strides = [s if n == m else 0 for s, n, m in zip(t.stride(), t.shape, out.shape, strict=True)]
            operands.append(x.new_empty(0).as_strided(out.shape, strides))
    stride = reduce(torch.add, operands) if len(operands) != 3 else torch.addcmul(*operands)
    return x.new_empty_strided(out.shape, stride.stride())


def _contiguous(func: Any, *numbers: int) -> Callable[..., Any]:
    """The outputs of an op, contiguous; or only those with these numbers."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            return torch.empty_like(out, memory_format=torch.contiguous_format)
        return [
            torch.empty_like(t, memory_format=torch.contiguous_format) if i in numbers else t
            for i, t in enumerate(out)
        ]

    return kernel


def _elementwise(func: Any) -> Callable[..., Tensor]:
    """The output of an op of two tensors, with the strides that the kernels of such ops give."""

    def kernel(a: Tensor, b: Any, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = func(a, b, *args, **kwargs)
        # integers that become floating point are copied first, which true_divide does, too
        like = (
            torch.true_divide if out.is_floating_point() and func is not aten.div.Tensor_mode else torch.add
        )
        return out.new_empty_strided(out.shape, like(a, b).stride())

    return kernel


def _clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    """The output of `clamp` with limits that are tensors, with the strides that the kernels of elementwise ops give."""
    out: Tensor = aten.clamp.Tensor(x, min, max)
    operands = [
        torch.empty_strided(t.shape, t.stride(), device="meta") for t in (x, min, max) if t is not None
    ]
    like = torch.addcmul(*operands) if len(operands) == 3 else torch.add(*operands)
    return out.new_empty_strided(out.shape, like.stride())


def _batch_norm(func: Any) -> Callable[..., Any]:
    """The outputs of a batch norm: its kernels know two orders of dims."""

    def kernel(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, *rest = func(x, *args, **kwargs)
        last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        form = torch.channels_last if last else torch.contiguous_format
        return [torch.empty_like(out, memory_format=form), *rest]

    return kernel


_TWO_TENSORS = (
    aten.complex.default, aten.copysign.Tensor, aten.div.Tensor_mode, aten.floor_divide.default, aten.heaviside.default,
    aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.logaddexp.default, aten.logaddexp2.default,
    aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.logit_backward.default,
    aten.polar.default, aten.special_xlog1py.default, aten.xlogy.Tensor,
)  # fmt: skip


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The output of `_grouped_mm` in any dtype and with any strides; torch's meta kernel takes only bfloat16."""
    jagged = a.dim() == 2 or b.dim() == 2
    groups = {t.shape[0] for t in (a, b) if t.dim() == 3} | ({offs.shape[0]} if offs is not None else set())
    is_valid = (
        {a.dim(), b.dim()} <= {2, 3}
        and a.shape[-1] == b.shape[-2]
        and jagged == (offs is not None)
        and len(groups) == 1
        and (offs is None or (offs.dim() == 1 and offs.dtype is torch.int32))
        and bias is None
        and a.dtype is b.dtype
        and out_dtype in (None, a.dtype)
        and a.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )
    if not is_valid:
        raise ValueError("_grouped_mm refuses this call")
    batch = tuple(groups) if a.dim() == b.dim() else ()
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]))


# Meta kernels of ops that have none in torch, or one that gives other strides or takes fewer dtypes than the kernels
# for devices.
_KERNELS: dict[Any, Callable[..., Any]] = {
    aten.index.Tensor: _index,
    aten.convolution.default: convolution,
    aten.multi_margin_loss_backward.default: _like(1, torch.contiguous_format),
    aten.multilabel_margin_loss_backward.default: _like(1, torch.contiguous_format),
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.log_sigmoid_backward.default: _like(0),
    aten.geqrf.default: _geqrf,
    aten._grouped_mm.default: _grouped_mm,
    aten._aminmax.default: lambda x: (x.new_empty(()), x.new_empty(())),
    aten._aminmax.dim: lambda x, dim, keepdim=False: aten.aminmax.default(x, dim=dim, keepdim=keepdim),
    aten.log_sigmoid_forward.default: _contiguous(aten.log_sigmoid_forward.default, 0, 1),
    **{
        func: _contiguous(func)
        for func in (
            aten.huber_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.mse_loss_backward.default,
            aten.normal.Tensor_Tensor,
            aten.isin.Tensor_Scalar,
            aten.isin.Tensor_Tensor,
            aten.pow.Scalar,
        )
    },
    aten.angle.default: lambda x: (_contiguous(aten.angle.default) if x.is_complex() else aten.angle.default)(
        x
    ),
    aten.abs.default: _abs,
    aten.clamp.Tensor: _clamp,
    aten.conj_physical.default: _like(0),
    aten._conj_physical.default: _like(0),
    **{func: _elementwise(func) for func in _TWO_TENSORS},
    **{
        func: _batch_norm(func)
        for func in (
            aten.native_batch_norm.default,
            aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default,
            aten._batch_norm_with_update.default,
            aten._batch_norm_no_update.default,
        )
    },
}
