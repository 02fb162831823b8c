"""Pictures of layouts for a terminal: which rank holds what."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product

from shardwise.comm import coord_of, is_simulated, siblings_of
from shardwise.layout import Layout, LayoutError, owned
from shardwise.tensor import DTensor

__all__ = ["picture", "visualize_sharding"]

_MOST_CELLS = 40


def picture(
    layout: Layout, ranks: list[int] | None = None, paint: Callable[[str, int], str] | None = None
) -> str:
    """A drawing of a layout of one or two dims; each cell names the ranks that hold it, parts of a sum with +.

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
            why="a terminal is flat",
            fix="look at a slice or a view of the tensor",
        )
    if 0 in layout.shape:
        return "(empty)"
    axes = layout.axes
    ranks = ranks or list(range(axes.count))
    coords = [axes.coord(i) for i in range(axes.count)]
    holdings = [owned(layout, c) for c in coords]
    rows = _runs(layout.shape[-2], [h[-2] for h in holdings]) if layout.ndim == 2 else [(0, 1)]
    cols = _runs(layout.shape[-1], [h[-1] for h in holdings])
    cells: list[list[str]] = []
    owners: list[list[int]] = []
    sign = {"sum": "+", "avg": "~", "max": "^", "min": "_", "product": "*"}
    mark = sign[layout.partial[0][1]] if layout.partial else "+"
    for (r, _), (c, _) in product(rows, cols):
        at = [i for i, h in enumerate(holdings) if c in h[-1] and (layout.ndim == 1 or r in h[0])]
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in at:
            key = tuple(x for a, x in enumerate(coords[i]) if all(a != p for p, _ in layout.partial))
            groups.setdefault(key, []).append(ranks[i])
        text = ",".join(mark.join(map(str, g)) for g in groups.values())
        if c == cols[0][0]:
            cells.append([])
            owners.append([])
        cells[-1].append(text)
        owners[-1].append(at[0] if at else 0)
    return _table(rows if layout.ndim == 2 else [], cols, cells, owners, paint)


def _runs(size: int, held: list[object]) -> list[tuple[int, int]]:
    """The runs of indices that are held by the same ranks throughout."""
    sets = [frozenset(h) for h in held]  # type: ignore[call-overload]
    starts = [i for i in range(size) if i == 0 or any((i in s) != (i - 1 in s) for s in sets)]
    runs = list(zip(starts, [*starts[1:], size], strict=True))
    if len(runs) > _MOST_CELLS:
        raise LayoutError(
            f"a picture of {len(runs)} stripes is too wide.",
            why=f"there is room for {_MOST_CELLS}",
            fix="draw a smaller tensor with the same placements",
        )
    return runs


def _table(
    rows: list[tuple[int, int]],
    cols: list[tuple[int, int]],
    cells: list[list[str]],
    owners: list[list[int]],
    paint: Callable[[str, int], str] | None,
) -> str:
    heads = [f"{a}:{b}" for a, b in cols]
    sides = [f"{a}:{b}" for a, b in rows] or [""]
    left = max(len(s) for s in sides) + 2
    widths = [max(len(h), *(len(row[i]) for row in cells)) + 2 for i, h in enumerate(heads)]
    lines = [" " * left + " " + " ".join(h.center(w) for h, w in zip(heads, widths, strict=True)).rstrip()]

    def rule(a: str, b: str, c: str) -> str:
        return " " * left + a + b.join("─" * w for w in widths) + c

    lines.append(rule("┌", "┬", "┐"))
    for i, row in enumerate(cells):
        if i:
            lines.append(rule("├", "┼", "┤"))
        texts = [t.center(w) for t, w in zip(row, widths, strict=True)]
        if paint is not None:
            texts = [paint(t, o) for t, o in zip(texts, owners[i], strict=True)]
        lines.append(sides[i].rjust(left - 1) + " │" + "│".join(texts) + "│")
    lines.append(rule("└", "┴", "┘"))
    return "\n".join(lines)


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds what of a DTensor of one or two dims; once, on the mesh's first rank.

    Of an empty tensor there is nothing to print. `use_rich` is accepted for torch's sake; the picture is plain text.
    """
    mesh, me = dtensor.device_mesh, coord_of(dtensor.device_mesh)
    if dtensor.numel() == 0 or not (is_simulated() or (me is not None and not any(me))):
        return
    ranks = siblings_of(mesh)[0] if is_simulated() else mesh.mesh.flatten().tolist()
    lines = [header, str(dtensor._spec), picture(dtensor.sharding, ranks)]
    sys.stdout.write("\n".join(line for line in lines if line) + "\n")
