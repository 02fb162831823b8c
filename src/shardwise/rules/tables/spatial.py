"""Pooling, padding, resampling and shuffles of images: batch and channels may be split, positions may not.

For split positions see the halo exchange in `alternatives/pooling` and `alternatives/resample`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.rules.call import Call, Local
from shardwise.rules.notation import op_names, row
from shardwise.rules.rule import Place, Row, Rule
from shardwise.rules.tables.whole_dims import along, last_dims

__all__ = ["ROWS"]


def _with_block_size(inner: Row, name: str, batch_only: bool = False) -> Row:
    """A row for an op whose argument `name` is the size of the result: it runs with the size of the block."""

    def local(call: Call, place: Place) -> Local:
        size = list(place.outputs[0])
        return Local((call.step(**{name: [size[0], *call.args[name][1:]] if batch_only else size}),))

    def build(call: Call) -> Rule | None:
        rule = inner.build(call)
        return None if rule is None else replace(rule, local=local)

    return Row(inner.text, build)


def _except_integers(inner: Row) -> Row:
    """A row for a weighted sum: results for integers are rounded, so a pending sum of integers does not pass."""

    def build(call: Call) -> Rule | None:
        rule = inner.build(call)
        rounds = any(d.startswith(("int", "uint", "bool")) for d in call.output_dtypes)
        return replace(rule, linear=()) if rule is not None and rounds else rule

    return Row(f"{inner.text} except for integers", build)


def _per_ndim(
    names: str, dims: Sequence[int], linear: Sequence[Sequence[int]] = (), *, rounds: bool = False
) -> dict[str, Row]:
    """Rows for ops that exist per number of spatial dims, which replaces # in their names."""
    out: dict[str, Row] = {}
    for n in dims:
        inner = along(last_dims(n), linear=linear)
        out |= dict.fromkeys(
            op_names(names.replace("#", str(n))), _except_integers(inner) if rounds else inner
        )
    return out


_RESAMPLE = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    3: "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}


def _resample() -> dict[str, Row]:
    out: dict[str, Row] = {}
    for n, names in _RESAMPLE.items():
        copying = along(last_dims(n), linear=[[0]])
        for name in names.split():
            inner = copying if "nearest" in name else _except_integers(copying)
            out[f"aten.{name}.default"] = inner
            out[f"aten.{name}_backward.default"] = _with_block_size(inner, "input_size")
    return out


def _affine_grid(call: Call) -> Rule | None:
    inner = row("n ! ! -> n " + "! " * (len(call.outputs[0]) - 1), linear=[[0]], empty=False)
    return _with_block_size(inner, "size", batch_only=True).build(call)


_AVERAGES = "avg_pool#d _adaptive_avg_pool#d avg_pool#d_backward _adaptive_avg_pool#d_backward"
_PADS = "reflection_pad#d replication_pad#d reflection_pad#d_backward replication_pad#d_backward"
_MAX_GRADS = "max_pool#d_with_indices_backward adaptive_max_pool#d_backward max_unpool#d"

ROWS: dict[str, Row] = {
    **_per_ndim("max_pool#d_with_indices adaptive_max_pool#d", (2, 3)),
    **_per_ndim(_AVERAGES, (2, 3), [[0]], rounds=True),
    **_per_ndim(_MAX_GRADS, (2, 3), [[0]]),
    **_per_ndim(_PADS, (1, 2, 3), [[0]]),
    **_resample(),
    # only with a batch, because the random samples always have one
    "aten.fractional_max_pool2d.default": row("n c !h !w, n c !t -> n c !a !b, n c !a !b", empty=False),
    "aten.fractional_max_pool3d.default": row(
        "n c !d !h !w, n c !t -> n c !a !b !e, n c !a !b !e", empty=False
    ),
    "aten.fractional_max_pool2d_backward.default": row(
        "n c !a !b, n c !h !w, n c !a !b -> n c !h !w", linear=[[0]], empty=False
    ),
    **dict.fromkeys(op_names("pixel_shuffle pixel_unshuffle"), along(last_dims(3), linear=[[0]])),
    **dict.fromkeys(
        op_names("channel_shuffle native_channel_shuffle"), along(lambda call: [1], linear=[[0]])
    ),
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
    "aten.affine_grid_generator.default": Row("n ! ! -> n ! ! … !; linear in (0)", _affine_grid),
}
