"""Symbolic sizes of `torch.compile`: as parts of interned values, and as numbers."""

from __future__ import annotations

import math
import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from shardwise.layout.sizes import forget_symbols

__all__ = [
    "SymbolicSize",
    "find_symbols_in_graphs",
    "is_symbolic_number",
    "sign_of",
    "symbolic_size",
    "terms_of",
    "untraced",
    "value_of_symbol",
]

_interned: WeakValueDictionary[tuple[int, Any], SymbolicSize] = WeakValueDictionary()
_current: list[Any] = [lambda: None]  # a weak reference to what the last symbols belong to
_PRECISION = 1 << 40


class SymbolicSize(torch.SymInt):
    """A symbolic size that can be hashed. There is one object for each expression of a compilation."""

    def __init__(self, node: Any, key: Any) -> None:
        super().__init__(node)
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __format__(self, form: str) -> str:
        return str(self)

    def __deepcopy__(self, memo: object) -> SymbolicSize:
        return self


def symbolic_size(size: Any) -> Any:
    """A symbolic size as `SymbolicSize`, by what the compiler knows of it now; the number, if that is known.

    >>> symbolic_size(2)
    2
    """
    if not isinstance(size, torch.SymInt):
        return size
    node = size.node
    expression = node.expr
    if expression.is_number:
        return int(expression)
    env = node.shape_env
    if _current[0]() is not env:
        _current[0] = ref(env)
        forget_symbols()
    key = (id(env), expression)
    known = _interned.get(key)
    if known is None:
        known = _interned.setdefault(key, SymbolicSize(node, key))
    return known


def is_symbolic_number(x: object) -> bool:
    """Whether something is a symbol of any kind.

    >>> is_symbolic_number(2)
    False
    """
    return isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool)


def value_of_symbol(x: Any) -> Any:
    """The value of a symbol that is not a whole number, on which the compiled code then depends.

    >>> value_of_symbol(2)
    2
    """
    if isinstance(x, torch.SymFloat):
        return float(x)
    return bool(x) if isinstance(x, torch.SymBool) else x


def terms_of(size: Any) -> dict[Any, int]:
    """A size as a sum of products of symbols, each of which is at least 1: from products to coefficients; 1 for the constant.

    >>> terms_of(6)
    {1: 6}
    """
    if not isinstance(size, torch.SymInt):
        return {1: int(size)}
    return dict(size.node.expr.expand().as_coefficients_dict())


def sign_of(terms: dict[Any, float]) -> int:
    """The sign of a sum of products of symbols with these coefficients, for the sizes at hand; compiled code checks it.

    >>> sign_of({1: -2.5})
    -1
    """
    evaluate = getattr(_current[0](), "evaluate_expr", bool)
    products = [k for k, c in terms.items() if k != 1 and c]
    total: Any
    # whole numbers, which the compiler can reason about
    if len(products) == 1:
        (product,) = products
        scale = 1 if terms[product] > 0 else -1
        bound = -terms.get(1, 0.0) / terms[product]
        if bound != int(bound):
            return scale if evaluate(product > math.floor(bound)) else -scale
        total = scale * (product - int(bound))
    else:
        largest = max(map(abs, terms.values()))
        total = sum(round(c / largest * _PRECISION) * k for k, c in terms.items())
    return 1 if evaluate(total > 0) else -1 if evaluate(total < 0) else 0


def untraced() -> AbstractContextManager[Any]:
    """A block in which calculations with symbols are not recorded into a graph; their results may be used in it.

    >>> with untraced():
    ...     pass
    """
    return nullcontext() if get_proxy_mode() is None else disable_proxy_modes_tracing()


class _FirstKept(dict[Any, Any]):
    """A dict in which the first value of a key stays."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.setdefault(key, value)


def find_symbols_in_graphs() -> None:
    """Have the tracer of a graph express any size by the inputs of the graph.

    Sizes that were calculated outside of a graph are decomposed where they are used in it. Of that,

    - a symbol is to be found in the input that has it. The tracer remembers the last node whose value is the symbol; if that is
      one like `sym_max(s0, 1)`, it would look for the argument of the node in the node itself, without end.
    - a product of three sizes is two nodes. The tracer makes it one with three arguments, of which code for `a * b` drops one.
    - powers, which it does not know, are products, too.
    """
    module: Any = proxy_tensor
    if not hasattr(module, "_build_proxy_for_sym_expr"):
        return
    init, build = module._init_proxy_trackers, module._build_proxy_for_sym_expr

    def init_trackers(tracer: Any) -> None:
        init(tracer)
        tracer.sympy_expr_tracker = _FirstKept()

    def build_proxy(tracer: Any, expression: Any, out: Any = None) -> Any:
        factors = _factors(expression)
        if len(factors) < 2 or (len(factors) == 2 and not expression.is_Pow):
            return build(tracer, expression, out)
        *rest, last = factors
        product = expression.func(*rest) if not expression.is_Pow else expression / last
        a, b = build_proxy(tracer, product), build_proxy(tracer, last)
        if a is None or b is None:
            return None
        if out is None:
            return a * b
        module._sym_register(tracer, operator.mul, (a, b), out)
        return out

    module._init_proxy_trackers, module._build_proxy_for_sym_expr = init_trackers, build_proxy


def _factors(expression: Any) -> tuple[Any, ...]:
    """The factors of a product or of a power with a small exponent; else the expression alone."""
    if getattr(expression, "is_Mul", False):
        return tuple(expression.args)
    if getattr(expression, "is_Pow", False) and expression.exp.is_Integer and 1 < expression.exp < 9:
        return (expression.base,) * int(expression.exp)
    return (expression,)
