"""Programs that index, sort, scan and decide by values.

A program takes `put(tensor, requires_grad)`, which distributes a tensor, and returns values by name.
"""

from __future__ import annotations

import torch
import torch.distributions
from tests.programs.user_world import integers, randn, user_program


@user_program
def ising_checkerboard(put):
    s = put((integers(2, 6, 7) * 2 - 1).double())
    i, j = torch.meshgrid(torch.arange(6), torch.arange(7), indexing="ij")
    mask = put((i + j) % 2 == 0)
    for parity in (mask, ~mask, mask):
        nb = sum(s.roll(sh, d) for sh in (1, -1) for d in (0, 1))
        flip = parity & (s * nb < 0)
        s[flip] *= -1
    return {"s": s, "mag": s.mean(), "e": (s * s.roll(1, 0)).sum()}


@user_program
def advanced_indexing(put):
    x = put(randn(5, 6, 4), True)
    i, j = (put(integers(5, 3)), put(integers(6, 3, seed=1)))
    k = put(integers(4, 2, 1, seed=2))
    m = put(randn(5, 6, seed=3) > 0)
    r = [
        x[i],
        x[:, j],
        x[i, j],
        x[i, :, i % 4],
        x[k, None, j[:2]],
        x[m],
        x[..., i % 4],
        x[i[:, None], j[None]],
        x[1, j],
        x[:, :, k.squeeze(1)],
        x[[0, 4, 4], 1:3],
        x[put(torch.tensor([True, False, True, True, False]))],
        x[None, i, ..., 2],
    ]
    sum((t**2).sum() for t in r).backward()
    return {"r": r, "g": x.grad}


@user_program
def advanced_writes(put):
    x = put(randn(5, 6))
    i, j = (put(torch.tensor([0, 3, 1])), put(torch.tensor([5, 2, 2])))
    v = put(randn(3, seed=1), True)
    y = x * 1
    y[i, j] = v
    y[i] += v[:, None]
    y[:, j[:2]] *= 2
    y.index_put_((put(torch.tensor([1, 1, 4])), put(torch.tensor([0, 0, 5]))), v, accumulate=True)
    y[y > 1] = 0.5
    y[put(randn(5, seed=7) > 0)] = v.sum()
    y[2, [1, 3]] = v[:2]
    y.masked_scatter_(y < -1, v.expand(10, 3).reshape(-1))
    y.index_copy_(1, j[:2], y[:, :2] * 3)
    y.index_fill_(0, i[:1], 2.5)
    y.scatter_(1, put(integers(6, 5, 1, seed=4)), 7.0)
    (y * y.detach()).sum().backward()
    return {"y": y, "g": v.grad}


@user_program
def scans(put):
    x = put(randn(7, 5), True)
    r = [
        x.cumsum(0),
        x.cumprod(1),
        x.logcumsumexp(0),
        x.cummax(0).values,
        x.cummin(1).values,
        x.flip(0).cumsum(0).flip(0),
        torch.cumulative_trapezoid(x, dim=0),
    ]
    sum(t.pow(2).sum() for t in r).backward()
    d = x.detach()
    return {
        "r": r,
        "g": x.grad,
        "i": d.cummax(0).indices,
        "b": (d > 0).cumsum(1),
        "q": (d > 0).long().cumprod(0),
    }


@user_program
def sorting_with_ties(put):
    x = put(integers(4, 7, 5).double(), True)
    s, i = x.sort(dim=0, stable=True)
    t = x.topk(3, dim=1).values
    kv = x.kthvalue(3, 0).values
    m = x.median()
    md = x.median(0).values
    mo = x.mode(0).values
    u, inv, cnt = x.unique(return_inverse=True, return_counts=True)
    ud = x.unique(dim=0)
    uc = torch.unique_consecutive(s.flatten())
    (s.cumsum(0) * 2).sum().backward()
    return {
        "s": s,
        "i": i,
        "t": t,
        "kv": kv,
        "m": m,
        "md": md,
        "mo": mo,
        "u": u,
        "inv": inv,
        "cnt": cnt,
        "ud": ud,
        "uc": uc,
        "ar": x.detach().argsort(dim=1, stable=True, descending=True),
        "ms": torch.msort(x.detach()),
        "q": x.detach().quantile(0.3, dim=0),
        "nm": x.detach().nanmedian(),
        "lx": torch.searchsorted(s.detach()[:, 0].contiguous(), x.detach()[:, 1].contiguous()),
    }


