"""Linear algebra: batch dims may be split, and so may columns that are solved for independently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.rules.call import Call, Local, Out, Slot
from shardwise.rules.letters import (
    Letters,
    broadcast_letters,
    dim_letters,
    letter_sizes,
    without_broadcast,
)
from shardwise.rules.notation import groups_of, linear_text, row
from shardwise.rules.rule import Place, Row, Rule
from shardwise.rules.tables.contraction import plus_product

__all__ = ["ROWS"]


def _batched(
    text: str, *, linear: Sequence[Sequence[int]] = (), sums: Sequence[str] = (), empty: bool = True
) -> Row:
    """A row whose outputs may be empty, as singular vectors that are not requested; only the letters `sums` are summed.

    A call with `check_errors` has no rule and runs on full tensors, because all ranks must raise.
    """

    def build(call: Call) -> Rule | None:
        if call.args.get("check_errors"):
            return None
        before, _, after = text.partition("->")
        outputs = [
            "*" if shape == (0,) and 0 not in call.shapes[0] else words
            for words, shape in zip(after.split(","), call.outputs, strict=True)
        ]
        rule = row(f"{before}->{','.join(outputs)}", linear=linear, empty=empty).build(call)
        if rule is None or not _fits(rule, call):
            return None
        # the factors of one matrix are the same for many right-hand sides: they are not summed
        return replace(rule, reduced={x: op for x, op in rule.reduced.items() if x in sums})

    return Row(text + linear_text(linear), build)


def _fits(rule: Rule, call: Call) -> bool:
    """Whether no output is broadcast against a letter of the inputs."""
    sizes = letter_sizes([*rule.inputs, *rule.outputs], [*call.shapes, *call.outputs])
    return all(
        without_broadcast(letters, shape, sizes) == letters
        for letters, shape in zip(rule.outputs, call.outputs, strict=True)
    )


def _solve() -> Row:
    matrix = _batched("… !m !n, … !m !r -> … !m !r, … !m !n, … !k, …")
    vector = _batched("… !m !n, … !m -> … !m, … !m !n, … !k, …")

    def build(call: Call) -> Rule | None:
        # as torch decides whether a right-hand side is a vector
        a, b = call.shapes
        return (vector if len(b) == 1 or b == a[:-1] else matrix).build(call)

    return Row(f"{matrix.text}; without !r for vectors", build)


def _left_or_right(left: str, right: str, linear: Sequence[Sequence[int]]) -> Row:
    """A row for `A X = B`, or with `left=False` for `X A = B`."""
    rows = {True: _batched(left, linear=linear), False: _batched(right, linear=linear)}
    text = f"{left}; r !m instead of !m r unless left{linear_text(linear)}"
    return Row(text, lambda call: rows[bool(call.args["left"])].build(call))


def _expand_added(call: Call, place: Place) -> Local | None:
    # for an empty product torch's kernels return the added tensor without broadcasting it
    if 0 not in place.inputs[1] or place.inputs[0] == place.outputs[0]:
        return None
    first = next(k for k, v in call.args.items() if v == Slot(0))
    return Local((
        ("aten.expand.default", (Slot(0), list(place.outputs[0])), {}),
        (call.op, (), {**call.args, first: Out(0)}),
    ))  # fmt: skip


def _triangle(call: Call, place: Place) -> Local | None:
    """The triangle of a block, whose diagonal is shifted by the block's offset."""
    if not place.sharded & {"m", "n"}:
        return None
    rows, columns = place.starts[0][-2:]
    return Local((call.step(diagonal=call.args["diagonal"] + rows - columns),))


def _trace(call: Call, place: Place) -> Local | None:
    if not place.sharded:
        return None
    rows, columns = place.starts[0]
    return Local((
        ("aten.diagonal.default", (Slot(0), rows - columns), {}),
        ("aten.sum.default", (Out(0),), {}),
    ))  # fmt: skip


def _cross(call: Call) -> Rule | None:
    fixed = f"d{call.dim(ndim=len(call.outputs[0]))}"
    letters = [
        tuple(None if x == fixed else x for x in one)
        for one in broadcast_letters([*call.shapes, *call.outputs])
    ]
    return Rule(tuple(letters[:-1]), (letters[-1],), linear=groups_of(call, [[0], [1]]))


def _trilinear(call: Call) -> Rule | None:
    """Three tensors, each with dims of size 1 inserted, multiplied and summed over some dims."""
    every = dim_letters(len(call.shapes[0]) + len(call.args["expand1"]))
    letters: list[Letters] = [
        tuple(x for i, x in enumerate(every) if i not in call.args[name])
        for name in ("expand1", "expand2", "expand3", "sumdim")
    ]
    shapes = [*call.shapes, call.outputs[0]]
    if any(len(one) != len(shape) for one, shape in zip(letters, shapes, strict=True)):
        return None
    sizes = letter_sizes(letters, shapes)
    inputs = tuple(without_broadcast(x, s, sizes) for x, s in zip(letters, call.shapes, strict=False))
    summed = {x for one in inputs for x in one if x is not None and x not in letters[-1]}
    return Rule(inputs, (letters[-1],), dict.fromkeys(summed, "sum"), groups_of(call, [[0], [1], [2]]))


