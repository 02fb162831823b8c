"""What torch's dispatcher knows of an op: schema, kernels, decomposition; and quicker ways to call it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

__all__ = [
    "Argument",
    "Return",
    "Schema",
    "all_ops",
    "below_autograd",
    "boxed_call",
    "decomposition_of",
    "find_op",
    "has_derivative",
    "is_composite",
    "is_op",
    "overloads_of",
    "python_binding",
    "read_schema",
    "records_views",
    "run_composite",
    "tracking_views",
    "transforms_are_active",
    "without_dispatch",
]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an op. `alias` names the memory it shares with results, `writes` says that the op writes to it."""

    name: str
    type: str
    default: Any
    has_default: bool
    alias: frozenset[str]
    writes: bool
    is_out: bool
    kwarg_only: bool


@dataclass(frozen=True, slots=True)
class Return:
    """One result of an op, with the names of the memory it shares with arguments."""

    type: str
    alias: frozenset[str]
    writes: bool


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of an op: `name` is `aten::add`, `overload` is `Tensor`, or `default`."""

    name: str
    overload: str
    arguments: tuple[Argument, ...]
    returns: tuple[Return, ...]


def is_op(x: object) -> bool:
    """Whether something is an overload of an op.

    >>> is_op(torch.ops.aten.add.Tensor), is_op(torch.add)
    (True, False)
    """
    return isinstance(x, torch._ops.OpOverload)


def find_op(namespace: str, name: str, overload: str) -> Any | None:
    """The overload of an op by name; None if there is none.

    >>> find_op("aten", "add", "Tensor"), find_op("aten", "add", "Nothing")
    (<OpOverload(op='aten.add', overload='Tensor')>, None)
    """
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload, None)
    return found if is_op(found) else None


def read_schema(func: Any) -> Schema:
    """The schema of an op overload.

    >>> schema = read_schema(torch.ops.aten.add_.Tensor)
    >>> schema.name, schema.overload, schema.arguments[0].writes, schema.returns[0].alias == schema.arguments[0].alias
    ('aten::add_', 'Tensor', True, True)
    """
    raw = func._schema

    def alias(info: Any) -> frozenset[str]:
        return frozenset() if info is None else frozenset(info.before_set)

    return Schema(
        raw.name,
        func._overloadname,
        tuple(
            Argument(
                a.name,
                str(a.type),
                a.default_value,
                a.has_default_value(),
                alias(a.alias_info),
                a.alias_info is not None and a.alias_info.is_write,
                a.is_out,
                a.kwarg_only,
            )
            for a in raw.arguments
        ),
        tuple(
            Return(str(r.type), alias(r.alias_info), r.alias_info is not None and r.alias_info.is_write)
            for r in raw.returns
        ),
    )


def signature_of(func: Any, name: str) -> str:
    """The signature of an op overload in the form that `torch.library` takes, for an op of another name.

    >>> signature_of(torch.ops.aten.exp.default, "another")
    'another(Tensor self) -> Tensor'
    """
    schema = func._schema
    return str(schema).replace(f"{schema.name}.{schema.overload_name}".rstrip("."), name, 1)


def overloads_of(op: Any) -> list[Any] | None:
    """The overloads that are meant by an overload, an op with all its overloads, or a custom op; None for anything else.

    >>> overloads_of(torch.ops.aten.mm.default)
    [<OpOverload(op='aten.mm', overload='default')>]
    """
    if isinstance(op, torch._ops.OpOverload):
        return [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    custom = getattr(op, "_opoverload", None)  # what torch.library.custom_op returns
    return None if custom is None else [custom]


def all_ops(namespace: str) -> list[Any]:
    """Every op overload of a namespace, by name.

    >>> torch.ops.aten.mm.default in all_ops("aten")
    True
    """
    out = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == namespace and hasattr(getattr(torch.ops, namespace), packet):
            found = getattr(getattr(torch.ops, namespace), packet)
            if (overload or "default") in found.overloads():
                out.append(getattr(found, overload or "default"))
    return out


@lru_cache(maxsize=4096)
def is_composite(func: Any) -> bool:
    """Whether torch runs the op as other ops, so that it reaches a tensor subclass only in inference mode.

    >>> is_composite(torch.ops.aten.reshape.default), is_composite(torch.ops.aten.mm.default)
    (True, False)
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def run_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite op as other ops: by torch's C++ code, since its Python code does not check arguments.

    >>> run_composite(torch.ops.aten.reshape.default, (torch.ones(2, 3), [6]), {}).shape
    torch.Size([6])
    """
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def has_derivative(func: Any) -> bool:
    """Whether torch knows the op's derivative; without one, plain tensors may still be differentiated through its kernel.

    >>> has_derivative(torch.ops.aten.mm.default), has_derivative(torch.ops.aten.histc.default)
    (True, True)
    """
    keys = ("Autograd", "AutogradCPU", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)


def decomposition_of(func: Any) -> Callable[..., Any] | None:
    """The op as a Python function of other ops, from torch's table of decompositions.

    >>> decomposition_of(torch.ops.aten.addcmul.default) is not None
    True
    """
    # imported at first use: it takes a second, and few programs need it
    table = importlib.import_module("torch._decomp").decomposition_table
    return table.get(func)  # type: ignore[no-any-return]


# Ops whose Python binding takes the op's arguments in the same order: it is quicker than the boxed call.
_FUNCTIONS = frozenset(
    "add sub mul div neg exp log sqrt rsqrt reciprocal tanh sigmoid relu sin cos abs pow where eq ne lt le gt ge "
    "maximum minimum logical_not bitwise_not isnan isfinite sign floor ceil round trunc erf expm1 log1p sub "
    "mm bmm mv addmm baddbmm t transpose permute clone _softmax _log_softmax sum mean amax amin "
    "zeros_like ones_like cat embedding unsqueeze native_layer_norm".split()
)
_METHODS = frozenset(
    "detach select add_ sub_ mul_ div_ neg_ sqrt_ zero_ fill_ copy_ addcmul_ addcdiv_ lerp_".split()
)
_NN_FUNCTIONS = frozenset("gelu silu mish softplus hardtanh hardswish hardsigmoid leaky_relu elu".split())


def python_binding(func: Any) -> Callable[..., Any]:
    """The quickest function that runs an op on plain tensors.

    >>> python_binding(torch.ops.aten.neg.default)(torch.ones(2))
    tensor([-1., -1.])
    """
    name = func._schema.name.removeprefix("aten::")
    if name == "split":
        return torch._VF.split  # type: ignore[no-any-return, attr-defined]  # torch.split is a Python function
    if name in _METHODS:
        return getattr(torch._C.TensorBase, name)  # type: ignore[no-any-return]
    if name in _FUNCTIONS or name.startswith("_foreach_"):
        return getattr(torch, name)  # type: ignore[no-any-return]
    if name in _NN_FUNCTIONS:
        return getattr(torch._C._nn, name)  # type: ignore[no-any-return]
    return boxed_call(func)


def boxed_call(func: Any) -> Callable[..., Any]:
    """The op's call into the dispatcher, without the checks for `__torch_function__` around it.

    >>> boxed_call(torch.ops.aten.add.Tensor)(torch.ones(1), torch.ones(1))
    tensor([2.])
    """
    return func._op  # type: ignore[no-any-return]


def without_dispatch() -> AbstractContextManager[Any]:
    """Inside, ops on tensor subclasses act on the wrapper alone: its sizes and strides."""
    return no_dispatch()


@cache
def records_views(func: Any) -> bool:
    """Whether torch records a view or an in-place op itself, before the op reaches `__torch_dispatch__`.

    >>> records_views(torch.ops.aten.view.default), records_views(torch.ops.aten.movedim.int)
    (True, False)
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView")


def tracking_views() -> AbstractContextManager[Any]:
    """Inside, views and in-place ops are recorded as such, which the ops that `__torch_dispatch__` calls are not otherwise.

    Inference mode passes composite ops on whole, before the ops that they consist of are recorded.
    """
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def below_autograd() -> AbstractContextManager[Any]:
    """Inside, ops run beneath autograd although gradients are enabled.

    >>> x = torch.ones(1, requires_grad=True)
    >>> with below_autograd():
    ...     (x + 1).grad_fn is None
    True
    """
    return torch._C._AutoDispatchBelowAutograd()


def transforms_are_active() -> bool:
    """Whether the call is inside a transform of `torch.func`, such as `vmap`.

    >>> torch.func.vmap(lambda x: x + transforms_are_active())(torch.zeros(2)), transforms_are_active()
    (tensor([1., 1.]), False)
    """
    return torch._C._are_functorch_transforms_active()
