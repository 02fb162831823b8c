"""Symbolic sizes of `torch.compile`: as parts of interned values, and as numbers."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

from shardwise.layout.sizes import forget_symbols
from shardwise.torch_internals.late_numbers import becomes_number

__all__ = [
    "SizeNode",
    "SymbolicSize",
    "belongs_to_layouts",
    "hash_by_expression",
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


class SizeNode(SymNode):
    """The node of a `SymbolicSize`, which is in use in all graphs of a compilation."""


class SymbolicSize(torch.SymInt):
    """A symbolic size that can be hashed. There is one object for each expression of a compilation."""

    def __init__(self, node: Any, key: Any) -> None:
        super().__init__(node)  # type: ignore[no-untyped-call]
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
    known = node.maybe_as_int()
    if known is not None:
        return known
    expression = node.expr
    if becomes_number(expression):
        return int(size)
    env = node.shape_env
    if _current[0]() is not env:
        _current[0] = ref(env)
        forget_symbols()
    key = (id(env), expression)
    found = _interned.get(key)
    if found is None:
        own = SizeNode(expression, env, int, node._hint, None, node.fx_node)
        found = _interned.setdefault(key, SymbolicSize(own, key))
    return found


def belongs_to_layouts(symbol: Any) -> bool:
    """Whether a symbol is one of the program whose layouts have symbolic sizes: the one that is being traced.

    >>> belongs_to_layouts(2)
    False
    """
    env = getattr(getattr(symbol, "node", None), "shape_env", None)
    return env is not None and env is _current[0]()


def is_symbolic_number(x: object) -> bool:
    """Whether something is a symbol of any kind.

    >>> is_symbolic_number(2)
    False
    """
    return isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool)


def value_of_symbol(x: Any) -> Any:
    """The form of a symbol that is not a whole number in a call: of a truth value the value, on which the compiled code depends.

    >>> value_of_symbol(2)
    2
    """
    if isinstance(x, torch.SymFloat):
        known = x.node.maybe_as_float()
        return x if known is None else known
    return bool(x) if isinstance(x, torch.SymBool) else x


def hash_by_expression() -> None:
    """Have a number that was calculated from symbolic sizes, such as 2 / (n - 1), be hashed without becoming a constant.

    >>> hash_by_expression()
    """
    cls: Any = torch.SymFloat
    original = cls.__hash__

    def hash_of(self: Any) -> int:
        expression = getattr(self.node, "expr", None)
        if expression is None or self.node.maybe_as_float() is not None:
            return original(self)  # type: ignore[no-any-return]
        return hash(expression)

    cls.__hash__ = hash_of


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

    An exported program is for all sizes of a range that the user states, and checks nothing: it does what the sizes at hand ask for.

    >>> sign_of({1: -2.5})
    -1
    """
    products = [k for k, c in terms.items() if k != 1 and c]
    evaluate = _evaluator() if products else bool
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


def _evaluator() -> Any:
    """A function that answers questions about symbols for the sizes at hand."""
    env = _current[0]()
    values = getattr(env, "backed_var_to_val", None)
    if values is not None and torch.compiler.is_exporting():
        return lambda question: bool(question.xreplace(values))
    return getattr(env, "evaluate_expr", bool)


def untraced() -> AbstractContextManager[Any]:
    """A block in which calculations with symbols are not recorded into a graph; their results may be used in it.

    >>> with untraced():
    ...     pass
    """
    return nullcontext() if get_proxy_mode() is None else disable_proxy_modes_tracing()
