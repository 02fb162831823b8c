"""The text form of a layout, used in reprs, errors, documentation and tests; `parse_layout` reads it back.

    f32[8:dp,tp, 4 6:cp] P(ep,sum)

A dim is a list of factors, outermost first, separated by spaces. A factor is its size and, after a colon, the axes
that split it. Dims are separated by a comma and a space, axes by a comma alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.layout.axes import Axes
from shardwise.layout.factor import Dim

__all__ = ["block_sizes_text", "layout_text"]


def layout_text(axes: Axes, dims: Sequence[Dim], partial: Sequence[tuple[int, str]], dtype: str = "") -> str:
    """The text form of a layout, after the short name of a dtype if one is given."""
    names = axes.names
    text = ", ".join(_dim_text(dim, names) for dim in dims)
    return f"{dtype}[{text}]" + "".join(f" P({names[a]},{op})" for a, op in partial)


def _dim_text(dim: Dim, names: tuple[str, ...]) -> str:
    factors = (f"{f.size}:{','.join(names[a] for a in f.axes)}" if f.axes else str(f.size) for f in dim)
    return " ".join(factors) or "1"


def block_sizes_text(blocks: tuple[int, ...], most: int = 6) -> str:
    """Block sizes for an error message, abbreviated if there are many.

    >>> block_sizes_text((3, 3, 3, 1)), block_sizes_text((2,) * 99)
    ('(3, 3, 3, 1)', '(2, 2, 2, … 2)')
    """
    if len(blocks) <= most or (math.prod(blocks) == 0 and len(blocks) <= 2 * most):
        return str(blocks)
    return f"({', '.join(map(str, blocks[:3]))}, … {blocks[-1]})"
