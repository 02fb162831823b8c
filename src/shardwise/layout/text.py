"""One notation for layouts, in reprs, errors, docs and tests; it parses back.

    f32[8:dp,tp, 4 6:cp] P(ep,sum)

A dim is its factors, outermost first, with blanks between; a factor is its size and, behind a colon, the
axes that split it. Dims are separated by a comma and a blank, axes by a comma alone.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from shardwise.layout.axes import Axes
from shardwise.layout.errors import LayoutError
from shardwise.layout.factor import Dim, Factor
from shardwise.layout.placement import Partial

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout

__all__ = ["layout_text", "parse_layout"]

_FORM = re.compile(r"(?P<dtype>[a-z]\w*)?\[(?P<dims>[^\]]*)\](?P<partial>(?:\s+P\([^(),]+,\s*[a-z]+\))*)")
_PARTIAL = re.compile(r"P\(([^(),]+),\s*([a-z]+)\)")


def layout_text(layout: Layout, dtype: str = "") -> str:
    """The text of a layout, with the short name of a dtype in front where given."""
    names = layout.axes.names
    dims = ", ".join(_dim_text(dim, names) for dim in layout.dims)
    return f"{dtype}[{dims}]" + "".join(f" P({names[a]},{op})" for a, op in layout.partial)


def _dim_text(dim: Dim, names: tuple[str, ...]) -> str:
    return (
        " ".join(f"{f.size}:{','.join(names[a] for a in f.axes)}" if f.axes else str(f.size) for f in dim)
        or "1"
    )


def parse_layout(text: str, axes: Axes) -> tuple[Layout, str]:
    """The layout, and the dtype's short name or "", that a text stands for.

    >>> parse_layout("f32[8:dp, 6] P(tp,sum)", Axes((2, 2), ("dp", "tp")))
    ([8:dp, 6] P(tp,sum), 'f32')
    """
    from shardwise.layout.layout import Layout  # a layout prints itself, so the two know each other

    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise _unreadable(text, "it is not of the form dtype[dim, dim, …] P(axis,op)")
    parts = re.split(r",\s+", form["dims"].strip()) if form["dims"].strip() else []
    dims = [_parse_dim(part, axes, text) for part in parts]
    partial: dict[int, str] = {}
    for name, op in _PARTIAL.findall(form["partial"]):
        axis = axes.index(name.strip())
        if axis in partial:
            raise _unreadable(text, f"axis {axes.names[axis]} is partial twice")
        partial[axis] = Partial(op).reduce_op
    return Layout(axes, dims, partial), form["dtype"] or ""


def _parse_dim(part: str, axes: Axes, text: str) -> list[Factor]:
    out = []
    for word in part.split() or [""]:
        size, colon, names = word.partition(":")
        if not size.isdecimal():
            raise _unreadable(text, f"{size!r} is not a size")
        out.append(Factor(int(size), tuple(axes.index(n) for n in names.split(",")) if colon else ()))
    return out


def _unreadable(text: str, why: str) -> LayoutError:
    return LayoutError(f"{text!r} is not a layout.", why=why, fix="write it like f32[8:dp, 4 6:tp] P(cp,sum)")


def count_text(blocks: tuple[int, ...], most: int = 6) -> str:
    """Block sizes for an error: all of a few, the ends of many.

    >>> count_text((3, 3, 3, 1)), count_text((2,) * 99)
    ('(3, 3, 3, 1)', '(2, 2, 2, … 2)')
    """
    if len(blocks) <= most or (math.prod(blocks) == 0 and len(blocks) <= 2 * most):
        return str(blocks)
    return f"({', '.join(map(str, blocks[:3]))}, … {blocks[-1]})"
