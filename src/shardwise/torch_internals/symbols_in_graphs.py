"""Symbolic sizes in graphs: sizes that were calculated elsewhere, expressed by the inputs of a graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor

from shardwise.torch_internals.symbolic_sizes import SizeNode, symbolic_size

__all__ = ["find_symbols_in_graphs"]


_INPUTS = "_shardwise_inputs"


class _FirstKept(dict[Any, Any]):
    """A dict in which the first value of a key stays."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.setdefault(key, value)


def find_symbols_in_graphs() -> None:
    """Have the tracer of a graph express the sizes of our tensors by the inputs of the graph.

    Sizes that were calculated outside of a graph are decomposed where they are used in it. Of that,

    - a symbol is to be found in the input that has it. The tracer remembers the last node whose value is the symbol; if that is
      one like `sym_max(s0, 1)`, it would look for the argument of the node in the node itself, without end.
    - a product of three sizes is two nodes. The tracer makes it one with three arguments, of which code for `a * b` drops one.
      Powers, which it does not know, are products, too; and inductor knows the larger of two sizes, but not of three.
    - what is not a symbol is to be calculated, and not read from a gradient that happens to have this size: the forward pass has
      no gradients.
    """
    module: Any = proxy_tensor
    if not hasattr(module, "_build_proxy_for_sym_expr"):
        return
    init, build, sizes = (
        module._init_proxy_trackers,
        module._build_proxy_for_sym_expr,
        module._SymNodeDict,
    )
    track = sizes.__setitem__

    def init_trackers(tracer: Any) -> None:
        init(tracer)
        tracer.sympy_expr_tracker = _FirstKept()

    def track_size(self: Any, size: Any, proxy: Any) -> None:
        if type(size.node) is not SizeNode or size.node.expr.is_Symbol:
            track(self, size, proxy)
        else:
            self.__dict__.setdefault(_INPUTS, _FirstKept())[size.node.expr] = proxy

    def compute(tracer: Any, func: Any, args: tuple[Any, ...], out: Any) -> Any:
        # some may have become numbers in the meantime
        if len(args) == 1 and isinstance(args[0], list | tuple):
            args = (tuple(map(symbolic_size, args[0])),)
        return module._compute_proxy(tracer, func, tuple(map(symbolic_size, args)), out)

    def register(tracer: Any, func: Any, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, module.py_sym_types):
            thunk = module.thunkify(tracer, compute, tracer, func=func, args=args, out=out)
            tracer.symnode_tracker.sym_node_dict.setdefault(out.node, thunk)
            module.set_proxy_slot(out, tracer, thunk)

    def build_proxy(tracer: Any, expression: Any, out: Any = None) -> Any:
        result = calculate(tracer, expression, out)
        if result is None and out is not None:  # a graph that has a tensor of this size, but not its symbols
            proxy = tracer.symnode_tracker.__dict__.get(_INPUTS, {}).get(expression)
            if proxy is not None:
                tracer.symnode_tracker.sym_node_dict[out.node] = proxy
                return out
        return result

    def calculate(tracer: Any, expression: Any, out: Any) -> Any:
        parts = _halves(expression)
        if parts is None:
            return build(tracer, expression, out)
        op, *args = parts
        a, b = (build_proxy(tracer, arg) for arg in args)
        if a is None or b is None:
            return None
        if out is None:
            return op(a, b)
        register(tracer, op, (a, b), out)
        return out

    module._init_proxy_trackers, module._build_proxy_for_sym_expr = init_trackers, build_proxy
    sizes.__setitem__, module._sym_register = track_size, register


_BINARY = {
    "Mul": operator.mul,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}


def _halves(expression: Any) -> tuple[Any, Any, Any] | None:
    """An op of two arguments and its arguments, for an expression that the tracer does not take apart in this way."""
    if getattr(expression, "is_Pow", False) and expression.exp.is_Integer and 1 < expression.exp < 9:
        return operator.mul, expression / expression.base, expression.base
    kind = type(expression).__name__
    if kind not in _BINARY:
        return None
    *rest, last = expression.args
    return _BINARY[kind], rest[0] if len(rest) == 1 else expression.func(*rest), last
