"""The layout of a parameter as a plan writes it: `[o:tp, i]`, with letters for sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from shardwise.layout import Axes, Factor, Layout, LayoutError

__all__ = ["is_notation", "parameter_layout"]


def is_notation(text: str) -> bool:
    """Whether the text is meant as a layout and not as the name of a style.

    >>> is_notation("[o:tp, i]"), is_notation("colwise")
    (True, False)
    """
    return text.lstrip().startswith("[")


def parameter_layout(text: str, shape: Sequence[int], axes: Axes) -> Layout:
    """The layout of a tensor of this shape.

    A factor is a number or a letter, and after a colon the axes that split it. A dim may have one letter, whose size follows
    from the others.

    >>> parameter_layout("[2 n:tp, k]", (12, 5), Axes((2,), ("tp",)))
    [2 6:tp, 5]
    """
    inner = re.fullmatch(r"\s*\[([^\]]*)\]\s*", text)
    if inner is None:
        raise _invalid(text, shape, "It is not of the form [dim, dim, …].")
    parts = re.split(r",\s+", inner[1].strip()) if inner[1].strip() else []
    if len(parts) != len(shape):
        raise _invalid(text, shape, f"It has {len(parts)} dims, and the parameter has {len(shape)}.")
    return Layout(axes, [_parse_dim(p, n, axes, text, shape) for p, n in zip(parts, shape, strict=True)])


def _parse_dim(part: str, size: int, axes: Axes, text: str, shape: Sequence[int]) -> list[Factor]:
    words = [word.partition(":") for word in part.split()]
    known = math.prod(int(name) for name, _, _ in words if name.isdecimal())
    letters = [name for name, _, _ in words if not name.isdecimal()]
    if len(letters) > 1:
        raise _invalid(text, shape, f"The dim {part!r} has more than one letter, so their sizes are unknown.")
    if size != known if not letters else known == 0 or size % known != 0:
        raise _invalid(text, shape, f"The dim {part!r} does not fit the size {size}.")
    rest = 0 if known == 0 else size // known
    return [
        Factor(
            int(name) if name.isdecimal() else rest,
            tuple(axes.index(axis) for axis in names.split(",")) if colon else (),
        )
        for name, colon, names in words
    ]


def _invalid(text: str, shape: Sequence[int], why: str) -> LayoutError:
    return LayoutError(
        f"{text!r} is not a layout of a parameter of shape {tuple(shape)}.",
        why=why,
        fix='Write one dim per dim of the parameter, like "[o:tp, i]", or with factors "[3 h:tp 64, i]".',
    )