@user_program
def histograms(put):
    x = put(randn(30))
    b = put(torch.linspace(-2, 2, 6, dtype=torch.float64))
    n = put(integers(6, 40, seed=1))
    w = put(randn(40, seed=2))
    return {
        "h": x.histc(5, -2, 2),
        "h0": x.histc(4),
        "bu": torch.bucketize(x, b),
        "br": torch.bucketize(x, b, right=True),
        "bc": n.bincount(w, 8),
        "hi": torch.histogram(x, b)[0],
        "hw": torch.histogram(x, 3)[0],
        "isin": torch.isin(n, put(torch.tensor([1, 3]))),
        "am": x.aminmax(),
    }


@user_program
def dynamic_programming(put):
    c = put(randn(4, 5).abs())
    dist = torch.full_like(c, float("inf"))
    dist[0, 0] = c[0, 0]
    for i in range(4):
        for j in range(5):
            if i or j:
                best = [dist[i - 1, j]] if i else []
                if j:
                    best.append(dist[i, j - 1])
                if i and j:
                    best.append(dist[i - 1, j - 1])
                dist[i, j] = c[i, j] + torch.stack(best).min()
    return {"D": dist}


@user_program
def page_rank_power(put):
    a_ = put((randn(7, 7) > 0).double())
    a_ = a_ / a_.sum(0).clamp_min(1)
    v = torch.full_like(a_[0], 1 / 7)
    for _ in range(5):
        w = 0.85 * a_ @ v + 0.15 / 7
        w /= w.sum()
        if torch.allclose(v, w, atol=1e-12):
            break
        v = w
    return {"v": v, "o": v.argsort(descending=True), "t": [v.topk(2).indices.tolist()]}


