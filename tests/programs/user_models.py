"""Models and losses that users write.

A program takes `put(tensor, requires_grad)`, which distributes a tensor, and returns values by name.
"""

from __future__ import annotations

import torch
import torch.distributions
from tests.programs.user_world import initialized, integers, placed, randn, user_program
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the usual name)


@user_program
def gnn_attention(put):
    x, w, a = (put(randn(7, 4), True), put(randn(4, 3, seed=1), True), put(randn(6, seed=2), True))
    e = put(integers(7, 2, 15, seed=3))
    h = x @ w
    s, d = e
    score = F.leaky_relu(torch.cat([h[s], h[d]], -1) @ a)
    m = torch.full_like(score[:1].expand(7), float("-inf")).scatter_reduce(
        0, d, score, "amax", include_self=False
    )
    ex = (score - m[d]).exp()
    den = torch.zeros_like(h[:, 0]).index_add(0, d, ex)
    alpha = ex / den[d]
    out = torch.zeros_like(h).index_add_(0, d, alpha[:, None] * h[s])
    out.sin().sum().backward()
    deg = torch.bincount(d, minlength=7)
    return {"out": out, "xg": x.grad, "wg": w.grad, "ag": a.grad, "deg": deg}


@user_program
def gnn_sparse_adjacency(put):
    i = torch.tensor([[0, 1, 2, 4, 4], [1, 0, 3, 2, 4]])
    v = randn(5)
    a = torch.sparse_coo_tensor(i, v, (5, 5)).to_dense()
    a_, x = (put(a), put(randn(5, 3, seed=1), True))
    deg = a_.abs().sum(1).clamp(min=0.001).rsqrt()
    y = deg[:, None] * a_ * deg[None] @ x
    y.logsumexp(0).sum().backward()
    return {
        "y": y,
        "g": x.grad,
        "nz": a_.nonzero(),
        "cnt": a_.count_nonzero(),
        "tr": torch.triu(a_).nonzero().shape[0],
    }


@user_program
def mixture_density(put):
    import torch.distributions as dist

    lo, mu, sd = (put(randn(6, 3), True), put(randn(6, 3, seed=1), True), put(randn(6, 3, seed=2), True))
    y = put(randn(6, seed=3))
    mix = dist.MixtureSameFamily(dist.Categorical(logits=lo), dist.Normal(mu, F.softplus(sd)))
    nll = -mix.log_prob(y).mean()
    nll.backward()
    return {
        "n": nll,
        "a": lo.grad,
        "b": mu.grad,
        "c": sd.grad,
        "kl": dist.kl_divergence(dist.Normal(mu.detach(), 1.0), dist.Normal(0.0, 2.0)).sum(),
    }


@user_program
def vae_losses(put):
    x = put(randn(5, 4).sigmoid())
    lo = put(randn(5, 4, seed=1), True)
    t = put(integers(4, 5, seed=2))
    loss = [
        F.binary_cross_entropy_with_logits(lo, x),
        F.cross_entropy(lo, t, label_smoothing=0.1),
        F.nll_loss(lo.log_softmax(1), t, reduction="sum"),
        F.kl_div(lo.log_softmax(1), x.softmax(1), reduction="batchmean"),
        F.smooth_l1_loss(lo, x),
        F.poisson_nll_loss(lo, x),
        F.cosine_embedding_loss(lo, x, (t % 2 * 2 - 1).double()),
        F.triplet_margin_loss(lo, x, x.flip(0)),
        F.multi_margin_loss(lo, t),
        F.hinge_embedding_loss(lo, (x > 0.5).double() * 2 - 1),
        F.gaussian_nll_loss(lo, x, x + 0.1),
        F.cross_entropy(lo, x.softmax(1)),
        F.margin_ranking_loss(lo[:, 0], x[:, 0], x[:, 1].sign()),
        F.soft_margin_loss(lo, x.sign()),
        F.multilabel_soft_margin_loss(lo, (x > 0.5).double()),
    ]
    sum(loss).backward()
    return {"l": loss, "g": lo.grad}


