"""Text pictures of layouts: which ranks hold which part of a tensor."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardwise.comm import coord_of, is_simulated, ranks_of
from shardwise.layout import Layout, LayoutError, owned
from shardwise.tensor import DTensor

__all__ = ["picture", "visualize_sharding"]

_MAX_STRIPES = 40
_MARKS = {"sum": "+", "avg": "~", "max": "^", "min": "_", "product": "*"}


def picture(layout: Layout, ranks: list[int] | None = None) -> str:
    """Draw a layout of one or two dims; each cell lists the ranks that hold it, joined by + if they hold partial sums.

    `ranks` are the ranks of the mesh in order, by default 0, 1, ...

    >>> from shardwise.layout import Axes, parse_layout
    >>> print(picture(parse_layout("[5:dp, 4:tp]", Axes((2, 2), ("dp", "tp")))[0]))
           0:2   2:4
         ┌─────┬─────┐
     0:3 │  0  │  1  │
         ├─────┼─────┤
     3:5 │  2  │  3  │
         └─────┴─────┘
    """
    if layout.ndim not in (1, 2):
        raise LayoutError(
            f"{layout} has {layout.ndim} dims, and a picture has one or two.",
            why="A picture is printed as rows and columns of text.",
            fix="Draw a slice of the tensor, such as x[0], or a view of it, such as x.flatten(1).",
        )
    if 0 in layout.shape:
        return "(empty)"
    blocks = [owned(layout, layout.axes.coord(i)) for i in range(layout.axes.count)]
    ranks = ranks or list(range(len(blocks)))
    rows = _stripes(layout.shape[0], [block[0] for block in blocks]) if layout.ndim == 2 else []
    columns = _stripes(layout.shape[-1], [block[-1] for block in blocks])
    outer: list[tuple[int, ...]] = [(start,) for start, _ in rows] or [()]
    cells = [[_cell(layout, blocks, ranks, (*at, start)) for start, _ in columns] for at in outer]
    return _table(rows, columns, cells)


def _stripes(size: int, held: list[Sequence[int]]) -> list[tuple[int, int]]:
    """The longest ranges of a dim's indices in which every index is held by the same ranks."""
    sets = [frozenset(indices) for indices in held]
    starts = [i for i in range(size) if i == 0 or any((i in s) != (i - 1 in s) for s in sets)]
    if len(starts) > _MAX_STRIPES:
        raise LayoutError(
            f"A picture with {len(starts)} rows or columns is too wide.",
            why=f"At most {_MAX_STRIPES} fit a terminal.",
            fix="Draw a smaller tensor with the same placements.",
        )
    return list(zip(starts, [*starts[1:], size], strict=True))


def _cell(
    layout: Layout, blocks: list[tuple[Sequence[int], ...]], ranks: list[int], index: tuple[int, ...]
) -> str:
    """The ranks that hold an element, as text."""
    partial = dict(layout.partial)
    mark = next((_MARKS[op] for op in partial.values()), "")
    groups: dict[tuple[int, ...], list[str]] = {}
    for i, block in enumerate(blocks):
        if not all(x in dim for x, dim in zip(index, block, strict=True)):
            continue
        key = tuple(x for axis, x in enumerate(layout.axes.coord(i)) if axis not in partial)
        groups.setdefault(key, []).append(str(ranks[i]))
    return ",".join(mark.join(group) for group in groups.values())


def _table(rows: list[tuple[int, int]], columns: list[tuple[int, int]], cells: list[list[str]]) -> str:
    heads = [f"{start}:{end}" for start, end in columns]
    sides = [f"{start}:{end}" for start, end in rows] or [""]
    left = max(map(len, sides)) + 2
    widths = [max(len(h), *(len(row[i]) for row in cells)) + 2 for i, h in enumerate(heads)]
    lines = [" " * left + " " + " ".join(h.center(w) for h, w in zip(heads, widths, strict=True)).rstrip()]

    def border(first: str, between: str, last: str) -> str:
        return " " * left + first + between.join("─" * w for w in widths) + last

    for i, row in enumerate(cells):
        lines.append(border("├", "┼", "┤") if i else border("┌", "┬", "┐"))
        texts = [text.center(w) for text, w in zip(row, widths, strict=True)]
        lines.append(sides[i].rjust(left - 1) + " │" + "│".join(texts) + "│")
    return "\n".join([*lines, border("└", "┴", "┘")])


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which part of a DTensor of one or two dims, on the first rank of its mesh.

    Nothing is printed for an empty tensor. `header` is printed first. `use_rich` is accepted for compatibility with
    torch and ignored: the picture is plain text. No communication.
    """
    mesh, me = dtensor.device_mesh, coord_of(dtensor.device_mesh)
    if dtensor.numel() == 0 or not (is_simulated() or (me is not None and not any(me))):
        return
    lines = [header, str(dtensor._spec), picture(dtensor.sharding, ranks_of(mesh))]
    sys.stdout.write("\n".join(line for line in lines if line) + "\n")
