"""Rules by users: in the notation of the rule table, or as a function that lists placements, as in torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
    """Give an op a sharding rule, which replaces the built-in one if there is one.

    With `text` the rule is a row in the notation of docs/rules.txt. Without it this is a decorator, as in torch, for a
    function that gets the arguments of a call, with a spec for each tensor, and returns a list of pairs: the placements of
    the outputs and those of the inputs, on one mesh axis. `shardwise.rules.verify(op)` checks either form by execution.

    Args:
        op: an op overload, an op with all its overloads, a custom op, or a list of these.
        text: the letters of each tensor argument and, behind the arrow, of each output; or a `Row`; or "?" to infer the
            row by running the op on parts of small tensors, which is only valid if the values of its arguments do not
            decide what may be split.
        by: the reduction of letters that no output has, if it is not a sum: `{"k": "max"}`.
        linear: groups of tensor arguments in which the op is linear, so that partial sums pass through.
        added: tensor arguments that are added to the reduced value, such as a bias; where that is a partial sum, so are
            they.
        reads: whether the rule depends on arguments that are not tensors.
        empty: whether the op accepts empty blocks.

    Returns:
        The row, or the decorator.

    Raises:
        LayoutError: `op` is not an op, or `text` is not a row.

    Arguments that the op writes to keep their layout. Nothing is communicated.

    >>> import torch, shardwise as sw
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
        return partial(_register_listing, ops)
    if text == "?":
        rows = [inferred_row(one) for one in ops]
        for one, found in zip(ops, rows, strict=True):
            _register([one], found)
        return rows[0]
    if not isinstance(text, Row):
        text = row(text, by=by, linear=linear, added=added, reads=reads, empty=empty)
    _register(ops, text)
    return text


def _register_listing(ops: list[Any], lister: _Lister) -> _Lister:
    where = getattr(lister, "__qualname__", repr(lister))
    _register(ops, Listing(f"listed by {where}", lister))
    return lister


def op_overloads(op: Any) -> list[Any]:
    """The overloads of an op with all its overloads, a custom op, a single overload, or a list of these."""
    if isinstance(op, list | tuple) and op:
        return [overload for one in op for overload in op_overloads(one)]
    overloads = overloads_of(op)
    if overloads is not None and len(overloads) > 1:
        overloads = [o for o in overloads if op_info(o).tensor_arguments]
        # in-place and out variants have the rule of their functional variant
        return [o for o in overloads if not op_info(o).writes] or overloads
    if overloads is not None:
        return overloads
    raise LayoutError(
        f"{op!r} is not an op.",
        why="Sharding rules are for ops of torch's dispatcher.",
        fix="Use torch.ops.aten.mm.default, the result of torch.library.custom_op, or a list of these.",
    )


def _register(ops: Sequence[Any], entry: Row | Listing) -> None:
    for op in ops:
        REGISTERED[op_info(op).name] = entry
        if is_composite(op):
            _log.warning(
                "%s is decomposed into other ops before a DTensor sees it, so its rule is used in inference mode only. "
                "Register rules for the ops that it consists of.",
                op,
            )
    forget_decisions(plans=False)
