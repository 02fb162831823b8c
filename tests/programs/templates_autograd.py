"""Statements about gradients, optimizers, transforms, randomness and copies."""

from __future__ import annotations

from tests.programs.drawing import Drawing, template
from tests.programs.templates_ops import expression

_LOSSES = (
    "{y}.square().sum()", "{y}.sum()", "{y}.mean()", "{y}.sin().sum()", "({y} * {y}.detach()).sum()", "{y}.norm()", "{y}.abs().amax()",
    "{y}.softmax(-1).square().sum()", "{y}.logsumexp(-1).sum()",
)  # fmt: skip


def _loss(d: Drawing, y: str) -> str:
    loss = d.rng.choice(_LOSSES) if d[y].is_floating_point() and d[y].dim() else "({y} * 2).abs().sum()"
    return loss.format(y=y)


def _leaf(d: Drawing) -> str | None:
    return d.pick("d", where=lambda t: t.is_leaf and t.requires_grad)


@template(4)
def backward(d: Drawing) -> str | None:
    y = d.pick("d", where=lambda t: t.requires_grad)
    retain = "retain_graph=True" if d.rng.random() < 0.7 else ""
    return y and f"({_loss(d, y)}).backward({retain})"


@template(1)
def backward_with_gradient(d: Drawing) -> str | None:
    y = d.pick("d", where=lambda t: t.requires_grad and not t.is_leaf)
    if y is None:
        return None
    g = d.fresh(d[y].shape, str(d[y].dtype)[6:], grad=False)
    return f"{y}.backward({g}, retain_graph=True)"


@template(2)
def gradient(d: Drawing) -> str | None:
    y, x = d.pick("d", where=lambda t: t.requires_grad), _leaf(d)
    if y is None or x is None:
        return None
    more = d.rng.choice(
        (", retain_graph=True", ", create_graph=True", ", retain_graph=True, materialize_grads=True")
    )
    unused = "" if "materialize" in more else ", allow_unused=True"
    return f"({d.new()},) = torch.autograd.grad({_loss(d, y)}, [{x}]{more}{unused})"


@template(1.5)
def double_backward(d: Drawing) -> str | None:
    x = _leaf(d)
    if x is None or d[x].is_complex():
        return None
    f = d.rng.choice(("sin", "square", "exp", "tanh", "sigmoid"))
    g, h = d.new(), d.new()
    outer = d.rng.choice((f"{g}.square().sum()", f"({g} * {x}).sum()", f"{g}.norm()"))
    if d.rng.random() < 0.5:
        return (
            f"({g},) = torch.autograd.grad({x}.{f}().sum(), [{x}], create_graph=True)\n({outer}).backward()"
        )
    return f"({g},) = torch.autograd.grad(({x}.{f}() * {x}).sum(), [{x}], create_graph=True)\n({h},) = torch.autograd.grad({outer}, [{x}])"


@template(0.7)
def hook(d: Drawing) -> str | None:
    y = d.pick("d", where=lambda t: t.requires_grad)
    if y is None:
        return None
    hooks = [
        "{y}.register_hook(lambda g: g * 2)",
        "{y}.register_hook(lambda g: None)",
        "{y}.retain_grad()",
        "{y}.register_hook(lambda g: g + 1)",
    ]
    if d[y].is_leaf:
        hooks.append("{y}.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))")
    return d.rng.choice(hooks).format(y=y)


@template(1)
def gradient_of_leaf(d: Drawing) -> str | None:
    x = d.pick("d", where=lambda t: t.is_leaf and t.grad is not None)
    if x is None:
        return None
    write = d.rng.choice(("zero_()", "mul_(2)", "add_(1)", "clone()", "sum()", "view(-1)", "detach()"))
    code = f"{d.new()} = {x}.grad.{write}"
    return d.rng.choice(
        (
            code,
            code,
            f"nn.utils.clip_grad_norm_([{x}], 0.5, foreach={d.rng.random() < 0.5})",
            f"nn.utils.clip_grad_value_([{x}], 0.1)",
            f"{x}.grad = None",
        )
    )


