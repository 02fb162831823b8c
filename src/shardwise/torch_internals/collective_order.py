"""The same collectives in the same order on all ranks, in the graphs that compilers make of a program.

Ranks trace the same program, but their graphs differ in what surrounds the collectives: a rank whose block is empty sends a
new tensor instead of a part of one, or does not use what it receives. A compiler looks at the graph of one rank. It may merge
two collectives that are equal there, drop one whose result nothing needs there, compute one of the backward pass in the
forward pass where it does not depend on the gradients there, or reorder those that do not depend on each other there. Other
ranks would wait. Here each of these steps of AOTAutograd is told to leave the collectives of this library alone; inductor
keeps the order of the graph that it is given.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from shardwise.torch_internals.collectives import traced_groups
from shardwise.torch_internals.module_fixer import after_import
from shardwise.torch_internals.ordered_ops import define_op

__all__ = ["collectives_of", "count_as_collective", "keep_collectives_alike"]

_MARK = "shardwise_number"
_END = "shardwise_region_end"
_all_to_all = torch.ops._c10d_functional.all_to_all_single.default
_wait = torch.ops._c10d_functional.wait_tensor.default
_complete: set[Any] = set()  # ops of our own that communicate
_after = define_op(
    "after(Tensor x, Tensor[] waited) -> Tensor",
    lambda x, waited: x.clone(),
    lambda x, waited: torch.empty_like(x),
)


def collectives_of(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The collectives of a graph over groups that this library communicates in, in their order."""
    return [n for n in graph.nodes if _is_collective(n) and any(a in traced_groups for a in _texts(n))]


def count_as_collective(op: Any) -> None:
    """Have an op be left alone, too: one that begins a collective and waits for it. It has the name of the group as an argument."""
    _complete.add(op)
    torch.fx.node.has_side_effect(op)  # passes that drop unused nodes keep it


def _is_collective(node: torch.fx.Node) -> bool:
    if node.target in _complete:
        return True
    return getattr(node.target, "namespace", None) == "_c10d_functional" and node.target is not _wait


def _texts(node: torch.fx.Node) -> list[str]:
    return [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]


def keep_collectives_alike() -> None:
    """Have compilers leave the collectives of this library as they were traced, now and when AOTAutograd is loaded."""
    after_import("torch._functorch.partitioners", _fix)