@user_program
def viterbi_beam(put):
    lp = put(randn(5, 4).log_softmax(1))
    tr = put(randn(4, 4, seed=1).log_softmax(1))
    s = lp[0]
    bp = []
    for t in range(1, 5):
        s, b = (s[:, None] + tr).max(0)
        s = s + lp[t]
        bp.append(b)
    path = [int(s.argmax())]
    for b in reversed(bp):
        path.append(int(b[path[-1]]))
    sc, ix = (lp[0][:, None] + tr).flatten().topk(3)
    return {"s": s, "p": path, "sc": sc, "r": ix // 4, "c": ix % 4}


@user_program
def int_bit_ops(put):
    a, b = (put(integers(100, 6, 5)), put(integers(100, 6, 5, seed=1) + 1))
    a2 = a.clone()
    a2 &= b
    a2 |= 4
    a2 ^= 1
    a2 <<= 1
    return {
        "x": a & b,
        "y": a ^ 5,
        "z": a // b,
        "m": a % b,
        "f": torch.fmod(-a, b),
        "g": torch.gcd(a, b),
        "l": torch.lcm(a, b),
        "a2": a2,
        "s": a.sum(0),
        "p": (a % 3).prod(1),
        "mean": a.double().mean(),
        "u": a.to(torch.uint8),
        "al": (a > 3).all(1),
        "an": (a > 90).any(),
        "sh": a >> 2,
        "inv": ~a,
        "am": a.amax((0, 1)),
        "cl": a.clamp(b // 2, b),
    }


@user_program
def nan_handling(put):
    x = randn(6, 5)
    x[1, 2] = float("nan")
    x[4] = float("inf")
    x[2, 2] = -float("inf")
    x = put(x)
    return {
        "s": x.nansum(0),
        "m": x.nanmean(1),
        "mx": x.max(0).values,
        "mn": x.fmin(x.flip(0)),
        "n": x.nan_to_num(1.0),
        "i": x.isnan().sum(),
        "am": x.argmax(1),
        "so": x.sort(1).values,
        "cs": x.cumsum(0),
        "sm": x.softmax(1),
        "cl": x.clamp(-1, 1),
        "e": x == x,
        "lo": torch.logaddexp(x, x),
        "med": x.nanmedian(0).values,
        "w": torch.where(x.isfinite(), x, 0.0),
        "st": x[0].std(),
        "lse": x.logsumexp(0),
    }


@user_program
def replay_scatter_updates(put):
    q_ = put(torch.zeros(5, 3, dtype=torch.float64))
    s, a, r, s2 = (
        put(integers(5, 8)),
        put(integers(3, 8, seed=1)),
        put(randn(8, seed=2)),
        put(integers(5, 8, seed=3)),
    )
    for i in range(8):
        t = r[i] + 0.9 * q_[s2[i]].max()
        q_[s[i], a[i]] += 0.5 * (t - q_[s[i], a[i]])
    adv = torch.zeros_like(r)
    run = 0.0
    for i in reversed(range(8)):
        run = r[i] + 0.95 * run
        adv[i] = run
    return {
        "Q": q_,
        "adv": adv,
        "n": (adv - adv.mean()) / (adv.std() + 1e-08),
        "pol": q_.argmax(1),
        "cnt": torch.zeros(5, 3).shape,
    }


@user_program
def segment_ops(put):
    x, i = (put(randn(9, 4), True), put(integers(4, 9)))
    z = torch.zeros_like(x[:4])
    ex = i[:, None].expand(9, 4)
    r = [
        z.scatter_add(0, ex, x),
        z.scatter_reduce(0, ex, x, "mean", include_self=False),
        z.scatter_reduce(0, ex, x, "amin"),
        z.scatter_reduce(0, ex, x, "prod", include_self=True),
        z.index_reduce(0, i, x, "amax"),
        torch.segment_reduce(x, "sum", lengths=put(torch.tensor([2, 3, 4])), axis=0),
        z.index_add(0, i, x, alpha=2),
        x.gather(0, ex % 9),
        torch.take_along_dim(x, x.argsort(1), 1),
    ]
    sum(t.cos().sum() for t in r).backward()
    return {"r": r, "g": x.grad}


@user_program
def data_dependent(put):
    x = put(randn(7, 4))
    k = x[x.sum(1) > 0]
    n = len(k)
    nz = (x > 1).nonzero(as_tuple=True)
    y = x.clone()
    y[nz] = 9
    u, c = torch.unique((x * 2).round(), return_counts=True)
    top = x.flatten().topk(n + 1).values
    sp = x.split([n, 7 - n])
    ms = torch.masked_select(x, x > 0.5)
    rep = x[:2].repeat_interleave(put(torch.tensor([2, 3])), 0)
    return {
        "k": k,
        "n": n,
        "y": y,
        "u": u,
        "c": c,
        "top": top,
        "sp": list(sp),
        "ms": ms,
        "rep": rep,
        "aw": torch.argwhere(x > 1),
        "ss": ms.sort().values,
        "mean": k.mean(0) if n else 0,
        "ts": [t.shape for t in x.tensor_split(3, 1)],
        "first": (x > 0).long().argmax(1),
        "cs": (x > 0).any(1).cumsum(0)[-1].item(),
    }


@user_program
def python_control(put):
    x = put(randn(5, 4))
    out = []
    for row in x:
        if row.sum() > 0:
            out.append(row.max().item())
        elif bool((row > 0).any()):
            out.append(int(row.argmin()))
    n = 0
    while x.norm() > 1 and n < 5:
        x = x / 2
        n += 1
    _, *rest = x
    sh = [tuple(t.shape) for t in rest]
    d = {i: v.tolist() for i, v in enumerate(x.unbind(1))}
    return {
        "out": out,
        "n": n,
        "sh": sh,
        "d": d,
        "l": len(x),
        "c": x[0, 0] in x,
        "s": f"{x[1, 2]:.4f}",
        "b": [bool(v) for v in x[0] > 0],
        "mx": max(x[0].tolist()),
        "fl": float(x[1, 1]),
        "it": sum(x[:, 0]).item(),
    }