def _renorm(call: Call) -> Rule | None:
    d = call.dim()
    letters: Letters = tuple("d" if i == d else None for i in range(len(call.shapes[0])))
    return Rule((letters,), (letters,))


_SQUARE = "… !m !n -> … !m !n"

ROWS: dict[str, Row] = {
    **{
        f"aten.{name}.default": row("… m n -> … m n", linear=[[0]], local=_triangle, ranges=("m", "n"))
        for name in ("tril", "triu")
    },
    "aten.trace.default": row("m n -> ", linear=[[0]], local=_trace, ranges=("m", "n")),
    **{
        f"aten.{name}.default": _batched(_SQUARE)
        for name in ("linalg_matrix_exp", "cholesky", "cholesky_inverse")
    },
    "aten.linalg_inv_ex.default": _batched(f"{_SQUARE}, …"),
    "aten.linalg_cholesky_ex.default": _batched(f"{_SQUARE}, …"),
    "aten.linalg_qr.default": _batched("… !m !n -> … !m !k, … !k !n"),
    "aten._linalg_det.default": _batched("… !m !n -> …, … !m !n, … !k"),
    "aten._linalg_slogdet.default": _batched("… !m !n -> …, …, … !m !n, … !k"),
    "aten._linalg_svd.default": _batched("… !m !n -> … !m !k, … !k, … !k !n"),
    "aten._linalg_eigh.default": _batched("… !m !n -> … !n, … !m !n"),
    "aten.linalg_eig.default": _batched("… !m !n -> … !n, … !m !n"),
    "aten._linalg_eigvals.default": _batched("… !m !n -> … !n"),
    "aten.linalg_lu.default": _batched("… !m !n -> … !m !p, … !m !k, … !k !n"),
    "aten.linalg_lu_factor_ex.default": _batched("… !m !n -> … !m !n, … !k, …"),
    "aten.lu_unpack.default": _batched("… !m !n, … !k -> … !m !p, … !m !k, … !k !n"),
    "aten.linalg_lu_solve.default": _left_or_right(
        "… !m !n, … !k, … !m r -> … !m r", "… !m !n, … !k, … r !m -> … r !m", [[2]]
    ),
    "aten._linalg_solve_ex.default": _solve(),
    "aten.linalg_solve_triangular.default": _left_or_right(
        "… !m !n, … !m r -> … !m r", "… !m !n, … r !m -> … r !m", [[1]]
    ),
    "aten.triangular_solve.default": _batched("… !m !r, … !m !n -> … !m !r, … !m !n"),
    "aten.cholesky_solve.default": _batched("… !m r, … !m !n -> … !m r", linear=[[0]]),
    "aten.linalg_ldl_factor_ex.default": _batched("… !m !n -> … !m !n, … !k, …"),
    "aten.linalg_ldl_solve.default": _batched("… !m !n, … !k, … !m r -> … !m r", linear=[[2]]),
    "aten.geqrf.default": _batched("… !m !n -> … !m !n, … !k"),
    "aten.linalg_householder_product.default": _batched("… !m !n, … !k -> … !m !n"),
    "aten.ormqr.default": _batched("… !m !n, … !k, … !p !q -> … !p !q", linear=[[2]]),
    "aten.linalg_pinv.atol_rtol_tensor": _batched("… !m !n, …, … -> … !n !m"),
    "aten.linalg_cross.default": Row("… !d …, … !d … -> … !d …; linear in (0) and in (1)", _cross),
    "aten.addmv.default": plus_product("m k, k -> m", _expand_added),
    "aten.addr.default": plus_product("m, n -> m n", _expand_added),
    "aten.addbmm.default": plus_product("b m k, b k n -> m n", _expand_added),
    "aten._trilinear.default": Row(
        "a product of three tensors that broadcast, summed over sumdim; linear in (0) and in (1) and in (2)", _trilinear
    ),
    "aten._cdist_forward.default": _batched("… m !d, … n !d -> … m n"),
    "aten._euclidean_dist.default": _batched("… m !d, … n !d -> … m n"),
    "aten._cdist_backward.default": _batched(
        "… m n, … m !d, … n !d, … m n -> … m !d", linear=[[0]], sums="n", empty=False
    ),
    "aten.renorm.default": Row("!… d !… -> !… d !…", _renorm),
}  # fmt: skip
