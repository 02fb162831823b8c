"""Where torch keeps the geometry of blocks, and the context that refuses implicit communication."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from shardwise.api.geometry import compute_local_shape_and_global_offset
from shardwise.layout import Axes, Layout, LayoutError, Placement, block_offset, block_shape
from shardwise.tensor.policy import policy

__all__ = ["ExplicitRedistributionContext", "compute_local_shape_and_global_offset"]


def ExplicitRedistributionContext(  # noqa: N802
    enable: bool = True, strict: bool = False, mode: str = "raise"
) -> AbstractContextManager[None]:
    """Refuse communication that the program did not ask for: `policy(implicit="error")`, under torch's name.

    Args:
        enable: False allows it, for a block inside another one.
        strict: accepted; moves without communication, such as taking a slice, are never refused.
        mode: "raise", or "warn" for a warning.
    """
    if mode not in ("raise", "warn"):
        raise LayoutError(
            f"ExplicitRedistributionContext: Invalid mode {mode}.",
            why="It raises an error or warns.",
            fix='mode="raise" or mode="warn"',
        )
    if not enable:
        return policy(implicit="allow")
    return policy(implicit="error" if mode == "raise" else "warn")


def _compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    my_coordinate: Sequence[int] | None,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`compute_local_shape_and_global_offset` of any coord of a mesh of any shape."""
    if my_coordinate is None:
        return (0,), ()
    layout = Layout.of(tuple(global_shape), Axes(tuple(mesh_shape)), placements)
    return block_shape(layout, my_coordinate), () if skip_offset else block_offset(layout, my_coordinate)
