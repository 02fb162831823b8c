"""Linear algebra: batches and columns stay split, and each block of a triangle is computed locally."""

import pytest
import torch
from tests.rules.against_dense import check, numbers

import shardwise as sw

A = numbers(5, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)
SPD = A @ A.mT
B = numbers(5, 3, 6, seed=1)
HALF = torch.linalg.cholesky(SPD)
SPLIT = "[5:tp, 3, 3]"
L = torch.linalg
BATCHED = {
    "cholesky_ex": lambda a: L.cholesky_ex(a @ a.mT)[0],
    "inv_ex": lambda a: L.inv_ex(a)[0],
    "det": L.det,
    "slogdet": lambda a: L.slogdet(a)[1],
    "svdvals": L.svdvals,
    "svd": lambda a: L.svd(a)[1],
    "eigvalsh": L.eigvalsh,
    "eigh": lambda a: L.eigh(a)[0],
    "qr": lambda a: L.qr(a),
    "lu": lambda a: L.lu(a)[1:],
    "lu_factor_ex": lambda a: L.lu_factor_ex(a)[0],
    "lu_unpack": lambda a: torch.lu_unpack(*L.lu_factor_ex(a)[:2])[1:],
    "matrix_exp": torch.matrix_exp,
    "cholesky_inverse": torch.cholesky_inverse,
    "householder": lambda a: L.householder_product(a, a[..., 0] * 0.1),
}
WITHOUT_GRADIENT = {
    "qr with mode r": lambda a: L.qr(a, mode="r")[1],
    "ldl": lambda a: L.ldl_factor_ex(a)[0],
    "pinv": L.pinv,
}


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_stays_split(name):
    check(BATCHED[name], [A], [SPLIT], free=name != "householder")


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_a_batch_stays_split_forward(name):
    check(WITHOUT_GRADIENT[name], [A], [SPLIT], grad=False)


def test_eigenvalues_stay_split():
    check(lambda a: torch.ops.aten.linalg_eig(a)[0], [A], [SPLIT], expect="[5:tp, 3]", grad=False)


