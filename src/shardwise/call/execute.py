"""An op on the blocks, with moves before it or a program in its place: the way of every call that is not direct."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.call.fallback import replicated_like, returned_by
from shardwise.call.resolve import Prepared, tensors_in
from shardwise.call.trace import tell
from shardwise.call.view_writeback import is_view
from shardwise.comm import PerRank, map_ranks, members_of, run, spread
from shardwise.dispatch.fast_path import wrapped
from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import mind

__all__ = ["general", "writes"]


def general(func: Any, recipe: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move the inputs, run the op or its program on the blocks, wrap what comes out."""
    found = tensors_in([*args, *kwargs.values()])
    mind(func, recipe.moves)
    tell(func, "row", args, kwargs, recipe.moves)
    blocks: list[Tensor] = []
    for t, move in zip(found, recipe.moves, strict=True):
        block = t._local_tensor if isinstance(t, DTensor) else t
        if recipe.simulated and not isinstance(block, PerRank) and (move is not None or writes(func)):
            # also what the op writes to: one rank writes there, not all in turn
            block = spread(block, list(members_of(recipe.mesh)))
        if move is not None:
            block = run(move, block, recipe.mesh)
        blocks.append(block)
    programs = recipe.programs
    if programs is None:
        rest = iter(blocks)
        result = map_ranks(func, *_filled(args, rest), **_filled(kwargs, rest))
    elif recipe.simulated:
        out = {}
        for rank, program in programs.items():
            mine = [b.of_rank(rank or 0) if isinstance(b, PerRank) else b for b in blocks]
            rest = iter(mine)
            out[rank] = (
                program(mine) if program is not None else func(*_filled(args, rest), **_filled(kwargs, rest))
            )
        result = _joined(out)
    else:
        rest = iter(blocks)
        program = programs[None]
        result = (
            program(blocks) if program is not None else func(*_filled(args, rest), **_filled(kwargs, rest))
        )
    if writes(func) and programs is not None:
        map_ranks(torch.ops.aten.copy_.default, blocks[0], result)
    if (target := returned_by(func, args, kwargs)) is not None:
        return target
    if recipe.regroups and recipe.moves[0] is None and is_view(func):
        _rejoin(args[0], result)
    return wrapped(result, _specs(recipe, result))


def _specs(recipe: Prepared, result: Any) -> Iterator[Spec]:
    """The specs of what came out; meta kernels do not always say how large a kernel's by-products are."""
    if not recipe.alike:
        return iter(recipe.outputs)
    came = [t for t in result if isinstance(t, Tensor)]
    pairs = enumerate(zip(recipe.outputs, came, strict=True))
    return iter([replicated_like(t, recipe.mesh) if i in recipe.alike else spec for i, (spec, t) in pairs])


def _rejoin(x: DTensor, seen: Tensor) -> None:
    """Where a block was not dense enough to be seen in another shape, and so was copied: let it be the copy.

    Then the tensor and its view share memory, as they do elsewhere. No other rank need do the same.
    """
    block = x._local_tensor
    if isinstance(block, PerRank) and isinstance(seen, PerRank):
        parts = {r: _rejoined(b, seen.of_rank(r)) for r, b in block._blocks.items()}
        if any(parts[r] is not b for r, b in block._blocks.items()):
            x._local_tensor = PerRank(parts)
    else:
        x._local_tensor = _rejoined(block, seen)


def _rejoined(block: Tensor, seen: Tensor) -> Tensor:
    copied = seen.is_contiguous() and not block.is_contiguous()
    return seen.view(block.shape) if copied else block


def _joined(results: dict[Any, Any]) -> Any:
    first = next(iter(results.values()))
    if isinstance(first, Tensor):
        return PerRank(results)
    return type(first)(
        PerRank({r: v[i] for r, v in results.items()}) if isinstance(first[i], Tensor) else first[i]
        for i in range(len(first))
    )


def _filled(value: Any, blocks: Any) -> Any:
    """Arguments with each tensor replaced by its block."""
    if isinstance(value, Tensor):
        return next(blocks)
    if isinstance(value, list | tuple):
        return type(value)(_filled(v, blocks) for v in value)
    if isinstance(value, dict):
        return {k: _filled(v, blocks) for k, v in value.items()}
    return value


_writing: dict[Any, bool] = {}


def writes(func: Any) -> bool:
    """Whether an op writes to an argument."""
    known = _writing.get(func)
    if known is None:
        args = func._schema.arguments
        known = _writing[func] = any(a.alias_info is not None and a.alias_info.is_write for a in args)
    return known
