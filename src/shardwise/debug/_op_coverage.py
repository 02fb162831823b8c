"""Which ops a module consists of, and how each of them runs on DTensors."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx, nn

from shardwise.rules.table import row_of
from shardwise.torch_internals.dispatcher import is_op
from shardwise.torch_internals.op_graphs import decomposed_graphs

__all__ = ["get_inductor_decomp_graphs", "print_op_coverage_summary"]


def get_inductor_decomp_graphs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[fx.GraphModule]:
    """The graphs of a model and of its backward pass, in the ops into which inductor decomposes them."""
    return decomposed_graphs(model, args, kwargs)


def print_op_coverage_summary(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, output_csv: bool = False
) -> None:
    """Print a line for each op of a model and its backward pass: how often it occurs, and its rule if it has one.

    Args:
        model: the model; it is copied, so that its gradients do not change.
        args: the positional arguments of a call.
        kwargs: its keyword arguments.
        output_csv: also write the lines to `op_summary.csv`.
    """
    counts = Counter(
        str(node.target)
        for graph in get_inductor_decomp_graphs(model, args, kwargs)
        for node in graph.graph.nodes
        if is_op(node.target)
    )
    rows = [(op, n, getattr(row_of(op), "text", "no rule of its own")) for op, n in counts.most_common()]
    for op, n, text in rows:
        print(f"{op:48} {n:4}  {text}")  # noqa: T201 - it is what the function is for
    if output_csv:
        with Path("op_summary.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("op", "count", "rule"), *rows])
