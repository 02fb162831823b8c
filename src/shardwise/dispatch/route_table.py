"""The table of routes: which mechanisms may run each op, in the order in which they are tried.

Which mechanisms may run each op on DTensors, in the order in which they are tried. The first that handles a call runs it,
except that of rule, alternative and decomposition the one that sends the least is taken. Every op ends with the fallback.

  rule                   its row in rules.txt says which layouts it may run in; operands are redistributed to the cheapest
  alternative (family)   a program along a split dim, if that sends less than the rule: see src/shardwise/alternatives
  decomposition          torch's own decomposition into other ops, if that sends less than gathering the operands
  functional variant     computes the results with the op that returns them, and copies them into the targets
  composite              torch runs it as other ops, unless its rule is used in inference mode
  random                 draws from the random stream, the same numbers in any layout
  foreach                one kernel on all blocks of the lists, or the op for one tensor on each element
  optimizer              one fused kernel on all blocks, in the layouts of the parameters
  request                asks for a value: communicates because the program asks for it
  in-place view          changes the tensor's own shape: the result of the out-of-place op replaces it
  fallback               gathers the operands and runs the op on the full tensors, and logs it once

Not listed: ops without a tensor argument, composite ops without a rule, and in-place and out variants of listed ops that have
no route of their own. An in-place variant has the rule of its op, in the layout of its target. Before all that, a call with
plain targets, sparse tensors or tensors on a sub-mesh is handled as such, and so is a call on a rank that is not on the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.alternatives.registry import ALTERNATIVES, FAMILIES
from shardwise.call.schema import OpInfo, op_info
from shardwise.call.variants import program_for
from shardwise.ops.foreach import FUSED
from shardwise.ops.random_ops import random_program
from shardwise.ops.requests import REQUESTS
from shardwise.ops.unscale import UNSCALE
from shardwise.rules.table import row_of
from shardwise.rules.tables.view_and_cat import REGROUPED
from shardwise.torch_internals.dispatcher import all_ops, is_composite

__all__ = ["printed_routes", "routes_of"]

_HEADER = "".join(f"# {line}".rstrip() + "\n" for line in (__doc__ or "").strip().split("\n")[2:]) + "\n"


def routes_of(func: Any) -> list[str]:
    """The mechanisms that may run an op, in the order in which they are tried.

    >>> routes_of(torch.ops.aten.native_layer_norm.default)
    ['rule', 'alternative (statistics)', 'decomposition', 'fallback']
    """
    info = op_info(func)
    only = _only_route(info)
    if only is not None:
        return [only]
    out = []
    if row_of(info.name) or row_of(info.rule_name) or (info.rule_name in REGROUPED and not info.writes):
        out.append("rule")
    if func in ALTERNATIVES:
        family = next(f for f in FAMILIES if func in f.ALTERNATIVES)
        out.append(f"alternative ({family.__name__.rpartition('.')[2]})")
    if is_composite(func):
        out.append("composite")
        return out
    if not info.is_view and program_for(func) is not None:
        out.append("functional variant" if info.writes else "decomposition")
    return [*out, "fallback"]


def _only_route(info: OpInfo) -> str | None:
    if info.qualified_name.startswith("aten::_foreach_"):
        return "foreach"
    if info.qualified_name in FUSED or info.func is UNSCALE:
        return "optimizer"
    if random_program(info.func) is not None:
        return "random"
    if info.func in REQUESTS:
        return "request"
    return "in-place view" if torch.Tag.inplace_view in info.tags else None


def _listed_ops() -> Iterator[Any]:
    for func in all_ops("aten"):
        info = op_info(func)
        is_variant = info.writes and (info.functional is not None or bool(info.rule_name))
        if info.tensor_arguments and (not is_variant or (not info.out_names and _only_route(info))):
            yield func


def printed_routes() -> str:
    """The table as text; a copy is kept in docs/routes.txt and reviewed as a diff."""
    lines = {}
    for func in _listed_ops():
        name, routes = op_info(func).name, routes_of(func)
        if routes != ["composite"]:
            lines["aten._foreach_*" if routes == ["foreach"] else name] = ", ".join(routes)
    width = max(map(len, lines))
    return _HEADER + "".join(f"{name:{width}}  {routes}\n" for name, routes in sorted(lines.items()))
