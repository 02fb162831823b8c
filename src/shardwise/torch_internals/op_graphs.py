"""The graphs of a module and of its backward pass, in the ops into which inductor decomposes them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch.utils import _pytree as pytree

__all__ = ["decomposed_graphs"]


def decomposed_graphs(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[fx.GraphModule]:
    """The forward graphs, then the backward graphs, of a call of a copy of a module.

    >>> [len(g.graph.nodes) > 2 for g in decomposed_graphs(nn.Linear(2, 2), [torch.ones(1, 2)], {})]
    [True, True]
    """
    forward: list[fx.GraphModule] = []
    backward: list[fx.GraphModule] = []

    def keep(into: list[fx.GraphModule]) -> Any:
        def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
            into.append(graph)
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep(forward), bw_compiler=keep(backward), decompositions=select_decomp_table()
    )
    run = copy.deepcopy(module)
    # a function, since compiling a module warns of hooks that all modules have
    out = torch.compile(lambda *args, **kwargs: run(*args, **kwargs), backend=backend)(*args, **kwargs)
    results = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if results:
        torch.autograd.backward([t.sum() for t in results])
    return forward + backward