@user_program
def ctc_and_embedding_bag(put):
    lp = put(randn(6, 3, 5), True)
    t = put(torch.tensor([[1, 2], [3, 3], [4, 1]]))
    il, tl = (torch.tensor([6, 5, 6]), torch.tensor([2, 2, 1]))
    loss = F.ctc_loss(lp.log_softmax(2), t, put(il), put(tl))
    w = put(randn(7, 3, seed=1), True)
    e = F.embedding_bag(put(integers(7, 4, 3, seed=2)), w, mode="mean")
    e2 = F.embedding_bag(put(integers(7, 8, seed=3)), w, put(torch.tensor([0, 3, 5])), mode="sum")
    (loss + e.sum() + e2.pow(2).sum()).backward()
    return {"l": loss, "e": e, "e2": e2, "g": lp.grad, "w": w.grad}


@user_program
def vision(put):
    x = put(randn(2, 4, 9, 8), True)
    w = put(randn(6, 2, 3, 3, seed=1), True)
    wt = put(randn(6, 3, 2, 2, seed=2), True)
    y = F.conv2d(x, w, stride=2, padding=1, groups=2)
    z = F.conv_transpose2d(y, wt, stride=2)
    p = [
        F.max_pool2d(z, 3, 2, 1),
        F.avg_pool2d(z, 2),
        F.adaptive_avg_pool2d(z, (3, 2)),
        F.adaptive_max_pool2d(z, 2),
        F.interpolate(z, scale_factor=1.5, mode="bilinear"),
        F.interpolate(z, size=(5, 5), mode="nearest"),
        F.pixel_shuffle(x, 2),
        F.unfold(z, 3, padding=1),
        F.group_norm(z, 3),
        F.instance_norm(z),
        F.lrelu(z) if hasattr(F, "lrelu") else F.leaky_relu(z),
        F.local_response_norm(z, 2),
        F.lp_pool2d(z, 2, 2),
    ]
    th = put(torch.tensor([[[1.0, 0.1, 0], [0, 0.9, 0.2]]] * 2, dtype=torch.float64))
    gs = F.grid_sample(x, F.affine_grid(th, (2, 4, 5, 5), align_corners=False), align_corners=False)
    (sum(t.sum() for t in p) + gs.pow(2).sum()).backward()
    return {"y": y, "p": p, "gs": gs, "x": x.grad, "w": w.grad, "wt": wt.grad}


@user_program
def weight_norm_spectral(put):
    from torch.nn.utils import parametrizations as pz
    from torch.nn.utils import parametrize

    loss = placed(initialized(nn.Linear(4, 3)), put)
    pz.weight_norm(loss)
    c = placed(initialized(nn.Linear(3, 3), 1), put)
    sw_ = put(randn(5, 4))

    class Sym(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).mT

        def right_inverse(self, w):
            return w.triu()

    parametrize.register_parametrization(c, "weight", Sym())
    y = c(loss(sw_))
    y.pow(2).sum().backward()
    g = [p.grad for p in list(loss.parameters()) + list(c.parameters())]
    parametrize.remove_parametrizations(c, "weight")
    v = torch.nn.utils.parameters_to_vector(c.parameters())
    return {"y": y, "g": g, "w": c.weight.detach(), "v": v.detach()}


