"""The parser of the text form of a layout."""

from __future__ import annotations

import re

from shardwise.layout.axes import Axes
from shardwise.layout.errors import LayoutError
from shardwise.layout.factor import Factor
from shardwise.layout.layout import Layout
from shardwise.layout.placement import Partial

__all__ = ["parse_layout"]

_FORM = re.compile(r"(?P<dtype>[a-z]\w*)?\[(?P<dims>[^\]]*)\](?P<partial>(?:\s+P\([^(),]+,\s*[a-z]+\))*)")
_PARTIAL = re.compile(r"P\(([^(),]+),\s*([a-z]+)\)")


def parse_layout(text: str, axes: Axes) -> tuple[Layout, str]:
    """Parse a layout; also return the short name of its dtype, or "" if the text has none.

    >>> parse_layout("f32[8:dp, 6] P(tp,sum)", Axes((2, 2), ("dp", "tp")))
    ([8:dp, 6] P(tp,sum), 'f32')
    """
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise _invalid(text, "It is not of the form dtype[dim, dim, …] P(axis,op).")
    parts = re.split(r",\s+", form["dims"].strip()) if form["dims"].strip() else []
    dims = [_parse_dim(part, axes, text) for part in parts]
    partial: dict[int, str] = {}
    for name, op in _PARTIAL.findall(form["partial"]):
        axis = axes.index(name.strip())
        if axis in partial:
            raise _invalid(text, f"Axis {axes.names[axis]} is partial twice.")
        partial[axis] = Partial(op).reduce_op
    return Layout(axes, dims, partial), form["dtype"] or ""


def _parse_dim(part: str, axes: Axes, text: str) -> list[Factor]:
    out = []
    for word in part.split() or [""]:
        size, colon, names = word.partition(":")
        if not size.isdecimal():
            raise _invalid(text, f"{size!r} is not a size.")
        out.append(Factor(int(size), tuple(axes.index(n) for n in names.split(",")) if colon else ()))
    return out


def _invalid(text: str, why: str) -> LayoutError:
    return LayoutError(
        f"{text!r} is not a layout.", why=why, fix="Write it like f32[8:dp, 4 6:tp] P(cp,sum)."
    )
