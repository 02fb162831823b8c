"""Matrices: their batch dims pass through, and so do columns that are solved for one by one."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.rules.call import Call, Local, Out, Slot
from shardwise.rules.notation import groups_of, linear_text, row, sizes_of, without_broadcast
from shardwise.rules.rule import Letters, Place, Row, Rule

__all__ = ["ROWS"]


def _batched(
    text: str,
    *,
    linear: Sequence[Sequence[int]] = (),
    sums: Sequence[str] = (),
    empty: bool = True,
) -> Row:
    """A row whose outputs a call may leave empty, as where it asks for no vectors; only `sums` are summed.

    A call that asks to raise where a matrix has no answer runs on the whole: all ranks must raise.
    """

    def build(call: Call) -> Rule | None:
        if call.args.get("check_errors"):
            return None
        before, _, after = text.partition("->")
        outputs = [
            "*" if made == (0,) and 0 not in call.shapes[0] else said
            for said, made in zip(after.split(","), call.outputs, strict=True)
        ]
        rule = row(f"{before}->{','.join(outputs)}", linear=linear, empty=empty).build(call)
        if rule is None or not _fits(rule, call):
            return None
        # the factors of one matrix for many right-hand sides are the same for all, and no sum
        return Rule(
            rule.inputs,
            rule.outputs,
            {x: op for x, op in rule.reduced.items() if x in sums},
            rule.linear,
            empty=empty,
        )

    return Row(text + linear_text(linear), build)


def _fits(rule: Rule, call: Call) -> bool:
    """Whether a letter is the same size wherever it stands, outputs included."""
    sizes = sizes_of([*rule.inputs, *rule.outputs], [*call.shapes, *call.outputs])
    return all(
        without_broadcast(said, made, sizes) == said
        for said, made in zip(rule.outputs, call.outputs, strict=True)
    )


def _solve() -> Row:
    """A right-hand side is a vector where it has a dim less, as torch decides it."""
    matrix = _batched("… !m !n, … !m !r -> … !m !r, … !m !n, … !k, …", linear=[])
    vector = _batched("… !m !n, … !m -> … !m, … !m !n, … !k, …", linear=[])

    def build(call: Call) -> Rule | None:
        a, b = call.shapes
        return (vector if len(b) == 1 or b == a[:-1] else matrix).build(call)

    return Row(f"{matrix.text}, or vectors", build)


def _triangular() -> Row:
    left = _batched("… !m !n, … !m r -> … !m r", linear=[[1]])
    right = _batched("… !m !n, … r !m -> … r !m", linear=[[1]])
    text = f"{left.text}, or r !m on the right"
    return Row(text, lambda call: (left if call.args["left"] else right).build(call))


def _added(text: str, linear: Sequence[Sequence[int]]) -> Row:
    """A row for something added to a product: it is broadcast, and is a part where the product is."""
    product = row(f"*, {text}", linear=linear)
    words = text.partition("->")[2].split()

    def local(call: Call, place: Place) -> Local | None:
        # of a product over nothing torch's kernels return what is added, and forget to broadcast it
        if 0 not in place.inputs[1] or place.inputs[0] == place.outputs[0]:
            return None
        first = next(k for k, v in call.args.items() if v == Slot(0))
        return Local((
            ("aten.expand.default", (Slot(0), list(place.outputs[0])), {}),
            (call.op, (), {**call.args, first: Out(0)}),
        ))  # fmt: skip

    def build(call: Call) -> Rule | None:
        rule = product.build(call)
        if rule is None or call.dtypes[0] == "bool":
            return None
        shape, sizes = call.shapes[0], dict(zip(words, call.outputs[0], strict=True))
        said = words[len(words) - len(shape) :]
        added: Letters = tuple(x if sizes[x] == n else None for x, n in zip(said, shape, strict=True))
        return Rule(
            (added, *rule.inputs[1:]),
            rule.outputs,
            rule.reduced,
            rule.linear,
            addends=frozenset({0}),
            local=local,
        )

    return Row(f"… added, {text}{linear_text(linear)}", build)


def _triangle(name: str) -> Row:
    """The triangle of a block is that of the whole, counted from where the block begins."""

    def local(call: Call, place: Place) -> Local | None:
        if not place.sharded & {"m", "n"}:
            return None
        rows, columns = place.starts[0][-2:]
        return Local(((name, (Slot(0), call.args["diagonal"] + rows - columns), {}),))

    return row("… m n -> … m n", linear=[[0]], local=local, ranges=("m", "n"))


def _trace(call: Call, place: Place) -> Local | None:
    if not place.sharded:
        return None
    rows, columns = place.starts[0]
    return Local((
        ("aten.diagonal.default", (Slot(0), rows - columns), {}),
        ("aten.sum.default", (Out(0),), {}),
    ))  # fmt: skip


def _cross(call: Call) -> Rule | None:
    ndim = len(call.outputs[0])
    d = int(call.args["dim"]) % ndim
    each: Letters = tuple(None if i == d else f"d{i}" for i in range(ndim))
    said: list[Letters] = [each[ndim - len(s) :] for s in call.shapes]
    sizes = sizes_of([*said, each], [*call.shapes, call.outputs[0]])
    ins = tuple(without_broadcast(x, s, sizes) for x, s in zip(said, call.shapes, strict=True))
    return Rule(ins, (each,), linear=groups_of(call, [[0], [1]]))


def _trilinear(call: Call) -> Rule | None:
    """Three tensors with dims put in, multiplied and summed over some."""
    ndim = len(call.shapes[0]) + len(call.args["expand1"])
    each: Letters = tuple(f"d{i}" for i in range(ndim))
    said: list[Letters] = []
    for name, shape in zip(("expand1", "expand2", "expand3"), call.shapes, strict=True):
        there = tuple(x for i, x in enumerate(each) if i not in call.args[name])
        if len(there) != len(shape):
            return None
        said.append(there)
    gone = {f"d{i}" for i in call.args["sumdim"]}
    after: Letters = tuple(x for x in each if x not in gone)
    if len(after) != len(call.outputs[0]):
        return None
    sizes = sizes_of([*said, after], [*call.shapes, call.outputs[0]])
    ins = tuple(without_broadcast(x, s, sizes) for x, s in zip(said, call.shapes, strict=True))
    used = {x for one in ins for x in one if x is not None}
    return Rule(ins, (after,), dict.fromkeys(used & gone, "sum"), groups_of(call, [[0], [1], [2]]))


def _renorm(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    d = int(call.args["dim"]) % ndim
    each: Letters = tuple("d" if i == d else None for i in range(ndim))
    return Rule((each,), (each,))


_LU_LEFT = _batched("… !m !n, … !k, … !m r -> … !m r", linear=[[2]])
_LU_RIGHT = _batched("… !m !n, … !k, … r !m -> … r !m", linear=[[2]])
_SQUARE = "… !m !n -> … !m !n"

ROWS: dict[str, Row] = {
    **{f"aten.{name}.default": _triangle(f"aten.{name}.default") for name in ("tril", "triu")},
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
    "aten.linalg_lu_solve.default": Row(
        "… !m !n, … !k, … !m r -> … !m r, or r !m on the right; linear in (2)",
        lambda call: (_LU_LEFT if call.args["left"] else _LU_RIGHT).build(call),
    ),
    "aten._linalg_solve_ex.default": _solve(),
    "aten.linalg_solve_triangular.default": _triangular(),
    "aten.triangular_solve.default": _batched("… !m !r, … !m !n -> … !m !r, … !m !n"),
    "aten.cholesky_solve.default": _batched("… !m r, … !m !n -> … !m r", linear=[[0]]),
    "aten.linalg_ldl_factor_ex.default": _batched("… !m !n -> … !m !n, … !k, …"),
    "aten.linalg_ldl_solve.default": _batched("… !m !n, … !k, … !m r -> … !m r", linear=[[2]]),
    "aten.geqrf.default": _batched("… !m !n -> … !m !n, … !k"),
    "aten.linalg_householder_product.default": _batched("… !m !n, … !k -> … !m !n"),
    "aten.ormqr.default": _batched("… !m !n, … !k, … !p !q -> … !p !q", linear=[[2]]),
    "aten.linalg_pinv.atol_rtol_tensor": _batched("… !m !n, …, … -> … !n !m"),
    "aten.linalg_cross.default": Row("… !d …, … !d … -> … !d …; linear in (0) and in (1)", _cross),
    "aten.addmv.default": _added("m k, k -> m", [[0, 1], [0, 2]]),
    "aten.addr.default": _added("m, n -> m n", [[0, 1], [0, 2]]),
    "aten.addbmm.default": _added("b m k, b k n -> m n", [[0, 1], [0, 2]]),
    "aten._trilinear.default": Row("a product of three, summed; linear in (0) and in (1) and in (2)", _trilinear),
    "aten._cdist_forward.default": _batched("… m !d, … n !d -> … m n"),
    "aten._euclidean_dist.default": _batched("… m !d, … n !d -> … m n"),
    "aten._cdist_backward.default": _batched(
        "… m n, … m !d, … n !d, … m n -> … m !d", linear=[[0]], sums="n", empty=False
    ),
    "aten.renorm.default": Row("… d … whole but for d", _renorm),
}  # fmt: skip
