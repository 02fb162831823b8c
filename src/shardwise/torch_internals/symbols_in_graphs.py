"""Symbolic sizes in graphs: sizes that were calculated elsewhere, expressed by the inputs of a graph."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx.experimental import proxy_tensor

from shardwise.torch_internals.symbolic_sizes import SizeNode

__all__ = ["find_symbols_in_graphs"]


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
      Powers, which it does not know, are products, too.
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

    def register(tracer: Any, func: Any, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, module.py_sym_types):
            thunk = module.thunkify(tracer, module._compute_proxy, tracer, func=func, args=args, out=out)
            tracer.symnode_tracker.sym_node_dict.setdefault(out.node, thunk)
            module.set_proxy_slot(out, tracer, thunk)

    def build_proxy(tracer: Any, expression: Any, out: Any = None) -> Any:
        factors = _factors(expression)
        if len(factors) < 2 or (len(factors) == 2 and not expression.is_Pow):
            return build(tracer, expression, out)
        *rest, last = factors
        product = expression / last if expression.is_Pow else expression.func(*rest)
        a, b = build_proxy(tracer, product), build_proxy(tracer, last)
        if a is None or b is None:
            return None
        if out is None:
            return a * b
        register(tracer, operator.mul, (a, b), out)
        return out

    module._init_proxy_trackers, module._build_proxy_for_sym_expr = init_trackers, build_proxy
    sizes.__setitem__, module._sym_register = track_size, register


def _factors(expression: Any) -> tuple[Any, ...]:
    """The factors of a product or of a power with a small exponent; else the expression alone."""
    if getattr(expression, "is_Mul", False):
        return tuple(expression.args)
    if getattr(expression, "is_Pow", False) and expression.exp.is_Integer and 1 < expression.exp < 9:
        return (expression.base,) * int(expression.exp)
    return (expression,)
