"""Sizes that are not numbers: while a compiler traces a program for all sizes of a dim, the size of that dim is a symbol.

Symbols calculate and compare as numbers do. Where code asks something that depends on the size, such as `size % 2 == 0` or
`range(size)`, the compiler answers for the size at hand and checks at each call of the compiled code that the answer is the
same. So the code of this package is right for symbols without knowing of them; what it must not do is to convert a symbol
into a number where a symbol would do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

__all__ = [
    "Symbols",
    "are_symbolic",
    "as_size",
    "as_sizes",
    "at_new_symbols",
    "cached",
    "common_multiple",
    "divides",
    "forget_symbols",
    "known_symbols",
    "least",
    "most",
    "same_sizes",
    "set_symbols",
]

_T = TypeVar("_T")


class Symbols(NamedTuple):
    """What can be done with symbols, beside calculating with them.

    Attributes:
        form: a symbol in a form that can be hashed, of which there is one object; the number, if it is known.
        terms: a size as a sum: from products of symbols to their coefficients, and from 1 to the constant.
        sign: the sign of such a sum, with coefficients of any kind: -1, 0 or 1, for the sizes at hand and checked later.
        least: the smaller of two sizes, as a symbol.
        most: the larger of two sizes, as a symbol.
    """

    form: Callable[[Any], Any]
    terms: Callable[[Any], dict[Any, Any]]
    sign: Callable[[dict[Any, float]], int]
    least: Callable[[Any, Any], Any]
    most: Callable[[Any, Any], Any]


_symbols: list[Symbols] = []


def set_symbols(symbols: Symbols) -> None:
    """Set what is known of symbols; the package that knows the compiler does."""
    _symbols[:] = [symbols]


def known_symbols() -> Symbols:
    """What was set."""
    return _symbols[0]


def as_size(size: Any) -> Any:
    """A size that can be a part of an interned value: a number, or a symbol of which there is one object.

    >>> as_size(3)
    3
    """
    return size if type(size) is int or not _symbols else _symbols[0].form(size)


def as_sizes(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Sizes or strides that can be parts of an interned value."""
    return tuple([as_size(n) for n in sizes])


def are_symbolic(sizes: Iterable[Any]) -> bool:
    """Whether one of some sizes is a symbol.

    >>> are_symbolic((2, 3))
    False
    """
    return any(not isinstance(n, int) for n in sizes)


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal. Tuples of different lengths would be compared element by element, for symbols a question.

    >>> same_sizes((2, 3), (2, 3)), same_sizes((2,), (2, 3))
    (True, False)
    """
    return len(a) == len(b) and a == b


def divides(parts: int, size: Any) -> bool:
    """Whether a size is known to be a multiple of a number. Of a symbol this is no question: it may be for some sizes only.

    >>> divides(2, 6), divides(4, 6)
    (True, False)
    """
    rest = as_size(size % parts)
    return type(rest) is int and rest == 0


def least(a: Any, b: Any) -> Any:
    """The smaller of two sizes. `min` of symbols would be a question.

    >>> least(2, 3)
    2
    """
    return min(a, b) if type(a) is type(b) is int else _symbols[0].least(a, b)


def most(a: Any, b: Any) -> Any:
    """The larger of two sizes.

    >>> most(2, 3)
    3
    """
    return max(a, b) if type(a) is type(b) is int else _symbols[0].most(a, b)


def common_multiple(a: Any, b: Any) -> Any:
    """The least common multiple of two sizes.

    >>> common_multiple(4, 6)
    12
    """
    if type(a) is type(b) is int:
        return math.lcm(a, b)
    if a % b == 0:
        return as_size(a)
    return as_size(b) if b % a == 0 else math.lcm(a, b)


at_new_symbols: list[Callable[[], None]] = []
"""Caches to be cleared when another program is traced: symbols keep everything alive that the compiler knows of a program."""


def forget_symbols() -> None:
    """Clear the caches that may refer to symbols."""
    for clear in at_new_symbols:
        clear()


def cached(most: int) -> Callable[[Callable[..., _T]], _lru_cache_wrapper[_T]]:
    """`lru_cache` for a function of layouts, specs or sizes, which may be symbolic.

    >>> @cached(16)
    ... def double(n):
    ...     return 2 * n
    >>> double(3), double(3), double.cache_info().hits
    (6, 6, 1)
    """

    def decorate(function: Callable[..., _T]) -> _lru_cache_wrapper[_T]:
        out = lru_cache(maxsize=most)(function)
        at_new_symbols.append(out.cache_clear)
        return out

    return decorate