SOLVED = {
    "solve": (lambda a, b: L.solve_ex(a, b)[0], [A, B], [SPLIT, "[5:tp, 3, 6]"], "[5:tp, 3, 6]"),
    "solve vectors": (lambda a, b: L.solve_ex(a, b)[0], [A, B[..., 0]], [SPLIT, "[5:tp, 3]"], "[5:tp, 3]"),
    "triangular columns": (
        lambda a, b: L.solve_triangular(a, b, upper=False), [HALF, B], ["[5, 3, 3]", "[5, 3, 6:tp]"], "[5, 3, 6:tp]"
    ),
    "triangular rows": (
        lambda a, b: L.solve_triangular(a, b, upper=False, left=False), [HALF, B.mT.contiguous()],
        ["[5, 3, 3]", "[5, 6:tp, 3]"], "[5, 6:tp, 3]",
    ),
    "cholesky columns": (
        lambda b, a: torch.cholesky_solve(b, a), [B, HALF], ["[5, 3, 6:tp]", "[5, 3, 3]"], "[5, 3, 6:tp]"
    ),
    "lu columns": (
        lambda a, b: L.lu_solve(*L.lu_factor_ex(a)[:2], b), [A, B], ["[5, 3, 3]", "[5, 3, 6:tp]"], "[5, 3, 6:tp]"
    ),
    "a pending right-hand side": (
        lambda b, a: torch.cholesky_solve(b, a), [B, HALF], ["[5, 3, 6] P(tp,sum)", "[5, 3, 3]"],
        "[5, 3, 6] P(tp,sum)",
    ),
    "cross": (
        lambda a, b: L.cross(a, b, dim=1), [B, numbers(1, 3, 6)], ["[5:tp, 3, 6]", "[1, 3, 6]"], "[5:tp, 3, 6]"
    ),
    "cdist": (torch.cdist, [numbers(6, 3), numbers(9, 3, seed=1)], ["[6:tp, 3]", "[9, 3]"], "[6:tp, 9]"),
    "cdist of the other": (torch.cdist, [numbers(6, 3), numbers(9, 3, seed=1)], ["[6, 3]", "[9:tp, 3]"], "[6, 9:tp]"),
    "bilinear": (
        torch.bilinear, [numbers(7, 3), numbers(7, 4), numbers(2, 3, 4)], ["[7:tp, 3]", "[7, 4]", "[2, 3, 4]"],
        "[7:tp, 2]",
    ),
    "addmv": (
        lambda x, a, b: torch.addmv(x, a, b, beta=2, alpha=3), [numbers(6), numbers(6, 5), numbers(5)],
        ["[6]", "[6, 5:tp]", "[5]"], "[6] P(tp,sum)",
    ),
    "addr": (torch.addr, [numbers(7), numbers(6), numbers(7)], ["[7]", "[6:tp]", "[7]"], "[6:tp, 7]"),
    "addbmm": (
        torch.addbmm, [numbers(3, 6), A, B], ["[3, 6]", SPLIT, "[5:tp, 3, 6]"], "[3, 6] P(tp,sum)"
    ),
    "renorm": (lambda x: torch.renorm(x, 2, 1, 1.5), [B], ["[5, 3, 6]"], "[5, 3, 6]"),
    "renorm of slices": (lambda x: torch.renorm(x, 2, -1, 1.5), [B], ["[5, 3, 6:tp]"], "[5, 3, 6:tp]"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOLVED)
def test_products_and_solutions(name):
    fn, values, layouts, expect = SOLVED[name]
    check(fn, values, layouts, expect=expect, grad=False)
    check(fn, values, layouts, free=False)


@pytest.mark.parametrize(
    "layout", ["[5:tp, 7]", "[5, 7:tp]", "[5:tp, 7:dp]", "[5:dp,tp, 7]", "[5, 7] P(tp,sum)"]
)
@pytest.mark.parametrize("diagonal", [-2, 0, 1])
def test_triangles(layout, diagonal):
    x = numbers(5, 7)
    for op in (torch.tril, torch.triu):
        check(lambda t, op=op: op(t, diagonal), [x], [layout], mesh=(2, 2), expect=layout)
    check(lambda t: t.clone().tril_(diagonal), [x], [layout], mesh=(2, 2), expect=layout)


@pytest.mark.parametrize("layout", ["[7:tp, 5]", "[7, 5:tp]", "[7:tp, 5:dp]", "[7, 5] P(tp,sum)"])
def test_trace(layout):
    check(torch.trace, [numbers(7, 5)], [layout], mesh=(2, 2), grad=False)
    check(torch.trace, [numbers(7, 5)], [layout], mesh=(2, 2), free=False)


def test_a_triangle_of_a_dim_split_within_factors():
    check(lambda t: t.tril(), [numbers(8, 5)], ["[2 4:tp, 5]"], free=False)


@pytest.mark.parametrize("layout", ["[5:tp, 3, 3]", "[5, 3:tp, 3]", "[5, 3, 3]"])
def test_lazy_conjugation(layout):
    a = torch.complex(A, numbers(5, 3, 3, seed=9))
    check(L.pinv, [a], [layout], free=False, grad=False)
    check(lambda a: torch.nn.functional.pad(a.mH, (1, 1)), [a], [layout], free=False, grad=False)


@pytest.mark.parametrize("b", ["[5:tp, 3, 6]", "[5, 3, 6:tp]"])
def test_one_matrix_for_many_right_hand_sides(b):
    check(lambda a, b: L.solve_ex(a, b)[0], [A[0], B], ["[3, 3]", b], free=False)
    check(
        lambda a, b: torch.ops.aten._linalg_solve_ex(a, b)[1],
        [A[0], B],
        ["[3, 3]", b],
        free=False,
        grad=False,
    )


def test_right_hand_sides_without_columns():
    check(
        lambda a, b: L.lu_solve(*L.lu_factor_ex(a)[:2], b),
        [A, B[..., :0]],
        [SPLIT, "[5:tp, 3, 0]"],
        grad=False,
    )


def test_all_ranks_raise_if_one_matrix_is_singular():
    singular = A.clone()
    singular[4] = 0
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(singular, mesh, [sw.Shard(0)])
        for fn in (L.inv, lambda a: L.inv_ex(a, check_errors=True)):
            with pytest.raises(torch.linalg.LinAlgError, match="Batch element 4"):
                fn(x)