@user_program
def distributions(put):
    import torch.distributions as dist

    mu, c, p, n = (
        put(randn(5, 3), True),
        put(randn(5, 3, seed=1).abs() + 0.5, True),
        put(randn(5, 3, seed=2).sigmoid()),
        put(integers(4, 5, 3).double()),
    )
    r = [
        dist.Normal(mu, 1.0).log_prob(mu.detach()),
        dist.Normal(0.0, c).log_prob(mu),
        dist.Gamma(c, 2.0).log_prob(p),
        dist.Beta(c, c + 1).log_prob(p.detach()),
        dist.Bernoulli(p).log_prob((n > 1).double()),
        dist.Poisson(c).log_prob(n),
        dist.Laplace(mu, c).entropy(),
        dist.Categorical(logits=mu).entropy(),
        dist.Dirichlet(c).log_prob(p / p.sum(-1, keepdim=True)),
        dist.StudentT(3.0, mu, c).log_prob(p),
        dist.Exponential(c).cdf(p),
        dist.kl_divergence(dist.Normal(mu, c), dist.Normal(0.0, 1.0)),
        dist.kl_divergence(dist.Gamma(c, 1.0), dist.Gamma(2.0, c)),
        dist.Uniform(mu - 3, mu + 3).log_prob(mu),
        dist.LogNormal(mu, 1.0).log_prob(c),
        dist.Independent(dist.Normal(mu, c), 1).log_prob(p),
        dist.MultivariateNormal(mu, scale_tril=torch.diag_embed(c)).log_prob(p),
        dist.Geometric(p).log_prob(n),
        dist.Cauchy(mu, c).log_prob(p),
        dist.Gumbel(mu, c).log_prob(p),
        dist.HalfNormal(c).log_prob(p),
        dist.Weibull(c, 1.5).log_prob(p),
        dist.TransformedDistribution(dist.Normal(mu, c), [dist.TanhTransform()]).log_prob(p * 0.5),
    ]
    sum(t.sum() for t in r).backward()
    return {"r": r, "m": mu.grad, "c": c.grad}


@user_program
def memory_bank_queue(put):
    bank = put(randn(6, 3))
    ptr = 0
    q = put(randn(4, 3, seed=1), True)
    ls = 0
    for i in range(3):
        k = F.normalize(q.detach() + i, dim=1)
        sim = F.normalize(q, dim=1) @ bank.clone().T
        ls = ls + F.cross_entropy(
            torch.cat([(q * k).sum(1, keepdim=True), sim], 1) / 0.1,
            torch.zeros(4, dtype=torch.long) if False else (bank[:4, 0] * 0).long(),
        )
        idx = (torch.arange(4) + ptr) % 6
        bank[idx.tolist()] = k
        ptr = (ptr + 4) % 6
    ls.backward()
    return {"b": bank, "g": q.grad, "l": ls}


@user_program
def quantize_ste(put):
    w, x = (put(randn(4, 5), True), put(randn(3, 5, seed=1)))
    s = w.detach().abs().amax(1, keepdim=True) / 7
    q = w + ((w / s).round().clamp(-8, 7) * s - w).detach()
    y = x @ q.T
    y.pow(2).mean().backward()
    vq = put(randn(6, 5, seed=2), True)
    d = torch.cdist(x, vq)
    i = d.argmin(1)
    e = vq[i]
    (F.mse_loss(e, x) + d.sum()).backward()
    return {
        "y": y,
        "g": w.grad,
        "i": i,
        "e": e,
        "vg": vq.grad,
        "fq": torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, -128, 127),
        "eq": torch.equal(x, x.clone()),
        "bc": torch.bincount(i, minlength=6),
    }


@user_program
def hypernet_bmm(put):
    z, h_ = (put(randn(3, 4), True), put(randn(4, 10, seed=1), True))
    p = z @ h_
    w_, b = (p[:, :8].view(3, 2, 4), p[:, 8:])
    x = put(randn(3, 5, 4, seed=2))
    y = torch.baddbmm(b[:, None], x, w_.mT)
    m = torch.vmap(lambda w, t: t @ w.T)(w_, x)
    lw = torch.linalg.vector_norm(y, 3, dim=(1, 2))
    (lw.sum() + m.logsumexp((0, 1)).sum()).backward()
    return {"y": y, "m": m, "z": z.grad, "H": h_.grad}
