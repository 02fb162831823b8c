"""Dispatch modes and tracing: fake tensors, and the error that makes a compiler break its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._C._dynamo.eval_frame as eval_frame
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    has_proxy_slot,
    track_tensor_tree,
)
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TRACED_CALL",
    "TorchDispatchMode",
    "break_graph",
    "is_recorded",
    "is_recorded_block",
    "is_recording",
    "is_tracing",
    "needs_concrete_values",
    "never_compile",
    "proxy_mode",
    "record_call",
    "record_constants",
]

proxy_mode = get_proxy_mode
"""The mode of `make_fx` or of a compiler that records ops into a graph, or None."""
TRACED_CALL = "torch.fx.experimental.proxy_tensor.proxy_call"
"""The function that `make_fx` calls for each op: `proxy_call(mode, op, pre_dispatch, args, kwargs)`."""


def is_tracing() -> bool:
    """Whether ops run on tensors without values, for a compiler.

    >>> is_tracing()
    False
    """
    fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake_mode is not None or torch.compiler.is_compiling()


def is_recording() -> bool:
    """Whether `make_fx` or a compiler records the ops that run into a graph.

    >>> is_recording()
    False
    """
    return get_proxy_mode() is not None


def is_recorded(block: Tensor) -> bool:
    """Whether a tensor has no values, or ops on it are recorded into a graph.

    >>> is_recorded(torch.ones(1))
    False
    """
    return isinstance(block, FakeTensor | FunctionalTensor) or get_proxy_mode() is not None


def is_recorded_block(mode: Any, block: Tensor) -> bool:
    """Whether the graph that a proxy mode records has a node for this very tensor.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> seen = []
    >>> _ = make_fx(lambda x: seen.append(is_recorded_block(get_proxy_mode(), x)) or x * 1)(torch.ones(2))
    >>> seen
    [True]
    """
    return bool(has_proxy_slot(block, mode.tracer))


def needs_concrete_values(func: Any) -> Exception:
    """The error of an op that cannot be traced; `torch.compile` breaks the graph there and runs the op eagerly.

    >>> type(needs_concrete_values(torch.ops.aten.item.default)).__name__
    'DataDependentOutputException'
    """
    return DataDependentOutputException(func)


def break_graph() -> None:
    """In code that is being compiled: end the graph here and run what follows eagerly.

    >>> break_graph()
    """
    torch._dynamo.graph_break()


def never_compile(function: Callable[..., Any]) -> None:
    """Have `torch.compile` run a function, and everything that it calls, eagerly.

    Where a graph breaks at an op, the op runs as it is: the code that runs it is not to be compiled either.

    >>> def example(x):
    ...     return x + 1
    >>> never_compile(example)
    >>> example(1)
    2
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def record_constants(mode: Any, tensors: Sequence[Any]) -> None:
    """Have the graph that `make_fx` records hold tensors that are not its inputs, as attributes of its module.

    It does so by itself for plain tensors. For a tensor subclass it records the ops inside the subclass, whose result then
    is a constant.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def example(x):
    ...     record_constants(get_proxy_mode(), [w])
    ...     return x * w
    >>> w = torch.ones(2)
    >>> graph = make_fx(example)(torch.ones(2))
    >>> [node.op for node in graph.graph.nodes if node.op != "call_function"]
    ['placeholder', 'get_attr', 'output']
    """
    tracer = mode.tracer
    for t in tensors:
        if not has_proxy_slot(t, tracer):
            node = tracer.create_arg(t)
            track_tensor_tree(t, Proxy(node, tracer), constant=None, tracer=tracer)


def record_call(mode: Any, function: Callable[[Any], Any], x: Tensor) -> Any:
    """Run a function of a tensor that a graph has as a whole, and have the graph call it, instead of the ops that it runs.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> graph = make_fx(lambda x: record_call(get_proxy_mode(), torch.sin, x))(torch.ones(2))
    >>> [node.target for node in graph.graph.nodes if node.op == "call_function"] == [torch.sin]
    True
    """
    tracer = mode.tracer
    with disable_proxy_modes_tracing():
        out = function(x)
        slot: Any = get_proxy_slot(x, tracer)
        proxy = tracer.create_proxy("call_function", function, (slot.proxy,), {})
        return track_tensor_tree(out, proxy, constant=None, tracer=tracer)
