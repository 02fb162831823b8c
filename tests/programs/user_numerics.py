"""Numerical programs that users write: stencils, linear algebra, transforms.

A program takes `put(tensor, requires_grad)`, which distributes a tensor, and returns values by name.
"""

from __future__ import annotations

import torch
import torch.distributions
from tests.programs.user_world import randn, user_program
from torch.nn import functional as F  # noqa: N812 (the usual name)


@user_program
def heat_equation_inplace(put):
    u = put(randn(9, 7))
    for _ in range(3):
        lap = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
        u[1:-1, 1:-1] += 0.1 * lap
        u[0] = u[-2]
        u[-1] = u[1]
        u[:, 0] = 0
        u[:, -1] = 1
    return {"u": u, "e": u.square().sum().item(), "mx": u.argmax().item()}


@user_program
def wave_equation_periodic_grad(put):
    u0, c = (put(randn(11), True), put(randn(11, seed=1).abs() + 0.1, True))
    u, v = (u0, torch.zeros_like(u0))
    for _ in range(4):
        lap = u.roll(1) + u.roll(-1) - 2 * u
        v = v + 0.1 * c * lap
        u = u + 0.1 * v
    e = (v * v).sum() + (u.diff() ** 2).sum() + torch.trapezoid(u)
    e.backward()
    return {"u": u, "a": u0.grad, "b": c.grad, "n": torch.gradient(u.detach())[0]}


@user_program
def stencil_conv_pad(put):
    x = put(randn(1, 1, 8, 9), True)
    k = put(torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]], dtype=torch.float64)[None, None])
    y = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), k)
    z = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), k)
    w = F.conv2d(F.pad(x, (2, 0, 1, 1), mode="replicate"), k)
    (g,) = torch.autograd.grad((y * z).sum() + w.pow(3).sum(), x, create_graph=True)
    g.pow(2).sum().backward()
    return {"y": y, "z": z, "w": w, "g": g, "gg": x.grad}


@user_program
def nbody(put):
    q, p, m = (put(randn(5, 3), True), put(randn(5, 3, seed=1)), put(randn(5, seed=2).abs() + 0.5))

    def energy(q):
        d = q[:, None] - q[None]
        r = (d.square().sum(-1) + 0.1).sqrt()
        w = m[:, None] * m[None] / r
        return -w.triu(1).sum()

    def force(q):
        return -torch.autograd.grad(energy(q), q, create_graph=True)[0]

    qq, pp = (q, p)
    for _ in range(2):
        pp = pp + 0.05 * force(qq)
        qq = qq + 0.1 * pp / m[:, None]
    e = energy(qq) + (pp**2 / (2 * m[:, None])).sum()
    e.backward()
    return {"e": e, "q": qq, "g": q.grad, "cd": torch.cdist(q.detach(), qq.detach())}


@user_program
def complex_numbers(put):
    z = put(torch.complex(randn(5, 4), randn(5, 4, seed=1)), True)
    w = torch.view_as_real(z)
    p = torch.polar(z.abs(), z.angle())
    y = (
        (z @ z.mH).real.sum()
        + (z.conj() * z.roll(1, 0)).imag.sum()
        + torch.fft.fft(z, dim=0).abs().pow(2).sum()
    )
    y.backward()
    q = z.detach().clone()
    q.real.mul_(2)
    q.imag[1] = 7
    q.conj()[2].add_(1j)
    return {
        "y": y,
        "g": z.grad,
        "w": w,
        "p": p,
        "q": q,
        "s": torch.sgn(z.detach()),
        "e": z.detach().exp(),
        "c": z.detach().isreal(),
    }


@user_program
def einsum_layouts(put):
    a, b, c, d = (
        put(randn(3, 4, 5), True),
        put(randn(5, 6, seed=1), True),
        put(randn(4, 6, 2, seed=2)),
        put(randn(3, 3, seed=3)),
    )
    r = [
        torch.einsum("ijk,kl->ijl", a, b),
        torch.einsum("ijk,kl,jlm->im", a, b, c),
        torch.einsum("ii->i", d),
        torch.einsum("ii", d),
        torch.einsum("...k,kl->l...", a, b),
        torch.einsum("ijk->kij", a),
        torch.einsum("ijk,ijk->j", a, a),
        torch.einsum("i,j->ij", d[0], d[:, 1]),
        torch.einsum("bij,bjk->bik", a, a.transpose(1, 2)),
    ]
    sum(t.sin().sum() for t in r).backward()
    return {"r": r, "a": a.grad, "b": b.grad}


@user_program
def linalg(put):
    a = put(randn(4, 4) + 4 * torch.eye(4, dtype=torch.float64), True)
    b = put(randn(4, 3, seed=1), True)
    s = a @ a.mT + torch.eye(4, dtype=torch.float64)[0, 0]
    lower = torch.linalg.cholesky(s)
    x = torch.linalg.solve(a, b)
    e = torch.linalg.eigvalsh(s)
    d = torch.linalg.slogdet(a)
    p = torch.linalg.pinv(b)
    rr = torch.linalg.qr(b).R.abs()
    s_ = torch.linalg.svd(b, full_matrices=False).S
    ls = torch.linalg.lstsq(a.detach(), b.detach()).solution
    tri = torch.linalg.solve_triangular(lower, b, upper=False)
    n = [torch.linalg.norm(a, o) for o in ("fro", "nuc", 2, 1, float("inf"))]
    me = torch.matrix_exp(a * 0.1)
    mp = torch.linalg.matrix_power(a, 3)
    (
        lower.sum()
        + x.sum()
        + e.log().sum()
        + d.logabsdet
        + s_.sum()
        + tri.sum()
        + sum(n)
        + me.sum()
        + torch.linalg.multi_dot([a, a, b]).sum()
        + torch.linalg.det(a)
    ).backward()
    return {
        "L": lower,
        "x": x,
        "rr": rr,
        "e": e,
        "p": p,
        "S": s_,
        "ls": ls,
        "me": me,
        "mp": mp,
        "ga": a.grad,
        "gb": b.grad,
        "kr": torch.kron(b.detach(), a.detach()),
        "rk": torch.linalg.matrix_rank(b.detach()),
        "cond": torch.linalg.cond(a.detach()),
    }


