"""A table of what a module holds, and of how it is distributed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor, nn

from shardwise.layout import largest_block
from shardwise.parallel.module_tensors import group_ties, slots_of
from shardwise.tensor.dtensor import DTensor

__all__ = ["describe"]

_HEADER = ("name", "dtype", "layout", "bytes per rank", "of", "")


def describe(module: nn.Module) -> None:
    """Print every parameter and buffer of a module with its layout, its bytes per rank, and what stays replicated.

    Args:
        module: the module, distributed or not.

    Nothing is communicated.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     mlp = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4, bias=False), nn.LayerNorm(4, bias=False))
    ...     describe(sw.parallel.parallelize_module(mlp, mesh, {"0": "colwise", "1": "rowwise"}))
    name      dtype  layout     bytes per rank   of
    0.weight  f32    [6:tp, 4]              48   96
    0.bias    f32    [6:tp]                 12   24
    1.weight  f32    [4, 6:tp]              48   96
    2.weight  f32    [4]                    16   16  replicated
    total                                  124  232
    1 of 4 parameters and buffers is replicated: 16 of 124 bytes per rank.
    """
    rows: list[Sequence[str]] = [_HEADER]
    here = everywhere = replicated = 0
    whole = 0
    groups = group_ties(slots_of(module))
    for group in groups:
        tensor = group[0].tensor
        mine, full = _bytes_per_rank(tensor), tensor.numel() * tensor.element_size()
        note = _note(tensor)
        if len(group) > 1:
            note = ", ".join(filter(None, [note, "tied to " + ", ".join(s.full_name for s in group[1:])]))
        rows.append((group[0].full_name, *_form(tensor), f"{mine:,}", f"{full:,}", note))
        here, everywhere = here + mine, everywhere + full
        if mine == full:
            whole, replicated = whole + 1, replicated + mine
    rows.append(("total", "", "", f"{here:,}", f"{everywhere:,}", ""))
    verb = "is" if whole == 1 else "are"
    lines = _table(rows)
    lines.append(
        f"{whole} of {len(groups)} parameters and buffers {verb} replicated: {replicated:,} of {here:,} bytes per rank."
    )
    sys.stdout.write("\n".join(lines) + "\n")


def _bytes_per_rank(tensor: Tensor) -> int:
    count = largest_block(tensor.sharding) if isinstance(tensor, DTensor) else tensor.numel()
    return count * tensor.element_size()


def _form(tensor: Tensor) -> tuple[str, str]:
    """The short dtype and the layout."""
    if isinstance(tensor, DTensor):
        dtype, _, layout = str(tensor._spec).partition("[")
        return dtype, f"[{layout}"
    return str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape))


def _note(tensor: Tensor) -> str:
    notes = []
    if not isinstance(tensor, DTensor):
        notes.append("plain")
    elif not tensor.sharding.sharded:
        notes.append("replicated")
    if tensor.is_meta:
        notes.append("meta")
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        notes.append("frozen")
    return ", ".join(notes)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    return [
        "  ".join(
            cell.rjust(width) if i in (3, 4) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
