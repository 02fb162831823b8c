"""The table: one row per op, from all families."""

from __future__ import annotations

from shardwise.rules.rule import Listing, Row
from shardwise.rules.tables import (
    attention,
    contraction,
    convolution,
    creation,
    indexing,
    linalg,
    loss,
    normalization,
    pointwise,
    reduction,
    scatter,
    spatial,
)
from shardwise.rules.tables import embedding_bag as bag
from shardwise.rules.tables import searchsorted as search
from shardwise.rules.tables import slicing as ranges
from shardwise.rules.tables import view_and_cat as shape
from shardwise.rules.tables import view_copies as views
from shardwise.rules.tables import whole_dims as along

__all__ = ["REGISTERED", "TABLE", "printed", "row_of"]

_FAMILIES = (
    pointwise.ROWS,
    contraction.ROWS,
    reduction.ROWS,
    along.ROWS,
    shape.ROWS,
    indexing.ROWS,
    scatter.ROWS,
    creation.ROWS,
    linalg.ROWS,
    views.ROWS,
    search.ROWS,
    convolution.ROWS,
    ranges.ROWS,
    spatial.ROWS,
    normalization.ROWS,
    loss.ROWS,
    attention.ROWS,
    bag.ROWS,
)


def _joined() -> dict[str, Row]:
    table: dict[str, Row] = {}
    for family in _FAMILIES:
        if twice := table.keys() & family.keys():
            raise RuntimeError(f"{sorted(twice)} have two rows each, which is a mistake in shardwise")
        table |= family
    return table


TABLE: dict[str, Row] = _joined()
REGISTERED: dict[str, Row | Listing] = {}  # by users; these come before ours


def row_of(name: str) -> Row | Listing | None:
    """The entry of an op, the user's before ours."""
    return REGISTERED.get(name) or TABLE.get(name)


def printed() -> str:
    """The table as text, one line per op; a copy is kept in the repo and reviewed as a diff."""
    rows = {name: row.text for name, row in TABLE.items()} | dict.fromkeys(
        shape.REGROUPED, "regroups factors"
    )
    width = max(len(name) for name in rows)
    return "".join(f"{name:{width}}  {text}\n" for name, text in sorted(rows.items()))
