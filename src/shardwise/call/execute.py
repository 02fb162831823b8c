"""Executing a resolved call: move the operands, run the op or a program on the blocks, wrap the results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_tensors, tensors_in, with_tensors
from shardwise.call.kept_moves import move_once, unshared
from shardwise.call.local_program import LocalProgram
from shardwise.call.meta import MASKED, without_masked
from shardwise.call.moved_view import remember_base
from shardwise.call.resolve import Resolution
from shardwise.call.schema import OpInfo, op_info
from shardwise.call.writes import shares_memory
from shardwise.comm import PerRank, map_ranks, members_of, spread
from shardwise.comm.per_rank import at_rank, join
from shardwise.layout import Spec
from shardwise.tensor.construct import replicated_spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import communication, run_plan
from shardwise.torch_internals.subclass import new_dtensor

__all__ = ["execute", "wrap"]


def wrap(result: Any, specs: Iterator[Spec]) -> Any:
    """The results of an op with each tensor wrapped in the next spec; None and numbers stay."""
    return map_tensors(lambda block: new_dtensor(DTensor, block, next(specs), False), result)


def execute(func: Any, resolution: Resolution, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call as its rule resolved it. This is the general path; `dispatch.fast_path` has shorter ones."""
    info = op_info(func)
    blocks = _moved_blocks(func, resolution, tensors_in([*args, *kwargs.values()]), info)

    def run(program: LocalProgram | None, blocks: list[Tensor]) -> Any:
        if program is not None:
            return program(blocks)
        rest = iter(blocks)
        return map_ranks(func, *with_tensors(args, rest), **with_tensors(kwargs, rest))

    programs = resolution.programs
    if programs is None:
        result = run(None, blocks)
    elif resolution.simulated:
        ranks = members_of(resolution.mesh)
        result = join({r: run(programs[r], at_rank(blocks, r)) for r in ranks}, str(func))
    else:
        result = run(programs[None], blocks)
    if func in MASKED and isinstance(result, list | tuple):  # blocks without values come from meta kernels
        result = without_masked(func, args, kwargs, result)
    if programs is not None and not info.writes and any(resolution.moves):
        moved = [b for b, plan in zip(blocks, resolution.moves, strict=True) if plan is not None]
        result = map_tensors(lambda r: unshared(r, moved), result)  # an op copies, but a program may not
    if info.writes and programs is not None:
        map_ranks(torch.ops.aten.copy_.default, blocks[0], result)
    if (target := info.returned_argument(args, kwargs)) is not None:
        return target
    out = wrap(result, _specs(resolution, result))
    if resolution.is_view and info.is_view and resolution.moves[0] is None and _is_copy(blocks[0], result):
        return remember_base(func, args, kwargs, out, "copied")
    return out


def _moved_blocks(func: Any, resolution: Resolution, tensors: list[Tensor], info: OpInfo) -> list[Tensor]:
    blocks: list[Tensor] = []
    writes, mesh = info.writes, resolution.mesh
    with communication(func, resolution.moves):
        for t, plan in zip(tensors, resolution.moves, strict=True):
            block = t._local_tensor if isinstance(t, DTensor) else t
            if resolution.simulated and not isinstance(block, PerRank) and (plan is not None or writes):
                # each rank moves and writes its own copy
                block = spread(block, list(members_of(mesh)))
            if plan is None:
                blocks.append(block)
            elif writes or info.is_view:
                blocks.append(run_plan(func, plan, block, mesh))
            else:
                blocks.append(move_once(t, plan, partial(run_plan, func, plan, block, mesh)))
    return blocks


def _specs(resolution: Resolution, result: Any) -> Iterator[Spec]:
    """The specs of the results; meta kernels do not always know the sizes of auxiliary outputs."""
    if not resolution.replicated:
        return iter(resolution.outputs)
    mesh, pairs = resolution.mesh, zip(resolution.outputs, tensors_in([result]), strict=True)
    known = resolution.replicated
    return (replicated_spec(t, mesh) if i in known else spec for i, (spec, t) in enumerate(pairs))


def _is_copy(block: Tensor, view: Any) -> bool:
    """Whether the strides of a block allowed no view, so that it was copied."""
    if isinstance(block, PerRank) and isinstance(view, PerRank):
        return any(_is_copy(b, view.of_rank(r)) for r, b in block._blocks.items())
    return isinstance(view, Tensor) and bool(view.numel()) and not shares_memory(block, view)