def _fix(partitioners: Any) -> None:
    merge, force_save = partitioners.fx_graph_cse, partitioners.force_save_effectful_ops
    reorder = partitioners.reordering_to_mimic_autograd_engine

    # later releases of torch have further arguments
    def merge_others(graph: torch.fx.Graph, *args: Any, **kwargs: Any) -> torch.fx.Graph:
        return _with_collectives_apart(graph, lambda g: merge(g, *args, **kwargs))

    def force_save_and_keep(joint_module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _keep_in_their_pass(joint_module.graph)
        _keep_unused(joint_module.graph)
        return force_save(joint_module, *args, **kwargs)

    def reorder_others(module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        wanted = [n.name for n in _common_order(collectives_of(module.graph))]
        out: torch.fx.GraphModule = reorder(module, *args, **kwargs)
        _order_collectives(out.graph, wanted)
        return out

    partitioners.fx_graph_cse = merge_others
    partitioners.force_save_effectful_ops = force_save_and_keep
    partitioners.reordering_to_mimic_autograd_engine = reorder_others


def _with_collectives_apart(graph: torch.fx.Graph, merge: Any) -> torch.fx.Graph:
    """A graph without common subexpressions, in which no two collectives count as equal."""
    for number, node in enumerate(collectives_of(graph)):
        node.kwargs = {**node.kwargs, _MARK: number}
    out: torch.fx.Graph = merge(graph)
    for node in (*graph.nodes, *out.nodes):
        if _MARK in node.kwargs:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != _MARK}
    return out


def _keep_in_their_pass(graph: torch.fx.Graph) -> None:
    """Have collectives run in the pass that they were traced in, and exchanges not again where a checkpoint would do so.

    What a checkpoint computes again is what the gradients of this rank need. A rank that sends nothing in an all-to-all does
    not need what it would have sent, and others do; so its result is saved. Other collectives have equal parts.
    """
    backward = _backward_nodes(graph)
    ends: dict[Any, int] = {}
    for n in graph.nodes:
        region = n.meta.get("ac_graph_id")
        if region is not None and n not in backward:
            ends[region] = max(ends.get(region, 0), n.meta.get("seq_nr", 0))
    for n in collectives_of(graph):
        if n in backward:
            n.meta["partitioner_tag"] = "must_be_in_backward"
        elif n.target is _all_to_all or n.target in _complete:
            for node in (n, *n.users):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        else:
            n.meta[_END] = ends.get(n.meta.get("ac_graph_id"))


def _backward_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes of the backward pass in a graph of both. Those of custom functions have no tag; all come after the forward pass."""
    out: set[torch.fx.Node] = set()
    has_begun = False
    for n in graph.nodes:
        if n.op == "placeholder":
            if str(n.target).startswith("tangents"):
                out.add(n)
        elif n.op == "call_function":
            has_begun = has_begun or _has_backward_tag(n) or any(i in out for i in n.all_input_nodes)
            if _has_backward_tag(n) or (has_begun and n.meta.get("partitioner_tag") is None):
                out.add(n)
    return out


def _keep_unused(graph: torch.fx.Graph) -> None:
    """Keep collectives whose results this rank does not use, by a result of the same pass that depends on them.

    Splitting a graph into forward and backward drops what no output depends on.
    """
    ours, of_backward = set(collectives_of(graph)), _backward_nodes(graph)
    output: Any = graph.output_node()
    for is_backward in (False, True):
        unused = [
            n
            for n in graph.nodes
            if not n.users and _is_result(n, ours) and (n in of_backward) is is_backward
        ]
        results = [n for n in output.args[0] if _is_tensor(n) and (n in of_backward) is is_backward]
        if not unused or not results:
            continue
        least = min(results, key=lambda n: (n.op == "placeholder", _size(n)))
        with graph.inserting_before(output):
            node = graph.call_function(_after, (least, unused))
        node.meta.update({k: v for k, v in least.meta.items() if k not in ("recompute", "desc")})
        node.meta["partitioner_tag"] = "is_backward" if is_backward else "is_forward"
        output.replace_input_with(least, node)


def _is_result(node: torch.fx.Node, collectives: set[torch.fx.Node]) -> bool:
    """Whether a node is what a collective has received."""
    if node.target in _complete:
        return node in collectives
    return node.target is _wait and node.args[0] in collectives


def _is_tensor(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _size(node: torch.fx.Node) -> int:
    shape = node.meta["val"].shape
    return math.prod(shape) if all(isinstance(n, int) for n in shape) else 2**62


def _has_backward_tag(node: torch.fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _common_order(nodes: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """The collectives of a backward pass in an order that is the same on all ranks.

    Those of the backward pass itself run as they were traced. Those that a checkpoint runs again run where autograd would
    reach its region: before the first whose forward op is in the region or precedes it.
    """
    again = [n for n in nodes if not _has_backward_tag(n)]
    out: list[torch.fx.Node] = []
    for n in nodes:
        if _has_backward_tag(n):
            number = n.meta.get("seq_nr", -1)
            due = [f for f in again if (f.meta.get(_END) or math.inf) >= number]
            out += [*due, n]
            again = [f for f in again if f not in due]
    return out + again


def _order_collectives(graph: torch.fx.Graph, wanted: list[str]) -> None:
    """Sort the nodes of a graph: the collectives in an order, all else where it is as far as possible."""
    nodes = list(graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    by_name = {n.name: n for n in nodes}
    chain = [by_name[name] for name in wanted if name in by_name]
    if [place[n] for n in chain] == sorted(place[n] for n in chain):
        return
    needs = {n: set(n.all_input_nodes) for n in nodes}
    for before, n in itertools.pairwise(chain):
        needs[n].add(before)
    users: dict[Any, list[Any]] = {n: [] for n in nodes}
    for n, inputs in needs.items():
        for i in inputs:
            users[i].append(n)
    ready = [place[n] for n in nodes if not needs[n]]
    heapq.heapify(ready)
    found: list[Any] = []
    while ready:
        n = nodes[heapq.heappop(ready)]
        found.append(n)
        for user in users[n]:
            needs[user].discard(n)
            if not needs[user]:
                heapq.heappush(ready, place[user])
    if len(found) < len(nodes):  # a region of a checkpoint whose result an earlier collective needs
        return
    for before, n in itertools.pairwise(found):
        before.append(n)