_OPTIMIZERS = (
    "SGD(p, lr=0.1)", "SGD(p, lr=0.1, momentum=0.9)", "SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)", "Adam(p, lr=0.1)",
    "Adam(p, lr=0.1, amsgrad=True)", "AdamW(p, lr=0.1)", "Adagrad(p)", "Adadelta(p)", "Adamax(p)", "NAdam(p)", "RAdam(p)", "RMSprop(p)",
    "RMSprop(p, momentum=0.9, centered=True)", "Rprop(p)", "ASGD(p)", "Adafactor(p)", "AdamW(p, maximize=True)",
)  # fmt: skip
_FUSED = ("SGD", "Adam(", "AdamW", "Adagrad")


@template(1.2)
def optimizer(d: Drawing) -> str | None:
    leaves = sorted({x for x in (_leaf(d), _leaf(d)) if x is not None and d[x].is_floating_point()})
    if not leaves:
        return None
    p = "[" + ", ".join(leaves) + "]"
    which = d.rng.choice(_OPTIMIZERS)
    # torch's fused kernels for the CPU take the memory of parameters for contiguous, and write to elements of others
    is_contiguous = all(d[x].is_contiguous() for x in leaves)
    kinds = ["", ", foreach=True", ", foreach=False"] + (
        [", fused=True"] if is_contiguous and which.startswith(_FUSED) and "maximize" not in which else []
    )
    call = which.replace("(p", f"({p}").removesuffix(")") + d.rng.choice(kinds) + ")"
    if d.rng.random() < 0.08:
        call = f"LBFGS({p}, max_iter=3)"
    elif d.rng.random() < 0.1 and all(d[x].dim() == 2 for x in leaves):
        call = f"Muon({p})"
    terms = " + ".join(f"({x} - 0.3).square().sum()" for x in leaves)
    steps = d.rng.choice((1, 2, 3))
    if "LBFGS" in call:
        return f"def closure():\n    optimizer.zero_grad()\n    loss = {terms}\n    loss.backward()\n    return loss\noptimizer = torch.optim.{call}\noptimizer.step(closure)"
    zero = d.rng.choice(("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "pass"))
    # torch does not count the writes of fused steps on the CPU; we do, as the other steps
    counted = f"\n    torch.autograd.graph.increment_version({p})" if "fused=True" in call else ""
    return f"optimizer = torch.optim.{call}\nfor _ in range({steps}):\n    {zero}\n    ({terms}).backward()\n    optimizer.step(){counted}"


@template(0.7)
def checkpointed(d: Drawing) -> str | None:
    x = d.pick("f", 1, where=lambda t: t.requires_grad)
    if x is None:
        return None
    body = d.rng.choice(
        (
            "t.sin().softmax(-1)",
            "(t @ t.mT).tanh() if t.dim() > 1 else t * t",
            "F.layer_norm(t, t.shape[-1:]).exp()",
            "t.cumsum(0).square()",
        )
    )
    reentrant = d.rng.random() < 0.4
    return f"{d.new()} = checkpoint(lambda t: {body}, {x}, use_reentrant={reentrant})"


@template(1.3)
def transform(d: Drawing) -> str | None:
    x = d.pick("f", 1)
    if x is None:
        return None
    f = d.rng.choice(
        (
            "t.sin().sum()",
            "t.square().mean()",
            "(t * t.softmax(-1)).sum()",
            "t.logsumexp(-1).sum()",
            "t.norm()",
            "t.cumsum(-1).square().sum()",
        )
    )
    g = d.rng.choice(
        (
            "t.sin()",
            "t.softmax(-1)",
            "t * 2 + 1",
            "t.cumsum(-1)",
            "t.sum(-1)",
            "t.flip(-1)",
            "t.mean()",
            "F.relu(t)",
            "t.sort(-1).values",
        )
    )
    calls = [
        f"func.grad(lambda t: {f})({x})",
        f"func.jvp(lambda t: {g}, ({x},), (torch.ones_like({x}),))[1]",
        f"func.vjp(lambda t: {f}, {x})[1](torch.ones_like({x}).sum() * 0 + 1)[0]",
        f"func.grad_and_value(lambda t: {f})({x})[1]",
        f"func.vmap(func.grad(lambda t: {f}))({x}[None])",
        f"func.linearize(lambda t: {g}, {x})[0]",
        f"torch.autograd.functional.hvp(lambda t: {f}, {x}.detach(), torch.ones_like({x}))[1]",
    ]
    if d[x].dim() > 1:
        calls += [
            f"func.vmap(lambda t: {g})({x})",
            f"func.vmap(lambda t: {g}, in_dims=1, out_dims=0)({x})",
            f"func.vmap(func.grad(lambda t: {f}))({x})",
        ]
        calls += [
            f"func.vmap(lambda t, u: t @ u)({x}, {x})",
            f"func.vmap(lambda t, u: (t * u).sum(), in_dims=(0, None))({x}, {x}[0])",
        ]
    if d[x].dim() == 1:
        calls += [
            f"func.jacrev(lambda t: {g})({x})",
            f"func.jacfwd(lambda t: {g})({x})",
            f"func.hessian(lambda t: {f})({x})",
        ]
    return f"{d.new()} = {d.rng.choice(calls)}"


@template(1)
def random_numbers(d: Drawing) -> str | None:
    x = d.pick("f")
    if x is None:
        return None
    call = d.rng.choice(
        ("F.dropout({x}, 0.5)", "F.dropout({x}, 0.3)", "torch.rand_like({x})", "torch.randn_like({x}) * {x}", "torch.bernoulli({x}.sigmoid())",
         "{x}.detach().clone().normal_()", "{x}.detach().clone().uniform_(-1, 1)", "F.alpha_dropout({x}, 0.4, training=True)",
         "torch.randint_like({x}, 0, 5)", "F.dropout({x}.t() if {x}.dim() == 2 else {x}, 0.5)", "nn.init.trunc_normal_({x}.detach().clone())", "F.rrelu({x}, training=True)",
         "torch.normal({x}, 1.0)", "F.gumbel_softmax({x}[None], dim=-1)", "F.feature_alpha_dropout({x}[None, None], 0.3, True)", "F.dropout1d({x}[None, None].flatten(2), 0.5)")
    )  # fmt: skip
    return f"with one_device():\n    {d.new()} = {call.format(x=x)}"


@template(0.8)
def copies(d: Drawing) -> str | None:
    x = d.pick("a")
    if x is None:
        return None
    if d.rng.random() < 0.4:
        return f"{d.new()} = copy.deepcopy({x})"
    a, b = d.new(), d.new()
    y = d.pick("a") or x
    if d.rng.random() < 0.5:
        return f"{a}, {b} = copy.deepcopy([{x}, {y}])"
    return f"buffer = io.BytesIO()\ntorch.save([{x}, {y}], buffer)\nbuffer.seek(0)\n{a}, {b} = torch.load(buffer, weights_only=False)"


@template(1)
def module(d: Drawing) -> str | None:
    """A layer with parameters in their own layouts."""
    x = d.pick("f", 2, where=lambda t: t.dim() == 2 and t.numel() > 0)
    if x is None:
        return None
    dtype, n = str(d[x].dtype)[6:], d[x].shape[-1]
    m = d.rng.choice(d.sizes) or 2
    w, b = d.fresh([m, n], dtype, grad=True), d.fresh([m], dtype, grad=True)
    kind = d.rng.random()
    if kind < 0.4:
        return (
            f"{d.new()} = func.functional_call(nn.Linear({n}, {m}), {{'weight': {w}, 'bias': {b}}}, ({x},))"
        )
    if kind < 0.7:
        return f"layer = nn.Linear({n}, {m})\nlayer.weight, layer.bias = nn.Parameter({w}.detach()), nn.Parameter({b}.detach())\n{d.new()} = layer({x})\n{d.new()} = layer.weight"
    return (
        f"with torch.autocast('cpu', torch.bfloat16):\n    {d.new()} = F.linear({x}, {w}, {b}).float()"
        if kind > 0.9
        else f"{d.new()} = F.linear({x}, {w}, {b}).relu().square().mean()"
    )


@template(1)
def custom_function(d: Drawing) -> str | None:
    x = d.pick("f")
    if x is None:
        return None
    return (
        "class Square(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, t):\n        ctx.save_for_backward(t)\n        return t * t\n"
        "    @staticmethod\n    def backward(ctx, g):\n        (t,) = ctx.saved_tensors\n        return 2 * t * g\n"
        f"{d.new()} = Square.apply({x})"
    )


@template(0.6)
def under_mode(d: Drawing) -> str | None:
    code = expression(d)
    if code is None:
        return None
    y = d.new()
    return f"with torch.no_grad():\n    {y} = {code}\n    {y}.requires_grad_()"
