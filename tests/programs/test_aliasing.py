"""Aliasing and versions: programs on a pool of tensors and views, dense and distributed side by side."""

from __future__ import annotations

import os
import re

import pytest
import torch
from tests.programs.drawn_aliasing import draw_program, shrink
from tests.programs.side_by_side import DifferenceError, run_program, simulated_mesh

import shardwise as sw

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
MESHES = ((2,), (3,), (2, 2))
PROGRAMS, STEPS = (1000, 20) if DEEP else (40, 14)  # of each mesh


def check(lines, mesh):
    """Run a program; if the two sides differ, fail with the shortest program that shows it."""
    try:
        run_program(lines, mesh)
    except DifferenceError as found:
        raise (shrink(lines, mesh) or found) from None


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("number", range(len(MESHES)))
def test_drawn_programs(number, part):
    sizes = MESHES[number]
    with simulated_mesh(sizes) as mesh:
        for seed in range(part, PROGRAMS, 2):
            check(draw_program(3 * seed + number, len(sizes), STEPS), mesh)


def test_failures_shrink():
    """A broken write is reported with the lines that matter, and no others."""
    lines = [
        "x = make((4,), '0')",
        "y = make((4,), 'R')",
        "y.add_(1)",
        "v = x[1:3]",
        "x.mul_(skew)",
        "y.neg_()",
    ]
    with simulated_mesh((2,)) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sw.DTensor, "skew", 3.0, raising=False)
        patch.setattr(torch.Tensor, "skew", 2.0, raising=False)
        found = shrink([line.replace("skew", "x.skew") for line in lines], mesh)
    shown = [line.strip() for line in str(found).split("\n")]
    assert shown[1:4] == ["x = make((4,), '0')", "x.mul_(x.skew)", "check()    # <- here"]