@user_program
def ffts(put):
    x = put(randn(6, 5, 4), True)
    r = [
        torch.fft.rfft(x),
        torch.fft.fft2(x),
        torch.fft.irfft(torch.fft.rfft(x, dim=0), n=6, dim=0),
        torch.fft.fftshift(x, dim=0),
        torch.fft.hfft(x, dim=1),
        torch.fft.ifft(x, n=7, dim=1),
        torch.fft.fftn(x),
        torch.fft.rfft2(x, norm="ortho"),
    ]
    sum(t.abs().pow(2).sum() for t in r).backward()
    sig = put(randn(2, 16, seed=1))
    win = put(torch.hann_window(8, dtype=torch.float64))
    st = torch.stft(sig, 8, 4, window=win, return_complex=True)
    return {"r": r, "g": x.grad, "st": st, "inv": torch.istft(st, 8, 4, window=win)}


@user_program
def sparse_mm(put):
    a = put(torch.where(randn(5, 6) > 0.5, randn(5, 6, seed=1), torch.zeros(5, 6, dtype=torch.float64)))
    b = put(randn(6, 3, seed=2), True)
    s = a.to_sparse()
    y = torch.sparse.mm(s, b)
    y.sum().backward()
    return {"y": y, "g": b.grad, "d": s.to_dense(), "n": s._nnz(), "c": s.coalesce().values().sum()}


@user_program
def kalman_filter(put):
    a_, h_ = (put(randn(3, 3) * 0.4, True), put(randn(2, 3, seed=1)))
    q_, r_ = (put(torch.eye(3, dtype=torch.float64) * 0.1), put(torch.eye(2, dtype=torch.float64)))
    x, pm = (put(randn(3, seed=2)), put(torch.eye(3, dtype=torch.float64)))
    zs = put(randn(4, 2, seed=3))
    ll = 0
    for z in zs:
        x, pm = (a_ @ x, a_ @ pm @ a_.T + q_)
        s_ = h_ @ pm @ h_.T + r_
        k_ = torch.linalg.solve(s_, h_ @ pm).T
        r = z - h_ @ x
        ll = ll - 0.5 * (torch.logdet(s_) + r @ torch.linalg.solve(s_, r))
        x, pm = (x + k_ @ r, pm - k_ @ s_ @ k_.T)
    ll.backward()
    return {"x": x, "P": pm, "ll": ll, "g": a_.grad}


@user_program
def ode_rk4_adjoint(put):
    w_ = put(randn(3, 3) * 0.3, True)
    y = y0 = put(randn(4, 3, seed=1), True)

    def f(y):
        return torch.tanh(y @ w_)

    for _ in range(3):
        k1 = f(y)
        k2 = f(y + 0.05 * k1)
        k3 = f(y + 0.05 * k2)
        k4 = f(y + 0.1 * k3)
        y = torch.lerp(y, y + (k1 + 2 * k2 + 2 * k3 + k4) / 6, 0.1)
    v = put(randn(4, 3, seed=2))
    g = torch.autograd.grad(y, (w_, y0), v, create_graph=True)
    (g[0].norm() + g[1].abs().max()).backward()
    return {"y": y, "g": g, "w": w_.grad, "z": y0.grad}


@user_program
def sinkhorn(put):
    a, b, cost = (
        put(torch.full((4,), 0.25, dtype=torch.float64)),
        put(torch.full((6,), 1 / 6, dtype=torch.float64)),
        put(randn(4, 6).abs(), True),
    )
    u, v = (torch.zeros_like(a), torch.zeros_like(b))
    for _ in range(5):
        u = a.log() - torch.logsumexp(-cost + v[None], 1)
        v = b.log() - torch.logsumexp(-cost + u[:, None], 0)
    pm = (u[:, None] + v - cost).exp()
    (pm * cost).sum().backward()
    return {"P": pm, "g": cost.grad}


@user_program
def conjugate_gradient(put):
    a_ = randn(6, 6)
    a_ = put(a_ @ a_.T + torch.eye(6, dtype=torch.float64))
    b = put(randn(6, seed=1))
    x = torch.zeros_like(b)
    r = b - a_ @ x
    p = r.clone()
    rs = r @ r
    n = 0
    for _ in range(6):
        ap = a_.mv(p)
        al = rs / p.dot(ap)
        x.add_(al * p)
        r.sub_(al * ap)
        new = r.dot(r)
        n += 1
        if new.sqrt() < 1e-10:
            break
        p = r + new / rs * p
        rs = new
    return {
        "x": x,
        "n": n,
        "o": torch.outer(b, x),
        "ad": torch.addr(a_, b, x),
        "bb": torch.baddbmm(a_[None], a_[None], a_[None]),
        "ld": torch.logdet(a_),
        "inv": torch.cholesky_inverse(torch.linalg.cholesky(a_)),
    }
