"""Pools, paddings, resampling and shuffles of images: positions are whole, batch and channels pass through.

Where positions are split, `tensor/pooling.py` offers to exchange the halos of their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.rules.call import Call, Local
from shardwise.rules.notation import row
from shardwise.rules.rule import Place, Row, Rule
from shardwise.rules.tables.whole_dims import along, last

__all__ = ["ROWS"]

_Linear = Sequence[Sequence[int]]


def _sized(inner: Row, name: str, batch_only: bool = False) -> Row:
    """A row for an op that is told the size of its result, in full or of its batch: for a block it is the block's."""

    def local(call: Call, place: Place) -> Local:
        made, given = list(place.outputs[0]), dict(call.args)
        given[name] = [made[0], *given[name][1:]] if batch_only else made
        return Local(((call.op, tuple(given.values()), {}),))

    def build(call: Call) -> Rule | None:
        rule = inner.build(call)
        return None if rule is None else replace(rule, local=local)

    return Row(inner.text, build)


def _rounding(inner: Row) -> Row:
    """A row for an op that weighs what it adds: of whole numbers the result is rounded, and a sum of such is another."""

    def build(call: Call) -> Rule | None:
        rule = inner.build(call)
        whole = any(d.startswith(("int", "uint", "bool")) for d in call.made)
        return replace(rule, linear=()) if rule is not None and whole else rule

    return Row(f"{inner.text} but for integers", build)


def _rows(names: str, made: Row) -> dict[str, Row]:
    return {f"aten.{name}.default": made for name in names.split()}


def _each(names: str, dims: Sequence[int], linear: _Linear = (), *, rounding: bool = False) -> dict[str, Row]:
    """Ops of which there is one for each number of dims of positions."""
    out: dict[str, Row] = {}
    for n in dims:
        made = along(last(n), linear=linear)
        out |= _rows(names.replace("#", str(n)), _rounding(made) if rounding else made)
    return out


_RESAMPLED = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    3: "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}


def _resampled() -> dict[str, Row]:
    out: dict[str, Row] = {}
    for n, names in _RESAMPLED.items():
        for name in names.split():
            copies = along(last(n), linear=[[0]])
            inner = copies if "nearest" in name else _rounding(copies)
            out |= _rows(name, inner) | _rows(f"{name}_backward", _sized(inner, "input_size"))
    return out


# With a batch: without one, what was drawn has a dim that the image has not.
_FRACTIONAL = {
    "aten.fractional_max_pool2d.default": row("n c !h !w, n c !t -> n c !a !b, n c !a !b", empty=False),
    "aten.fractional_max_pool3d.default": row(
        "n c !d !h !w, n c !t -> n c !a !b !e, n c !a !b !e", empty=False
    ),
    "aten.fractional_max_pool2d_backward.default": row(
        "n c !a !b, n c !h !w, n c !a !b -> n c !h !w", linear=[[0]], empty=False
    ),
}

_AVERAGES = "avg_pool#d _adaptive_avg_pool#d avg_pool#d_backward _adaptive_avg_pool#d_backward"

ROWS: dict[str, Row] = {
    **_each("max_pool#d_with_indices adaptive_max_pool#d", (2, 3)),
    **_each(_AVERAGES, (2, 3), [[0]], rounding=True),
    **_each("max_pool#d_with_indices_backward adaptive_max_pool#d_backward", (2, 3), [[0]]),
    **_each("max_unpool#d", (2, 3), [[0]]),
    **_FRACTIONAL,
    **_each("reflection_pad#d replication_pad#d", (1, 2, 3), [[0]]),
    **_each("reflection_pad#d_backward replication_pad#d_backward", (1, 2, 3), [[0]]),
    **_resampled(),
    **_rows("pixel_shuffle pixel_unshuffle", along(last(3), linear=[[0]])),
    **_rows("channel_shuffle native_channel_shuffle", along(lambda call: [1], linear=[[0]])),
    "aten.im2col.default": row("n !c !h !w -> n !k !l", linear=[[0]], empty=False),
    "aten.col2im.default": row("n !k !l -> n !c !h !w", linear=[[0]], empty=False),
    "aten.grid_sampler_2d.default": row("n c !h !w, n a b !t -> n c a b", linear=[[0]], empty=False),
    "aten.grid_sampler_3d.default": row("n c !d !h !w, n a b e !t -> n c a b e", linear=[[0]], empty=False),
    "aten.grid_sampler_2d_backward.default": row(
        "n c a b, n c !h !w, n a b !t -> n c !h !w, n a b !t", linear=[[0]], empty=False
    ),
    "aten.grid_sampler_3d_backward.default": row(
        "n c a b e, n c !d !h !w, n a b e !t -> n c !d !h !w, n a b e !t", linear=[[0]], empty=False
    ),
    "aten.affine_grid_generator.default": Row(
        "n ! ! -> n ! ! … !",
        lambda call: _sized(
            row("n ! ! -> n " + "! " * (len(call.outputs[0]) - 1), linear=[[0]], empty=False), "size", True
        ).build(call),
    ),
}