PROGRAMS_OF_THE_ISSUE = {
    "foreach ops bump versions and reach views": """
        x = make((5, 4), L)
        v, c = x[1], x[:, 1]
        torch._foreach_add_([x], 1.0)
        torch._foreach_mul_([v, x], 2.0)
        check()
        torch._foreach_add_([v, c], 1.0)
        torch._foreach_copy_([x], [x * 2])""",
    "a fused step between forward and backward": """
        p = make((5, 4), L, grad=True)
        v = p.detach()[1]
        y = (p * p).sum()
        with torch.no_grad(): sgd(p, make((5, 4), L, seed=3))
        y.backward()""",
    "an optimizer step between forward and backward": """
        p = make((5, 4), L, grad=True)
        v = p.detach()[1]
        p.grad = make((5, 4), L, seed=3)
        y = (p * p).sum()
        o = torch.optim.SGD([p], lr=0.5, momentum=0.9, foreach=True)
        o.step()
        check()
        y.backward()""",
    "clip_grad_norm_ with a view of the gradient": """
        p = make((5, 4), L, grad=True)
        (p * p).sum().backward()
        g = p.grad
        v, w = g[1], g[:, 2]
        n = torch.nn.utils.clip_grad_norm_([p], 0.5, foreach=True)
        check()
        v.add_(1)""",
    "data, detach and local": """
        x = make((5, 4), L)
        v = x[1]
        x.data.add_(1)
        v.add_(10)
        check()
        x.detach().mul_(2)
        v.mul_(2)
        local(x).mul_(2)
        v.add_(1)
        w = x.detach()[:, 0:3][1]
        local(x).mul_(2)""",
    "conjugates": """
        z = make((5, 4), L, "complex128")
        c = z.conj()
        r = c.resolve_conj()
        c.mul_(2j)
        check()
        z.mul_(1 + 1j)
        z.mH[0] = 5j
        z.conj()[1].add_(1j)
        z.conj().imag.add_(1)
        torch._neg_view(z).add_(1)
        check()
        r.zero_()""",
    "gradients of conjugates": """
        z = make((5, 4), L, "complex128", grad=True)
        y = z * 2
        y.conj().mul_(2j)
        y.mH[0] = 5j
        y.abs().sum().backward()""",
    "copies": """
        x = make((5, 4), L)
        y, z, w, f = x.roll(5, 0), x.roll(4, 1), x.flip(()), x[:, 1].contiguous()
        with torch.inference_mode(): c, d = x.t().contiguous(), x[1].contiguous()
        i = make((4,), R).nonzero()[:, 0]
        k = x[:, i].contiguous()
        x.add_(1)
        torch._foreach_add_([y, z, w, f, k], 2)
        with torch.inference_mode(): c.add_(1)""",
    "inference": """
        with torch.inference_mode(): x = make((5, 4), L)
        with torch.inference_mode(): v = x[1]
        with torch.inference_mode(): v.mul_(v)
        check()
        with torch.inference_mode(): x.view_as(x)[1:4][1].add_(1)
        check()
        with torch.inference_mode(): x.add_(x[:, 1].sum())
        x[1].add_(1)""",
    "a write to an inference tensor": """
        with torch.inference_mode(): x = make((5, 4), L)
        x.add_(1)""",
    "data of an inference tensor": """
        with torch.inference_mode(): x = make((5, 4), L)
        d = x.data
        with torch.inference_mode(): d.mul_(2)
        with torch.inference_mode(): x.add_(1)
        d.detach_()""",
    "integers take a value that requires grad": """
        x = make((5, 4), L, "int64")
        f = make((4,), R, grad=True)
        x[1:3] = f
        x[0] = f.detach().sum()
        x[:, 1] = f.detach()[0]""",
    "views in other dtypes": """
        x = make((3, 4), L, "int64")
        v = x.view(torch.int32).unflatten(0, (3, 1)).unbind(0)[2]
        x.zero_()
        v.data.add_(-1)""",
    "foreach on an inference tensor": """
        with torch.inference_mode(): x = make((5, 4), L)
        torch._foreach_add_([x], 1)""",
    "inference mode and normal tensors": """
        x = make((5, 4), L)
        with torch.inference_mode(): v = x[1]
        with torch.inference_mode(): v.mul_(v)
        with torch.inference_mode(): x.view_as(x).add_(1)
        with torch.inference_mode(): w = x.expand_as(x)
        w.add_(v)""",
    "unfold": """
        x = make((5, 6), L)
        x.unfold(1, 3, 1)[:, 0].fill_(-1)
        check()
        u = x.unfold(0, 2, 1)
        u[1].fill_(-2)
        u[:, :, 0].fill_(1)
        check()
        x.mul_(2)""",
    "expanded tensors are filled": """
        x = make((5, 4), L)
        x.expand(2, 5, 4)[1].fill_(3)
        x[:, :1].expand(5, 4).unbind(0)[2].fill_(7)
        x[0].expand(5, 4).zero_()""",
    "an expanded tensor is added to": "x = make((5, 4), L)\nx[0].expand(5, 4).add_(1)",
    "deepcopy": """
        x = make((5, 4), L)
        l = [x, x[1], x[:, 1], x.t(), x.t()[1]]
        d = deepcopy(l)
        d[0].add_(1)
        check()
        torch._foreach_mul_(d, 2)
        l[1].add_(1)
        p = torch.nn.Parameter(make((5, 4), L))
        f = deepcopy([p, p.detach()[1]])
        f[1].add_(1)""",
    "save": """
        x = make((5, 4), L)
        l = [x, x[1], x[:, 1], x.t(), x.t()[1]]
        d = saved(l)
        d[0].add_(1)
        check()
        torch._foreach_mul_(d, 2)
        l[1].add_(1)
        z = make((5, 4), L, "complex128")
        s = saved([torch.view_as_real(z[1])])""",
    "a view made before requires_grad_": """
        x = make((5, 4), L)
        v, w = x[1], x[:, 1]
        x.requires_grad_()
        v.add_(1)
        z = v * 2
        with torch.no_grad(): u = x[1]
        u.add_(1)
        x.add_(1)
        x.detach()[1].add_(1)""",
    "strides": """
        x = make((5, 4, 3), L)
        e = x.transpose(0, 1)
        i = make((4, 3), R, "int64").abs().t() % 3
        a, b, c, d = x[i], x[:, i], x[:, :, i], x[i, :, 1]
        f, g, h, j = e[i], e[:, i], x.repeat_interleave(2, 0), e.repeat_interleave(2, 1)
        k, l, m, n = e[e > 0], e.flip(0), e.roll(1, 0), e.sort(0)[0]
        o, p, q, r = torch.cat([e, e]), e.clone(), e.softmax(0), e + x.transpose(0, 1)
        s, t, u, w = e.cumsum(0), e.gather(0, e.argsort(0)), e.reshape(4, 15), e.permute(2, 0, 1) * 2
        y, z = make((), R).expand(4, 5, 3) * e, torch.nn.functional.one_hot(i, 3)""",
    "attention": """
        q = make((4, 6, 4), L).transpose(0, 1)
        k, v = make((6, 4, 4), L, seed=1), make((6, 4, 4), L, seed=2)
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        b, c = a.contiguous(), a.transpose(0, 1).contiguous()
        d = torch.bmm(q, k).transpose(0, 1).contiguous()""",
}
PROGRAMS_OF_THE_ISSUE |= {
    f"{op}, {how}": f"{start}\n v, w, d = x[0], x[:, 0], x.data\n {op}\n v.add_(10)\n check()\n x.mul_(2)\n w.add_(1)\n d.mul_(3)"
    + "\n u = x[0]\n u.add_(1)\n (x * x).sum().backward() if x.requires_grad else None"
    for op in (
        "x.t_()", "x.unsqueeze_(0)", "x.transpose_(0, 1)", "x.resize_(2, 4)", "x.data = make((5, 4), L, seed=7)",
        "x.set_(make((5, 4), L, seed=7))", "x.data = make((3, 2), L)", "torch.utils.swap_tensors(x, make((5, 4), L))",
    )
    for how, start in (
        ("without grad", "x = make((5, 4), L)"),
        ("with grad", "b = make((5, 4), L, grad=True)\n x = b * 2"),
    )
}  # fmt: skip
PROGRAMS_OF_THE_ISSUE |= {
    f"gradients of views after {op}": f"""
        x = make((4, 4), L, grad=True)
        y, z = x * 1, (x * 2)[1:3, 1:3]
        v, c, w = y[0], y[:, 1], z[1]
        {op}
        u = y[0]
        check()
        c.mul_(3)
        y.mul_(y.detach())
        (v * v).sum().backward()
        (y * y * u.sum() * w.sum()).sum().backward()"""
    for op in (
        "y.t_(), z.t_()", "y.transpose_(0, 1), z.swapaxes_(1, 0)", "y.unsqueeze_(0), z.unsqueeze_(-1)",
        "y.squeeze_(), z.swapdims_(0, -1)", "y.as_strided_((4, 4), (1, 4)), torch.as_strided_(z, (2, 2), (1, 4))",
        "torch.ops.aten.t_(y), torch.ops.aten.transpose_.default(z, 0, 1)", "torch.Tensor.t_(y), torch.ops.aten.swapaxes_(z, 0, 1)",
        "torch.ops.aten.unsqueeze_(y, dim=0), torch.ops.aten.squeeze_(self=z)",
    )
} | {
    "a tensor without grad changes its shape": """
        x = make((5, 4), L)
        g = make((4,), R, grad=True)
        v = x[0]
        x.t_()
        v.mul_(g)
        x.sum().backward()
        y = make((5, 4), L, seed=3)
        w = y[0]
        with torch.inference_mode(): y.swapdims_(0, 1)
        y.requires_grad_()
        check()
        (y * y).sum().backward()
        y.detach_()
        y.add_(1)
        z = deepcopy(y)""",
    "strides that reach beyond a view": """
        x = make((4, 4), L)
        v = x[1:, :2]
        w = v.as_strided((6,), (1,))
        z = torch.as_strided(x[1:], (2, 2), (1, 2), 1)
        w.add_(1)
        z.mul_(2)""",
    "swapped views": """
        x = make((5, 4), L)
        a, b = x[0], x[:, 1]
        torch.utils.swap_tensors(a, b)
        x.add_(1)
        a.mul_(2)
        b.mul_(3)""",
    "fills of views of expanded views": """
        x = make((5,), L0, "int64")
        y = x[0::2].expand(2, 3).permute(0, 1)
        y.fill_(-1)
        t = make((2, 2), L).expand(2, 2, 2).select(2, 1)[1:]
        t[0] += 1
        z = make((1, 4), L, "complex128")
        i = z.conj().imag.unfold(0, 1, 1)[:, 2]
        i.add_(3)""",
}  # fmt: skip
PROGRAMS_OF_THE_ISSUE |= {
    "hooks of a tensor that changed its shape see the gradients of its views": """
        x = make((4, 3), L, grad=True)
        y = x * 2
        z, v = y * 3, y[0]
        a = v * 2
        y.t_()
        b = y * 2
        y.register_hook(lambda g: g * torch.ones_like(g).cumsum(1))
        w = y[1]
        c = (v * v).sum() + (w * w).sum()
        (c + b.sum() + z.sum() + a.sum()).backward(retain_graph=True)
        check()
        y.mul_(2)
        (y.sum() + (v * v).sum() + w.sum()).backward(retain_graph=True)
        check()
        y.unsqueeze_(0)
        g = torch.autograd.grad((y * y).sum() + (v * v).sum(), x, create_graph=True)[0]
        g.pow(2).sum().backward()""",
    "the retained gradient of a tensor that changed its shape has those of its views": """
        x = make((4, 3), L, grad=True)
        y = x * 2
        v = y[0]
        y.t_()
        y.retain_grad()
        w = y[1]
        ((v * v).sum() + (w * 5).sum()).backward(retain_graph=True)
        r = y.grad + 0
        ((v * v).sum() + (y * y).sum()).backward(retain_graph=True)
        s = y.grad + 0
        torch.autograd.grad((y * y).sum(), y, retain_graph=True)
        (v * 3).sum().backward(retain_graph=True)
        t = y.grad + 0
        y.sum().backward()
        u = y.grad + 0""",
    "ops that write to some of the elements of a view that overlaps itself": """
        x = make((8, 2), L)
        i = make((1,), R, "int64") % 7
        y = x.unfold(0, 2, 1)
        y[i] = y[i].clone() * 2
        check()
        y.index_fill_(0, i, 5.0)
        y.masked_fill_(make((2,), R) > 0, 1.0)
        with torch.inference_mode(): y.fill_(2)
        y[2:4].index_add_(0, i * 0, make((1, 2, 2), L))""",
    "in-place ops that inference mode passes on whole": """
        x = make((4, 4), L, "int64")
        with torch.inference_mode(): x &= 3
        with torch.inference_mode(): x <<= 1
        with torch.inference_mode(): y = x + 1
        x |= 3
        y &= 3""",
    "integrals of empty tensors": """
        x = make((4, 0), L)
        y, z = torch.trapezoid(x, dim=1) + 1, torch.trapz(x, dim=0)""",
    "detach_ with live views": """
        x = make((4, 4), L, grad=True)
        y = x * 1
        v, w = y[0], y[:, 1]
        y.detach_()
        z = v * 2
        y.add_(1)
        check()
        (w * w).sum().backward()
        (z * z).sum().backward()
        check()
        y.requires_grad_()
        (y * y).sum().backward()""",
    "detach_ after t_": """
        x = make((4, 4), L, grad=True)
        y = x * 1
        v, w = y[0], y[:, 1]
        y.t_()
        y.detach_()
        u = y[1]
        y.add_(1)
        check()
        (w * w).sum().backward()
        u.add_(1)
        v.detach().add_(1)""",
    "requires_grad = True after t_": """
        x = make((4, 4), L)
        v = x[1]
        x.t_()
        x.detach_()
        x.add_(1)
        v.add_(1)
        x.requires_grad = True
        (x * x).sum().backward()""",
    "writes to the data of an inference tensor": """
        with torch.inference_mode(): x = make((4, 4), L)
        with torch.inference_mode(): v = x[1]
        d, f = x.data, v.data
        d.mul_(2)
        f.add_(1)
        check()
        u, e = d[1], d * 2
        e.add_(1)
        with torch.inference_mode(): d[1].mul_(3)
        check()
        d.t_()
        torch._foreach_add_([d, f], 1.0)
        z, s, g = deepcopy(d), saved([d])[0], d.detach()""",
    "foreach ops refuse one tensor": """
        x, y = make((4, 4), L), make((4, 4), L)
        e = y[:1].expand(4, 4)
        torch._foreach_add_([x, e, y], 1.0)
        check()
        with torch.inference_mode(): z = make((4, 4), L)
        torch._foreach_add_([z, x, y], 1.0)""",
    "expanded tensors are written to": """
        x, y = make((4, 4), L), make((4, 4), L, seed=1)
        e = x[:1].expand(4, 4)
        e.masked_fill_(y > 0, 1.0)
        check()
        e.triu_()
        check()
        e.index_fill_(0, make((2,), R, "int64").abs() % 2, 2.0)
        e.resize_as_(y)
        e.fill_(3)""",
} | {
    f"an expanded tensor: {line}": f"x, y = make((4, 4), L), make((4, 4), L, seed=1)\n e, n = x[:1].expand(4, 4), torch._neg_view(x[:1]).expand(4, 4)\n {line}"
    for line in (
        "e.add_(1)", "e.copy_(y)", "e.cumsum_(0)", "e.uniform_()", "e.addmm_(y, y)", "n.fill_(1)", "n.copy_(y)", "n.mul_(2)",
        "torch.add(y, 1, out=e)", "torch._foreach_sqrt_([e])", "e.scatter_(0, y.long() * 0, y)",
    )
} | {
    f"an empty tensor: {line}": f"x, y = make((0, 4), L), make((4, 0), L)\n i = make((2,), R, 'int64').abs() + 9\n z = {line}"
    for line in (
        "x.index_fill(1, i, 1.0)", "y.index_fill(0, i, 1.0)", "x.index_add(0, i, make((2, 4), R))", "x[i]", "y[i]", "y.take(i)",
        "y.index_copy(0, i, make((2, 0), R))", "y.index_select(0, i)", "y.index_put_((i,), make((), R))", "x.index_select(0, i)",
    )
}  # fmt: skip
PROGRAMS_OF_THE_ISSUE |= {
    f"overlap: {line}": f"x = make((4, 4), L)\n i = make((4, 4), L, 'int64').abs() % 4\n {line}"
    for line in (
        "x.scatter_(0, i, x)", "x.scatter_add_(0, i, x)", "i.scatter_(0, i, 1)", "i.index_fill_(0, i[0], 3)",
        "x.index_copy_(0, i[0], x)", "x.index_add_(0, i[0], x)", "x[1:].copy_(x[:-1])", "x[1:].add_(x[:-1])",
        "x.add_(x.t())", "x.mul_(x)", "x.add_(x[0])", "x.add_(x[0, 0])", "x.add_(x[:, 1][1])", "x.copy_(x.t())",
        "x.masked_fill_(x > 0, x[0, 0])", "x.put_(i, x)", "x.index_put_((i[0],), x)", "x.addcmul_(x, x)",
        "x.masked_scatter_(x > 0, x)", "x[:, ::2].copy_(x[:, 1::2])", "torch.add(x, 1, out=x)",
    )
}  # fmt: skip
LAYOUTS = {(2,): ("R", "0", "1", "P"), (3,): ("0", "1"), (2, 2): ("0 1", "0 0", "1 P", "R 0")}


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_programs_of_the_issue(sizes):
    """Replicated, split along the viewed dim or another one, unevenly, by two axes, and pending."""
    layouts = LAYOUTS[sizes] if DEEP else LAYOUTS[sizes][1:3]
    with simulated_mesh(sizes) as mesh:
        for text in PROGRAMS_OF_THE_ISSUE.values():
            for layout in layouts:
                values = {
                    "L": repr(layout),
                    "R": repr(" ".join("R" for _ in sizes)),
                    "L0": repr(layout.replace("1", "0")),
                }
                lines = [line.strip() for line in text.strip().split("\n")]
                check([_with_layouts(line, values) for line in lines], mesh)


def _with_layouts(line, values):
    for name, value in values.items():
        line = re.sub(rf"\), {name}\b", f"), {value}", line)
    return line


@pytest.mark.parametrize(
    "lines",
    [
        "y = x * 1; v = y[0]; y.retain_grad(); y.t_()",
        "v = x[0]; exec('with torch.no_grad(): x.t_()', {'torch': torch, 'x': x})",
        "y = x.detach().clone(); v = y[0]; y.t_(); y.requires_grad_(); v.sum().backward()",
    ],
)
def test_what_views_cannot_follow_is_refused(lines):
    with simulated_mesh((2,)) as mesh:
        names = {
            "torch": torch,
            "x": sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(0)]).requires_grad_(),
        }
        with pytest.raises(RuntimeError, match="  fix: "):
            exec(lines, names)


def run_on_processes(seeds, steps):
    """Run drawn programs on the processes of this group."""
    meshes = [
        sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)),
        sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    ]
    for seed in seeds:
        mesh = meshes[seed % 2]
        run_program(draw_program(seed, mesh.ndim, steps), mesh)


@pytest.mark.processes
def test_drawn_programs_on_processes(workers):
    workers.run(run_on_processes, range(10_000, 10_000 + (200 if DEEP else 20)), 14)
