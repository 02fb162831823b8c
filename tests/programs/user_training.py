"""Training loops, transforms and hooks that users write.

A program takes `put(tensor, requires_grad)`, which distributes a tensor, and returns values by name.
"""

from __future__ import annotations

import copy

import torch
import torch.distributions
from tests.programs.user_world import initialized, integers, placed, randn, user_program
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the usual name)
from torch.utils.checkpoint import checkpoint


@user_program
def optimizers_sparse_adam(put):
    emb = nn.Embedding(7, 3, sparse=True).double()
    with torch.no_grad():
        emb.weight.copy_(randn(7, 3))
    placed(emb, put)
    opt = torch.optim.SparseAdam(emb.parameters(), lr=0.1)
    idx = put(integers(7, 4, 2, seed=1))
    for _ in range(3):
        opt.zero_grad()
        emb(idx).pow(2).sum().backward()
        opt.step()
    return {"w": emb.weight.detach()}


@user_program
def lbfgs_strong_wolfe(put):
    a_, b = (put(randn(8, 5)), put(randn(8, seed=1)))
    w = put(randn(5, seed=2), True)
    opt = torch.optim.LBFGS([w], lr=0.5, max_iter=6, line_search_fn="strong_wolfe", history_size=3)

    def closure():
        opt.zero_grad()
        loss = F.huber_loss(a_ @ w, b) + 0.01 * w.abs().sum()
        loss.backward()
        return loss

    losses = [opt.step(closure).item() for _ in range(2)]
    return {"w": w.detach(), "l": losses}


@user_program
def optimizer_zoo_state(put):
    out = {}
    for name, kw in [
        ("Adadelta", {}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("Adamax", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {"momentum": 0.5, "centered": True}),
        ("Rprop", {}),
        ("ASGD", {}),
        ("SGD", {"nesterov": True, "momentum": 0.9, "weight_decay": 0.1}),
        ("AdamW", {"amsgrad": True}),
    ]:
        p = put(randn(5, 4), True)
        q = put(randn(3, seed=1), True)
        opt = getattr(torch.optim, name)([{"params": [p], "lr": 0.1}, {"params": [q], "lr": 0.01}], **kw)
        sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)
        for i in range(3):
            opt.zero_grad(set_to_none=i % 2 == 0)
            ((p * p).sum() * q.sum()).backward()
            opt.step()
            sch.step()
        sd = copy.deepcopy(opt.state_dict())
        opt2 = getattr(torch.optim, name)([{"params": [p], "lr": 0.1}, {"params": [q], "lr": 0.01}], **kw)
        opt2.load_state_dict(sd)
        (p.sum() * q.sum()).backward()
        opt2.step()
        out[name] = [p.detach(), q.detach()]
    return out


