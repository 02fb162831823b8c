"""Running ops on blocks and wrapping their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from shardwise.call.arguments import map_leaves
from shardwise.comm import PerRank
from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.subclass import new_dtensor

__all__ = ["join_ranks", "with_blocks", "wrap"]


def wrap(result: Any, specs: Iterator[Spec]) -> Any:
    """The results of an op with each tensor wrapped in the next spec; None and numbers stay."""
    return map_leaves(
        lambda r: new_dtensor(DTensor, r, next(specs), False) if isinstance(r, Tensor) else r, result
    )


def with_blocks(func: Callable[..., Any], args: Any, kwargs: Any, blocks: Iterator[Tensor]) -> Any:
    """Call an op with each tensor argument replaced by the next block."""

    def block(leaf: Any) -> Any:
        return next(blocks) if isinstance(leaf, Tensor) else leaf

    return func(*map_leaves(block, args), **map_leaves(block, kwargs))


def join_ranks(results: Mapping[Any, Any]) -> Any:
    """The results of simulated ranks as one: a PerRank for each tensor."""
    first = next(iter(results.values()))
    if isinstance(first, Tensor):
        return PerRank(results)
    return type(first)(
        PerRank({r: v[i] for r, v in results.items()}) if isinstance(first[i], Tensor) else first[i]
        for i in range(len(first))
    )
