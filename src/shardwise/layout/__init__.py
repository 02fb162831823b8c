"""Layouts: placements, factored dims, their geometry and their text form. This package does not import torch."""

from shardwise.layout.axes import Axes
from shardwise.layout.errors import LayoutError
from shardwise.layout.factor import Dim, Factor, cut, first_block
from shardwise.layout.geometry import (
    block_offset,
    block_shape,
    contiguous_stride,
    factor_ranges,
    global_shape,
    global_stride,
    has_empty_blocks,
    is_dense,
    largest_block,
    owned,
)
from shardwise.layout.layout import Layout
from shardwise.layout.parse import parse_layout
from shardwise.layout.placement import (
    REDUCE_OPS,
    MaskPartial,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from shardwise.layout.refine import Piece, Pieces, refine
from shardwise.layout.spec import ShardOrderEntry, Spec, TensorMeta, dtype_text
from shardwise.layout.spec_draft import SpecDraft
from shardwise.layout.spec_pattern import SpecPattern, pattern_of
from shardwise.layout.unit_axes import UnitPlacements, spelled, unit_placements, without_pending
from shardwise.layout.view import view

__all__ = [
    "REDUCE_OPS",
    "Axes",
    "Dim",
    "Factor",
    "Layout",
    "LayoutError",
    "MaskPartial",
    "Partial",
    "Piece",
    "Pieces",
    "Placement",
    "Replicate",
    "Shard",
    "ShardOrderEntry",
    "Spec",
    "SpecDraft",
    "SpecPattern",
    "StridedShard",
    "TensorMeta",
    "UnitPlacements",
    "block_offset",
    "block_shape",
    "contiguous_stride",
    "cut",
    "dtype_text",
    "factor_ranges",
    "first_block",
    "global_shape",
    "global_stride",
    "has_empty_blocks",
    "is_dense",
    "largest_block",
    "owned",
    "parse_layout",
    "pattern_of",
    "refine",
    "spelled",
    "unit_placements",
    "view",
    "without_pending",
]
