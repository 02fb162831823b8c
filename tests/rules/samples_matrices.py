"""Calls of linear algebra ops: batches that are uneven, of size 1 and empty, and well-conditioned matrices.

Factors of a matrix are not unique, but a kernel returns the same ones for a matrix at any position in a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.rules.calls import Call, call, x
from torch import Tensor

aten = torch.ops.aten
_C = torch.complex128
_BATCHES = ((5,), (2, 3), (1,), (0,), ())


def _square(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Matrices that are far from singular."""
    n = shape[-1]
    return x(*shape, dtype=dtype, seed=seed) + 3 * n * torch.eye(n, dtype=dtype)


def _definite(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    a = x(*shape, dtype=dtype, seed=seed)
    return a @ a.mH + shape[-1] * torch.eye(shape[-1], dtype=dtype)


def _per_batch(
    *rest: tuple[object, ...], make: Callable[..., Tensor] = _square, m: int = 3, n: int = 3, **kwargs: object
) -> list[Call]:
    """A call for each batch shape, and a complex one; the arguments after the matrix alternate."""
    matrices = [make(*b, m, n) for b in _BATCHES] + [make(4, 2, 2 if m == n else 3, dtype=_C)]
    return [call(a, *rest[i % len(rest)], **kwargs) for i, a in enumerate(matrices)]


def _factors(op: Callable[..., object], *more: object) -> list[Call]:
    """Factors of matrices, with right-hand sides."""
    out = []
    for i, batch in enumerate(_BATCHES):
        factors = op(_definite(*batch, 3, 3))[:2]  # type: ignore[index]
        out.append(call(*factors, x(*batch, 3, (4, 1, 2)[i % 3], seed=7), *more))
    return out


def _lu_solve() -> list[Call]:
    calls = _factors(aten.linalg_lu_factor_ex.default)
    calls += [((lu, p, b.mT.contiguous()), {"left": False}) for (lu, p, b), _ in calls[:3]]
    lu, p = aten.linalg_lu_factor_ex.default(_square(4, 2, 2, dtype=_C))[:2]
    one, its = aten.linalg_lu_factor_ex.default(_square(3, 3))[:2]
    return [
        *calls,
        call(lu, p, x(4, 2, 3, dtype=_C), adjoint=True),
        call(one, its, x(5, 3, 2)),  # one matrix for many right-hand sides
    ]


def _ldl_solve() -> list[Call]:
    lead, p = aten.linalg_ldl_factor_ex.default(_definite(3, 3))[:2]
    return [*_factors(aten.linalg_ldl_factor_ex.default), call(lead, p, x(5, 3, 2))]


def _grouped_mm() -> list[Call]:
    """All forms, with empty groups; the offsets end at the end of the dim, because further results are undefined."""

    def f32(*shape: int, seed: int = 0) -> Tensor:
        return x(*shape, dtype=torch.float32, seed=seed)

    def ends(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return [
        call(f32(7, 8), f32(3, 8, 4, seed=1), ends(2, 2, 7)),
        call(f32(5, 4), f32(4, 8, 4, seed=1).mT, ends(0, 3, 3, 5)),
        call(f32(3, 4, 8), f32(8, 8, seed=1), ends(5, 5, 8)),
        call(f32(9, 8).mT, f32(9, 4, seed=1), ends(4, 4, 9)),
        call(f32(3, 5, 8), f32(3, 8, 4, seed=1)),
        call(f32(4, 4).bfloat16().repeat(1, 2), f32(2, 8, 8, seed=1).bfloat16(), ends(1, 4)),
    ]


def _solve() -> list[Call]:
    calls = [call(_square(*b, 3, 3), x(*b, 3, 2, seed=1)) for b in _BATCHES]
    return [
        *calls,
        call(_square(5, 3, 3), x(5, 3, seed=1)),  # vectors
        call(_square(4, 3, 3), x(3, seed=1)),
        call(_square(3, 3), x(5, 3, 2, seed=1)),
        call(_square(5, 3, 3), x(5, 2, 3, seed=1), left=False),
        call(_square(4, 2, 2, dtype=_C), x(4, 2, 3, dtype=_C)),
    ]


def _triangular() -> list[Call]:
    calls = [call(_square(*b, 3, 3), x(*b, 3, 4, seed=1), upper=i % 2 == 0) for i, b in enumerate(_BATCHES)]
    return [
        *calls,
        call(_square(5, 3, 3), x(5, 4, 3, seed=1), upper=True, left=False),
        call(_square(5, 3, 3), x(3, 4, seed=1), upper=False, unitriangular=True),
        call(_square(3, 3), x(5, 3, 1, seed=1), upper=True),
        call(_square(4, 2, 2, dtype=_C), x(4, 2, 3, dtype=_C), upper=True),
    ]


def _triangular_first() -> list[Call]:
    """The right-hand side comes first."""
    return [
        *(
            call(x(*b, 3, 2, seed=1), _square(*b, 3, 3), i % 2 == 0, i == 1, i == 2)
            for i, b in enumerate(_BATCHES)
        ),
        call(x(3, 2, seed=1), _square(5, 3, 3)),
        call(x(5, 3, 2, seed=1), _square(3, 3)),
    ]


def _cholesky_solve() -> list[Call]:
    def factor(*shape: int) -> Tensor:
        return torch.linalg.cholesky(_definite(*shape))

    return [
        *(call(x(*b, 3, 4, seed=1), factor(*b, 3, 3)) for b in _BATCHES),
        call(x(5, 3, 2, seed=1), factor(5, 3, 3).mT.contiguous(), True),
        call(x(3, 2, seed=1), factor(5, 3, 3)),
        call(x(4, 3, 1, seed=1), factor(3, 3)),
    ]


def _reflectors(*shape: int) -> tuple[Tensor, Tensor]:
    a, tau = torch.geqrf(x(*shape))
    return a, tau


def _ormqr() -> list[Call]:
    return [
        call(*_reflectors(5, 4, 3), x(5, 4, 2)),
        call(*_reflectors(2, 3, 3, 2), x(2, 3, 2, 3), False),
        call(*_reflectors(3, 3), x(3, 2), True, True),
        call(*_reflectors(1, 3, 2), x(1, 3, 2)),
    ]


def _pinv() -> list[Call]:
    return [
        call(x(5, 3, 2), atol=torch.full((5,), 1e-9, dtype=torch.float64)),
        call(
            x(2, 3, 2, 3),
            atol=torch.tensor(1e-9, dtype=torch.float64),
            rtol=torch.zeros(3, dtype=torch.float64),
        ),
        call(_definite(4, 3, 3), rtol=torch.full((4,), 1e-9, dtype=torch.float64), hermitian=True),
        call(x(3, 2)),
        call(x(0, 3, 2)),
        call(x(3, 2), rtol=torch.full((4,), 1e-9, dtype=torch.float64)),
    ]


def _crosses() -> list[Call]:
    return [
        call(x(5, 3), x(5, 3, seed=1)),
        call(x(3, 4), x(3, 1, seed=1), dim=0),
        call(x(2, 3, 5), x(1, 3, 5, seed=1), dim=1),
        call(x(0, 3), x(0, 3)),
        call(x(4, 3, dtype=_C), x(4, 3, dtype=_C, seed=1)),
        call(x(4, 3, dtype=torch.int64), x(4, 3, dtype=torch.int64, seed=1)),
    ]


def _addmv() -> list[Call]:
    return [
        call(x(5), x(5, 4, seed=1), x(4, seed=2)),
        call(x(1), x(6, 4, seed=1), x(4, seed=2), beta=0.5, alpha=-2),
        call(x(), x(5, 1, seed=1), x(1, seed=2)),
        call(x(3, dtype=torch.int64), x(3, 4, dtype=torch.int64), x(4, dtype=torch.int64), beta=2),
        call(x(5), x(5, 3, seed=1), x(3, seed=2), beta=0),
        call(x(4), x(4, 0), x(0)),
        call(x(3, dtype=torch.uint8), x(3, 4, dtype=torch.uint8), x(4, dtype=torch.uint8)),
    ]


def _addr() -> list[Call]:
    return [
        call(x(5, 4), x(5, seed=1), x(4, seed=2)),
        call(x(1, 4), x(5, seed=1), x(4, seed=2), beta=0.5, alpha=-2),
        call(x(4), x(5, seed=1), x(4, seed=2), beta=0),
        call(x(), x(1, seed=1), x(3, seed=2)),
        call(x(3, 2, dtype=torch.int64), x(3, dtype=torch.int64), x(2, dtype=torch.int64)),
        call(x(0, 2), x(0), x(2)),
    ]


def _addbmm() -> list[Call]:
    return [
        call(x(5, 4), x(3, 5, 2, seed=1), x(3, 2, 4, seed=2)),
        call(x(1, 4), x(5, 3, 2, seed=1), x(5, 2, 4, seed=2), beta=0.5, alpha=-2),
        call(x(2), x(1, 3, 5, seed=1), x(1, 5, 2, seed=2), beta=0),
        call(x(3, 2), x(0, 3, 2), x(0, 2, 2)),
        call(x(2, 3, dtype=torch.int64), x(4, 2, 2, dtype=torch.int64), x(4, 2, 3, dtype=torch.int64)),
    ]


def _addmm(*batch: int) -> list[Call]:
    def product(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
        return x(*batch, m, k, seed=1), x(*batch, k, n, seed=2)

    integer = torch.int64
    return [
        call(x(*batch, 5, 4), *product(5, 3, 4)),
        call(x(4), *product(5, 2, 4), beta=0.5, alpha=-2),
        call(x(5, 1), *product(5, 1, 4), beta=0),
        call(x(*batch, 1, 4), *product(3, 5, 4)),
        call(x(*batch, 3, 2), *product(3, 0, 2)),
        call(x(2, dtype=integer), x(*batch, 3, 2, dtype=integer), x(*batch, 2, 2, dtype=integer), beta=2),
    ]


def _trilinear() -> list[Call]:
    def bilinear(b: int, i: int, o: int, j: int) -> Call:
        return call(x(b, i), x(o, i, j, seed=1), x(b, j, seed=2), [1, 3], [0], [1, 2], [2, 3])

    return [
        bilinear(5, 3, 4, 2),
        bilinear(1, 2, 1, 5),
        bilinear(3, 1, 2, 1),
        call(x(4, 3), x(4, 3, seed=1), x(4, 3, seed=2), [], [], [], [1]),
        call(x(4), x(3, seed=1), x(4, 3, seed=2), [1], [0], [], [0]),
    ]


def _distances(*more: object) -> list[Call]:
    return [
        call(x(5, 3), x(4, 3, seed=1), *more),
        call(x(2, 5, 2), x(2, 3, 2, seed=1), *more),
        call(x(1, 3), x(6, 3, seed=1), *more),
        call(x(3, 2, 4), x(3, 1, 4, seed=1), *more),
        call(x(0, 3), x(4, 3), *more),
        call(x(4, 3), x(0, 3), *more),
        call(x(3, 0), x(2, 0), *more),
    ]


def _cdist() -> list[Call]:
    wide = call(x(2, 5, 2), x(1, 3, 2, seed=1), 2.0, None)
    every = [c for p in (2.0, 1.0) for c in _distances(p, None)]
    more = [
        _distances(p, mode)[0]
        for p, mode in ((0.0, None), (float("inf"), None), (3.0, None), (2.0, 1), (2.0, 2))
    ]
    return [*every, *more, wide]


def _cdist_backward() -> list[Call]:
    out = []
    for (a, b, p, mode), _ in _cdist():
        if a.shape[:-2] == b.shape[:-2] and mode is None:
            distances = aten._cdist_forward.default(a, b, p, mode)
            out.append(call(x(*distances.shape, seed=3), a, b, p, distances))
    return out


def _renorm() -> list[Call]:
    return [
        call(x(5, 4), 2, 0, 1.0),
        call(x(2, 5, 3), 1.5, -1, 0.5),
        call(x(1, 3), 2, 0, 1.0),
        call(x(4, 3, dtype=_C), 2, 1, 1.0),
    ]


def _triangles() -> list[Call]:
    return [
        call(x(5, 4)),
        call(x(2, 3, 5), 1),
        call(x(4, 4), -1),
        call(x(1, 3), 5),
        call(x(3, 0, 2)),
        call(x(4, 6, dtype=torch.int64), -2),
        call(x(3, 5, dtype=torch.bool)),
        call(x(3, 3, dtype=_C), 1),
    ]


def _svd() -> list[Call]:
    tall = [call(x(*b, 4, 3), i % 2 == 0, i != 1) for i, b in enumerate(_BATCHES)]
    return [*tall, call(x(5, 2, 3)), call(x(5, 2, 3), True, False), call(x(4, 3, 2, dtype=_C))]


def _eigh() -> list[Call]:
    calls = [call(_definite(*b, 3, 3), "LU"[i % 2], i != 1) for i, b in enumerate(_BATCHES)]
    return [*calls, call(_definite(4, 2, 2, dtype=_C))]


def _lu_unpack() -> list[Call]:
    out = []
    for i, b in enumerate(_BATCHES):
        lu, p, _ = aten.linalg_lu_factor_ex.default(x(*b, 3, (3, 2, 4)[i % 3]))
        out += [call(lu, p), *([call(lu, p, i % 2 == 0, i % 2 == 1)] if lu.numel() else [])]
    return out


WRITTEN: dict[str, Callable[[], list[Call]]] = {
    "aten.tril.default": _triangles,
    "aten.triu.default": _triangles,
    "aten.trace.default": lambda: [
        call(x(5, 4)),
        call(x(3, 3)),
        call(x(1, 4)),
        call(x(0, 3)),
        call(x(4, 6, dtype=torch.int64)),
        call(x(3, 3, dtype=_C)),
    ],
    "aten.linalg_matrix_exp.default": lambda: _per_batch((), make=x),
    "aten.cholesky.default": lambda: _per_batch((), (True,), make=_definite),
    "aten.cholesky_inverse.default": lambda: _per_batch((), (True,), make=_square),
    "aten.linalg_inv_ex.default": lambda: _per_batch(()),
    "aten.linalg_cholesky_ex.default": lambda: [
        *_per_batch((), make=_definite),
        *_per_batch((), make=_definite, upper=True)[:2],
    ],
    "aten.linalg_qr.default": lambda: [
        *_per_batch((), ("complete",), ("r",), make=x, m=4),
        *_per_batch(("complete",), ("r",), (), make=x, m=2)[:3],
    ],
    "aten._linalg_det.default": lambda: _per_batch((), make=x),
    "aten._linalg_slogdet.default": lambda: _per_batch((), make=x),
    "aten._linalg_svd.default": _svd,
    "aten._linalg_eigh.default": _eigh,
    "aten.linalg_eig.default": lambda: _per_batch((), make=x),
    "aten._linalg_eigvals.default": lambda: _per_batch((), make=x),
    "aten.linalg_lu.default": lambda: [*_per_batch((), make=x, m=4), *_per_batch((), make=x, m=2)[:2]],
    "aten.linalg_lu_factor_ex.default": lambda: [
        *_per_batch((), make=x, m=4),
        *_per_batch((), make=x, m=2)[:2],
    ],
    "aten.lu_unpack.default": _lu_unpack,
    "aten.linalg_lu_solve.default": _lu_solve,
    "aten._linalg_solve_ex.default": _solve,
    "aten.linalg_solve_triangular.default": _triangular,
    "aten.triangular_solve.default": _triangular_first,
    "aten.cholesky_solve.default": _cholesky_solve,
    "aten.linalg_ldl_factor_ex.default": lambda: [
        *_per_batch((), make=_definite),
        *_per_batch((), make=_definite, hermitian=True)[-1:],
    ],
    "aten.linalg_ldl_solve.default": _ldl_solve,
    "aten.geqrf.default": lambda: [*_per_batch((), make=x, m=4), *_per_batch((), make=x, m=2)[:2]],
    "aten.linalg_householder_product.default": lambda: [call(*_reflectors(*b, 4, 3)) for b in _BATCHES],
    "aten.ormqr.default": _ormqr,
    "aten.linalg_pinv.atol_rtol_tensor": _pinv,
    "aten.linalg_cross.default": _crosses,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": lambda: [*_addmm(3), *_addmm(1)[:2]],
    "aten._grouped_mm.default": _grouped_mm,
    "aten.addmv.default": _addmv,
    "aten.addr.default": _addr,
    "aten.addbmm.default": _addbmm,
    "aten._trilinear.default": _trilinear,
    "aten._cdist_forward.default": _cdist,
    "aten._euclidean_dist.default": lambda: _distances()[:6],
    "aten._cdist_backward.default": _cdist_backward,
    "aten.renorm.default": _renorm,
}  # fmt: skip
