"""Geometry: which part of a tensor a coord owns, at a cost independent of the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.layout.errors import LayoutError
from shardwise.layout.factor import Dim, cut, first_block, leaves_some_empty
from shardwise.layout.layout import Layout
from shardwise.layout.sizes import as_sizes

__all__ = [
    "block_offset",
    "block_shape",
    "contiguous_stride",
    "factor_ranges",
    "global_shape",
    "global_stride",
    "has_empty_blocks",
    "is_dense",
    "largest_block",
    "owned",
]


def _ranges(dim: Dim, sizes: Sequence[int], coord: Sequence[int]) -> list[tuple[int, int]]:
    return [cut(f.size, [sizes[a] for a in f.axes], [coord[a] for a in f.axes]) for f in dim]


def factor_ranges(layout: Layout, d: int, coord: Sequence[int]) -> list[tuple[int, int, int]]:
    """For each factor of a dim its size, and the range that a coord owns of it.

    >>> from shardwise.layout import Axes, parse_layout
    >>> factor_ranges(parse_layout("[2 5:tp]", Axes((2,), ("tp",)))[0], 0, (1,))
    [(2, 0, 2), (5, 3, 5)]
    """
    dim = layout.dims[d]
    ranges = _ranges(dim, layout.axes.sizes, coord)
    return [(f.size, low, high) for f, (low, high) in zip(dim, ranges, strict=True)]


def block_shape(layout: Layout, coord: Sequence[int]) -> tuple[int, ...]:
    """The shape of the block at a coord.

    >>> from shardwise.layout import Axes, Layout, Shard
    >>> layout = Layout.of((5, 4), Axes((4,), ("tp",)), [Shard(0)])
    >>> [block_shape(layout, (i,)) for i in range(4)]
    [(2, 4), (2, 4), (1, 4), (0, 4)]
    """
    sizes = layout.axes.sizes
    shape = tuple(math.prod(hi - lo for lo, hi in _ranges(dim, sizes, coord)) for dim in layout.dims)
    return as_sizes(shape) if layout.is_symbolic else shape


def largest_block(layout: Layout) -> int:
    """The number of elements of the largest block, which is the one at coord 0."""
    sizes = layout.axes.sizes
    return math.prod(first_block(f.size, [sizes[a] for a in f.axes]) for dim in layout.dims for f in dim)


def has_empty_blocks(layout: Layout) -> bool:
    """Whether some rank has none of a factor that is not empty.

    It need not be the last one: 7 elements are 4 and 3, and 4 on three ranks are 2, 2 and 0, but 3 are 1, 1 and 1.

    >>> from shardwise.layout import Axes, parse_layout
    >>> axes = Axes((3, 2), ("dp", "tp"))
    >>> [has_empty_blocks(parse_layout(text, axes)[0]) for text in ("[7:tp,dp]", "[7:dp,tp]", "[6:tp,dp]", "[0:dp]")]
    [True, True, False, False]
    """
    sizes = layout.axes.sizes
    return any(
        f.axes and f.size and leaves_some_empty(f.size, [sizes[a] for a in f.axes])
        for dim in layout.dims
        for f in dim
    )


def block_offset(layout: Layout, coord: Sequence[int]) -> tuple[int, ...]:
    """The global index of a block's first element, per dim; for an empty block, the end of the dim.

    No other block begins at the end, so a lookup by offset, as in checkpoints, never confuses it with another block.

    >>> from shardwise.layout import Axes, Layout, Shard
    >>> layout = Layout.of((2,), Axes((2, 2)), [Shard(0), Shard(0)])
    >>> [block_offset(layout, (i, j)) for i in (0, 1) for j in (0, 1)]
    [(0,), (2,), (1,), (2,)]
    """
    sizes = layout.axes.sizes
    out = []
    for dim, size in zip(layout.dims, layout.shape, strict=True):
        ranges = _ranges(dim, sizes, coord)
        if len(dim) == 1 and len(dim[0].axes) == 1:  # an empty block begins at the end
            out.append(ranges[0][0])
            continue
        offset, empty = 0, False
        for f, (lo, hi) in zip(dim, ranges, strict=True):
            offset, empty = offset * f.size + lo, empty or lo == hi
        out.append(size if empty else offset)
    return as_sizes(out) if layout.is_symbolic else tuple(out)


def owned(layout: Layout, coord: Sequence[int]) -> tuple[Sequence[int], ...]:
    """The global indices that a coord owns, per dim: a range where they are contiguous.

    >>> from shardwise.layout import Axes, parse_layout
    >>> owned(parse_layout("[4:dp, 2 4:tp]", Axes((2, 2), ("dp", "tp")))[0], (1, 0))
    (range(2, 4), [0, 1, 4, 5])
    """
    sizes = layout.axes.sizes
    out: list[Sequence[int]] = []
    for dim in layout.dims:
        indices: Sequence[int] = range(1)
        for f, (lo, hi) in zip(dim, _ranges(dim, sizes, coord), strict=True):
            if isinstance(indices, range) and hi - lo == f.size:
                indices = range(indices.start * f.size, indices.stop * f.size)
            elif isinstance(indices, range) and len(indices) == 1:
                indices = range(indices.start * f.size + lo, indices.start * f.size + hi)
            else:
                indices = [i * f.size + j for i in indices for j in range(lo, hi)]
        out.append(indices)
    return tuple(out)


def global_shape(layout_of_block: Layout, block: Sequence[int]) -> tuple[int, ...]:
    """The global shape of a tensor whose blocks all have the shape `block`.

    Only the axes of `layout_of_block` are used; its sizes do not matter, only its number of dims.

    >>> from shardwise.layout import Axes, Layout, Shard
    >>> global_shape(Layout.of((2, 3), Axes((2, 4)), [Shard(0), Shard(1)]), (2, 3))
    (4, 12)
    """
    sizes = layout_of_block.axes.sizes
    if len(block) != layout_of_block.ndim:
        raise LayoutError(
            f"A block of shape {tuple(block)} does not fit the layout {layout_of_block}.",
            why=f"The block has {len(block)} dims and the layout has {layout_of_block.ndim}.",
            fix="Pass a block with as many dims as the tensor.",
        )
    return tuple(
        size * math.prod(sizes[a] for f in dim for a in f.axes)
        for size, dim in zip(block, layout_of_block.dims, strict=True)
    )


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as `torch.empty(shape).stride()`.

    >>> contiguous_stride((2, 3, 4)), contiguous_stride((2, 0, 4)), contiguous_stride(())
    ((12, 4, 1), (4, 4, 1), ())
    """
    return global_stride(shape, range(len(shape), 0, -1))


def global_stride(shape: Sequence[int], local_stride: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor of `shape` whose dims have the memory order of a block with `local_stride`.

    >>> global_stride((8, 6), (1, 4)), global_stride((8, 6), (3, 1))
    ((1, 8), (6, 1))
    """
    order = sorted(range(len(shape)), key=lambda d: (-local_stride[d], d))
    out = [0] * len(shape)
    step = 1
    for d in reversed(order):
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether each element has a place of its own in memory, and there are no gaps between them.

    >>> [is_dense((2, 3), stride) for stride in ((3, 1), (1, 2), (0, 1), (6, 2))]
    [True, True, False, False]
    """
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