@user_program
def grad_scaler_like(put):
    w = put(randn(4, 3), True)
    opt = torch.optim.SGD([w], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = put(randn(5, 4, seed=1))
    for i in range(3):
        opt.zero_grad()
        loss = (x @ w).pow(2).mean()
        if i == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_([w], 1.0)
        scaler.step(opt)
        scaler.update()
    return {"w": w.detach(), "s": scaler.get_scale()}


@user_program
def double_backward_mlp(put):
    w1, w2 = (put(randn(4, 5), True), put(randn(5, 1, seed=1), True))
    x = put(randn(6, 4, seed=2), True)
    y = F.softplus(x @ w1) @ w2
    (gx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (hv,) = torch.autograd.grad((gx * gx.detach()).sum(), x, create_graph=True)
    (hv.pow(2).sum() + gx.norm()).backward()
    return {"gx": gx, "hv": hv, "a": w1.grad, "b": w2.grad, "c": x.grad}


@user_program
def grad_is_grads_batched(put):
    x = put(randn(4, 3), True)
    y = (x.sin() * x.sum(0)).sum(1)
    eye = put(torch.eye(4, dtype=torch.float64))
    (j,) = torch.autograd.grad(y, x, eye, is_grads_batched=True)
    h = torch.autograd.functional.hessian(lambda t: t.pow(3).sum(), x)
    jj = torch.autograd.functional.jacobian(lambda t: t.exp().sum(1), x, vectorize=True)
    return {"j": j, "h": h, "jj": jj}


@user_program
def views_under_no_grad(put):
    x = put(randn(6, 5), True)
    with torch.no_grad():
        x[1:3].mul_(2)
        x[:, ::2].fill_(0.5)
        x.t()[1, 1:4] += 3
        x.view(-1)[7:11] = 9
        x.diagonal().zero_()
        x.select(1, 3).copy_(x[:, 0])
        a, b = x.split([2, 4])
        a.add_(1)
        b[b > 0.6] = -1
    (x * x.detach()).sum().backward()
    return {"x": x, "g": x.grad, "v": x._version}


@user_program
def func_transforms(put):
    from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

    w_, x = (put(randn(3, 4)), put(randn(5, 4, seed=1)))
    y = put(randn(5, 3, seed=2))

    def loss(w, a, b):
        return ((w @ a - b) ** 2).sum().tanh()

    ps = vmap(grad(loss), (None, 0, 0))(w_, x, y)
    hs = hessian(lambda a: (w_ @ a).sin().sum())(x[0])
    jf, jr = (jacfwd(lambda a: (w_ @ a).exp())(x[1]), jacrev(lambda a: (w_ @ a).exp())(x[1]))
    o, t = jvp(lambda a: (a @ a.T).relu(), (x,), (x * 2,))
    o2, f = vjp(lambda a: a.cumsum(0).prod(1), x)
    (c,) = f(torch.ones_like(o2))
    vm = vmap(vmap(torch.dot, (0, None)), (None, 0))(x, w_)
    return {"ps": ps, "hs": hs, "jf": jf, "jr": jr, "o": o, "t": t, "c": c, "vm": vm}


@user_program
def functional_call_ensemble(put):
    from torch.func import functional_call, stack_module_state, vmap

    ms = [placed(initialized(nn.Linear(4, 3), i), put) for i in range(3)]
    params, bufs = stack_module_state(ms)
    base = copy.deepcopy(ms[0]).to("meta") if False else ms[0]
    x = put(randn(5, 4, seed=9))
    out = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(params, bufs)
    out.pow(2).sum().backward()
    return {"o": out, "g": params["weight"].grad}


@user_program
def checkpoint_reentrant(put):
    out = {}
    for re in (True, False):
        w, x = (put(randn(4, 4), True), put(randn(5, 4, seed=1), True))

        def block(t, w=w):
            return F.dropout(torch.tanh(t @ w), 0.0) + t

        y = x
        for _ in range(3):
            y = checkpoint(block, y, use_reentrant=re)
        y.pow(2).sum().backward()
        out[str(re)] = [y, w.grad, x.grad]
    return out


@user_program
def hooks_and_accumulate(put):
    w, x = (put(randn(4, 3), True), put(randn(5, 4, seed=1), True))
    log = []
    w.register_hook(lambda g: g.clamp(-1, 1))
    x.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.norm().item()))
    y = x @ w
    y.retain_grad()
    y.register_hook(lambda g: g * 2)
    (y**3).sum().backward(retain_graph=True)
    (y**2).mean().backward()
    return {"w": w.grad, "x": x.grad, "y": y.grad, "log": log}


@user_program
def custom_function(put):

    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, b):
            s = torch.sigmoid(b * x)
            ctx.save_for_backward(x, s, b)
            return x * s

        @staticmethod
        def backward(ctx, g):
            x, s, b = ctx.saved_tensors
            return (g * (s + b * x * s * (1 - s)), (g * x * x * s * (1 - s)).sum())

    x, b = (put(randn(4, 5), True), put(torch.tensor(1.5, dtype=torch.float64), True))
    y = Swish.apply(x, b)
    gx, gb = torch.autograd.grad(y.pow(2).sum(), (x, b), create_graph=True)
    (gx.sum() + gb).backward()
    return {"y": y, "gx": gx, "gb": gb, "x": x.grad, "b": b.grad}


@user_program
def normal_reparam(put):
    mu, sd = (put(randn(4, 3), True), put(randn(4, 3, seed=1).abs() + 0.1, True))
    e = torch.normal(mu, sd)
    f = torch.normal(mu, 1.0)
    g = torch.normal(0.0, sd)
    (mu.sum() + e.sum() + f.sum() + g.sum() + sd.pow(2).sum()).backward()
    return {"mg": mu.grad, "sg": sd.grad, "sh": [e.shape, f.shape, g.shape]}


@user_program
def inplace_autograd(put):
    x = put(randn(5, 4), True)
    y = x * 2
    y[1:3] *= x[0]
    y[:, 1].add_(x[:, 0])
    v = y.view(-1)
    v[::3] = 0
    w = y.t()[2]
    w.mul_(3)
    y.sub_(x.mean())
    z = y.split(2)[1].exp_() if False else y.narrow(0, 1, 2) * 2
    u = y.clone()
    u.masked_fill_(u > 1, 0).addcmul_(x, x, value=0.5).addcdiv_(x, x.abs() + 1)
    u.diagonal().mul_(5)
    (y.pow(2).sum() + z.sum() + u.sum()).backward()
    return {"y": y, "v": v, "w": w, "u": u, "g": x.grad}
