"""The rule table: one row per op, from all families.

For each op: which dims of its tensors may be split, and which pending reductions pass through it.
Written by `make rules`.

  m k, k n -> m n   The dims of the tensor arguments, then of the outputs, as letters. A mesh axis may split
                    any letter, and then splits every dim of that letter. If an output lacks the letter,
                    each rank computes a partial sum of it: a pending sum.
  k by max          The pending reduction is a max instead of a sum.
  !d  !             A dim that must not be split, with or without a name.
  …  !…             Any number of dims; with !, none of them may be split.
  *                 A tensor that must be replicated.
  name: m k         The dims of the argument of this name. Arguments that are not listed must be replicated.
  [m k]             A list of tensors.
  pointwise         The tensors broadcast to one shape, any dim of which may be split.
  linear in (0)     A pending sum or average of argument 0 passes through to the outputs.
  linear in (0,1)   A pending sum passes through if arguments 0 and 1 are both pending.
  increasing        A pending max or min passes through.
  decreasing        A pending max becomes a pending min, and the other way round.
  passes max        A pending max passes through. "passes any reduction": so does every other one.
  max of all        A pending max passes through if all arguments have it.
  max of one        A pending max of one argument passes through, if the others have none.
  masked lookup     Each rank reads at the indices inside its block and takes 0 for the others: a pending sum.

Pending reductions that do not pass through are completed before the op runs. Ops without a line here are
decomposed, run by a program of their own, or run on full tensors.
"""

from __future__ import annotations

from shardwise.rules.rule import Listing, Row
from shardwise.rules.tables import (
    attention,
    contraction,
    convolution,
    creation,
    embedding_bag,
    grouped_mm,
    indexing,
    linalg,
    loss,
    normalization,
    pointwise,
    prims,
    reduction,
    scatter,
    searchsorted,
    slicing,
    spatial,
    view_and_cat,
    view_copies,
    whole_dims,
)

__all__ = ["REGISTERED", "TABLE", "printed", "row_of"]

_FAMILIES = (
    pointwise, contraction, reduction, whole_dims, view_and_cat, indexing, scatter, creation, linalg, view_copies,
    searchsorted, convolution, slicing, spatial, normalization, loss, attention, embedding_bag, grouped_mm,
    prims,
)  # fmt: skip


def _join() -> dict[str, Row]:
    table: dict[str, Row] = {}
    for family in _FAMILIES:
        if twice := table.keys() & family.ROWS.keys():
            raise RuntimeError(f"{sorted(twice)} have two rows each: this is a bug in shardwise")
        table |= family.ROWS
    return table


TABLE: dict[str, Row] = _join()
REGISTERED: dict[str, Row | Listing] = {}
"""Rows that users registered; they take precedence over `TABLE`."""

_HEADER = "".join(f"# {line}".rstrip() + "\n" for line in (__doc__ or "").strip().split("\n")[2:]) + "\n"


def row_of(name: str) -> Row | Listing | None:
    """The entry of an op: a user's, or else ours."""
    return REGISTERED.get(name) or TABLE.get(name)


def printed() -> str:
    """The table as text, one line per op; the repository has a copy, so that changes are reviewed as a diff."""
    rows = {name: row.text for name, row in TABLE.items()}
    rows |= dict.fromkeys(view_and_cat.REGROUPED, view_and_cat.REGROUPED_TEXT)
    width = max(len(name) for name in rows)
    return _HEADER + "".join(f"{name:{width}}  {text}\n" for name, text in sorted(rows.items()))
