"""Random draws in compiled code: a position of the stream that is taken when the code runs, and numbers computed from it.

The position is taken by an op with an effect, so that compiled code draws in the order of the program, and exactly as
often. The numbers are a function of it: where a checkpoint computes them again they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.tensor.seeding import next_draw
from shardwise.torch_internals.graph_values import mesh_named, name_mesh
from shardwise.torch_internals.ordered_ops import define_op

__all__ = ["define_numbers", "traced_numbers"]


def _position(mesh: str, device: torch.device) -> Tensor:
    seed, number = next_draw(mesh_named(mesh) if mesh else None)
    signed = seed - 2**64 if seed >= 2**63 else seed
    return torch.tensor([signed, number], dtype=torch.int64, device=device)


_next_position = define_op(
    "next_position(str mesh, Device device) -> Tensor",
    _position,
    lambda mesh, device: torch.empty(2, dtype=torch.int64, device=device),
    has_effect=True,
)
_numbers: list[Any] = []


def define_numbers(run: Callable[[Tensor, str, Tensor, Sequence[Tensor], Sequence[int]], Tensor]) -> None:
    """Say how numbers are computed: `run(position, text, a block of the shape and dtype, blocks of parameters, sizes)`."""
    _numbers.append(
        define_op(
            "numbers(Tensor position, str text, Tensor like, Tensor[] read, SymInt[] sizes) -> Tensor",
            run,
            lambda position, text, like, *rest: torch.empty_like(like, memory_format=torch.contiguous_format),
        )
    )


def traced_numbers(
    mesh: DeviceMesh | None, text: str, block: Tensor, read: Sequence[Tensor], sizes: Sequence[int] = ()
) -> Tensor:
    """The numbers of one draw for a block, as ops of the graph that is being traced.

    Args:
        mesh: the mesh whose stream is advanced.
        text: what is drawn.
        block: a block of the shape and dtype.
        read: blocks of parameters.
        sizes: those of the tensor, where the text does not say them.
    """
    position = _next_position("" if mesh is None else name_mesh(mesh), block.device)
    return _numbers[0](position, text, block, list(read), list(sizes))  # type: ignore[no-any-return]
