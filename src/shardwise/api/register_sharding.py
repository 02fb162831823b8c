"""Rules by users: in our notation, or as a function that lists placements, which is torch's form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from shardwise.call.schema import op_info
from shardwise.dispatch.infer_rule import inferred_row
from shardwise.layout import LayoutError
from shardwise.plan.settings import forget_decisions
from shardwise.rules import Listing, Row
from shardwise.rules.notation import row
from shardwise.rules.table import REGISTERED
from shardwise.torch_internals.dispatcher import is_composite, overloads_of

__all__ = ["op_overloads", "register_sharding"]

_Lister = TypeVar("_Lister", bound=Callable[..., Any])
_log = logging.getLogger("shardwise")


@overload
def register_sharding(op: Any) -> Callable[[_Lister], _Lister]: ...
@overload
def register_sharding(
    op: Any,
    text: str | Row,
    *,
    by: Mapping[str, str] | None = ...,
    linear: Sequence[Sequence[int]] = ...,
    added: Sequence[int] = ...,
    reads: bool = ...,
    empty: bool = ...,
) -> Row: ...


def register_sharding(
    op: Any,
    text: str | Row | None = None,
    *,
    by: Mapping[str, str] | None = None,
    linear: Sequence[Sequence[int]] = (),
    added: Sequence[int] = (),
    reads: bool = True,
    empty: bool = True,
) -> Any:
    """Give an op a rule, in place of ours if it has one: a row in our notation, or a function that lists placements.

    The function is decorated; it gets the op's arguments, with a spec for each tensor, and lists pairs of what the
    outputs and the inputs may be on one axis of a mesh. `shardwise.rules.verify(op)` proves either form.

    In a row, letters behind the arrow are those of the outputs; one that is missing there is reduced, `by` sum or what
    is said, and `added` are arguments that are added to such parts. `linear` are groups of tensor arguments in which
    a pending sum passes through. What an op writes to stays as it lies. `empty=False` if it takes no empty blocks,
    `reads=False` if its numbers do not matter to the row. A `Row` made elsewhere may stand for the text, and
    "?" for one that is found by running the op on pieces of small tensors: only say so of an op of which values do
    not decide what may be split.

    >>> import shardwise as sw
    >>> @torch.library.custom_op("docs::scale_rows", mutates_args=())
    ... def scale_rows(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    ...     return x * by[:, None]
    >>> _ = scale_rows.register_fake(lambda x, by: torch.empty_like(x))
    >>> register_sharding(scale_rows, "m n, m -> m n", linear=[[0], [1]]).text
    'm n, m -> m n; linear in (0) and in (1)'
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = sw.distribute_tensor(torch.ones(4, 3), mesh, [sw.Shard(1)])
    ...     print(scale_rows(x, sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Replicate()])).sharding)
    [4, 3:tp]
    """
    ops = op_overloads(op)
    if text is None:

        def decorate(lister: _Lister) -> _Lister:
            where = getattr(lister, "__qualname__", repr(lister))
            _register(ops, Listing(f"listed by {where}", lister))
            return lister

        return decorate
    if text == "?":
        rows = [inferred_row(one) for one in ops]
        for one, found in zip(ops, rows, strict=True):
            _register([one], found)
        return rows[0]
    made = text if isinstance(text, Row) else None
    made = made or row(str(text), by=by, linear=linear, added=added, reads=reads, empty=empty)
    _register(ops, made)
    return made


def op_overloads(op: Any) -> list[Any]:
    """The overloads that are meant by an overload, an op with all its overloads, a custom op, or a list of such."""
    if isinstance(op, list | tuple) and op:
        return [o for one in op for o in op_overloads(one)]
    overloads = overloads_of(op)
    if overloads is not None and len(overloads) > 1:
        overloads = [o for o in overloads if op_info(o).tensor_arguments]
        # ops that write have the rules of their functional variants
        return [o for o in overloads if not op_info(o).writes] or overloads
    if overloads is not None:
        return overloads
    raise LayoutError(
        f"{op!r} is not an op.",
        why="rules are for ops of torch's dispatcher",
        fix="use one like torch.ops.aten.mm.default, what torch.library.custom_op returned, or a list of them",
    )


def _register(ops: Sequence[Any], entry: Row | Listing) -> None:
    for op in ops:
        REGISTERED[op_info(op).name] = entry
        if is_composite(op):
            _log.warning(
                "%s is made of other ops before a DTensor sees it: a rule for it is used in inference mode only. "
                "Register rules for what it is made of.",
                op,
            )
    forget_decisions(plans=False)
