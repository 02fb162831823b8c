"""Views with lazy bits that overlap, shape changes of views under no_grad, and strides, side by side with plain tensors."""

from __future__ import annotations

import pytest
import torch
from tests.programs.side_by_side import run_program, simulated_mesh

import shardwise as sw

OVERLAPPING = (
    "z.conj().unfold(0, 2, 1)",
    "torch._neg_view(z.unfold(0, 2, 1))",
    "z.conj().as_strided((7, 2, 2), (2, 2, 1))",
)
WRITES = (
    "c.index_fill_(0, i, 5.0)",
    "c[i] = 2j",
    "c[2:4].index_add_(0, i * 0, make((1, 2, 2), 'R', 'complex128'))",
    "c[:, :, 0].fill_(1j)",
    "c.imag.index_fill_(0, i, 3)",
)
PROGRAMS = (
    """x = make((1, 4), L, grad=True)
    v = x.diagonal(1, 0, 1)
    with torch.no_grad(): v.squeeze_()
    (v * v).sum().backward()""",
    """x = make((4, 3), L, grad=True)
    y = x * 2
    with torch.inference_mode(): y.detach_()
    y.sum().backward()""",
    """x = make((4, 3), L, grad=True)
    (torch.normal(x, 1.0) * 2).sum().backward()
    g = x.grad""",
    """x = make((4, 3), L, grad=True)
    (g,) = torch.autograd.grad(x.abs().amax(), [x], create_graph=True)
    (h,) = torch.autograd.grad(g.sin().sum(), [x])
    w = torch.where(h != 0, h, x)""",
    """x = make((4, 3), L, 'float64')
    with torch.inference_mode(): y = x * 2
    y.detach().mul_(3)
    torch.add(x, 1, out=y.detach())""",
    """x = make((6,), L0, 'float64')
    n = torch._neg_view(x)
    i = make((6,), L0, 'int64') % 6
    n.scatter_add_(0, i, n)
    n.index_put_((i,), n, accumulate=True)
    n[1:].add_(n[:-1])
    x[1:].add_(n[:-1])
    n[1:].add_(x[:-1])
    x.scatter_add_(0, i, n)""",
    """z = make((6,), L0, 'complex128')
    c = z.conj()
    i = make((6,), L0, 'int64') % 6
    c.index_add_(0, i, c)
    c.imag.scatter_add_(0, i, c.imag)
    c[1:].add_(c[:-1])""",
    """x = make((4, 3), L, 'float64')
    with torch.inference_mode(): y = x * 2
    d = y.detach()
    d.detach().mul_(2)
    with torch.inference_mode(): d[1:].mul_(5)
    d[1:].mul_(3)""",
    """x = make((4, 3), L, 'float64')
    with torch.inference_mode(): y = x * 2
    y.data.view(12).mul_(3)""",
    """x = make((6,), L0, 'float64')
    y = x[2:]
    a = y.as_strided((2,), (1,), y.storage_offset())
    b = y.as_strided_scatter(x[:2] + 50, (2,), (1,), 3)
    c = torch.as_strided_scatter(y, x[:2] + 50, (2,), (1,))
    d = torch.as_strided_copy(y, (2,), (2,), 1)
    z = make((6,), L0, 'complex128')
    e = z.conj().imag.as_strided_scatter(x[:1] + 50, (1,), (1,), 2)
    f = z.imag[1:].as_strided_scatter(x[:1] + 50, (1,), (1,), 5)
    g = z.conj()[::2].as_strided_scatter(z[:1] + 50, (1,), (1,), 2)
    h = z.conj().imag.slice_scatter(x[:1], 0, 0, 1)""",
    """x = make((6,), L0, 'float64', grad=True)
    b = x.as_strided_scatter((x * 2)[:2], (2,), (1,), 3)
    (b * b).sum().backward()
    g = x.grad""",
    """x = make((4, 1), L, 'int64')
    e = x.expand(2, 4, 1)[:, :, :0]
    torch._foreach_neg_([e, x])""",
    """x = make((0,), L0, grad=True)
    w = make((2,), L0, grad=True)
    y = torch.cat([x, w])
    (g,) = torch.autograd.grad((y * y).sum(), [x], create_graph=True)
    h = torch.where(g > 0, g, x)""",
    """x = make((4, 3), L)
    p = torch.nn.Parameter(x)
    (p * p).sum().backward()
    q = deepcopy(p)
    has_grad = [p.grad is not None, q.grad is not None]""",
    """x = make((4,), L0, 'complex128')
    with torch.no_grad(): y = x.real.narrow(0, 3, 1)
    y.resize_(1)
    r = y.chunk(3, 0)[-1]""",
    """x = make((4, 3), L)
    v = x[1:]
    x.data = x.clone()
    w = x[1:]
    w.resize_(2)
    a = v.as_strided(v.size(), v.stride())""",
    """x = make((2, 4, 6), L)
    y = torch.max_pool1d(x, 2)
    y.detach_()""",
    """x = make((2, 2, 1), L, grad=True)
    (g,) = torch.autograd.grad(torch.linalg.vector_norm(x.permute(2, 1, 0), ord=1), [x], create_graph=True)
    (h,) = torch.autograd.grad(g.norm(), [x], materialize_grads=True)""",
)


@pytest.mark.parametrize("layout", ["0", "1", "P"])
@pytest.mark.parametrize("view", OVERLAPPING)
def test_writes_to_overlapping_views_with_lazy_bits(view, layout):
    with simulated_mesh((3,)) as mesh:
        for write in WRITES:
            lines = [f"z = make((8, 2), {layout!r}, 'complex128')", "i = make((1,), 'R', 'int64') % 7"]
            run_program([*lines, f"c = {view}", write, "check()", "z.add_(1j)"], mesh)


@pytest.mark.parametrize("layout", ["0", "1", "R"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_shape_changes_and_gradients(program, layout):
    with simulated_mesh((2,)) as mesh:
        run_program(
            [
                line.strip()
                .replace("L0,", repr("P" if layout == "1" else layout) + ",")
                .replace("L,", f"{layout!r},")
                for line in program.split("\n")
            ],
            mesh,
        )


def _strides(t):
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1], t.is_contiguous()


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w, i: torch.conv1d(x.transpose(1, 2), w, padding=1),
        lambda x, w, i: torch.conv_transpose1d(x.transpose(1, 2), w.transpose(0, 1)),
        lambda x, w, i: torch.conv2d(x.transpose(1, 2).unsqueeze(2), w.unsqueeze(2)),
        lambda x, w, i: torch.max_pool1d(x.expand(6, 8, 3).transpose(1, 2), 2),
        lambda x, w, i: x[:2, :2, 0].unfold(0, 2, 1)[:, i],
        lambda x, w, i: torch.rrelu(x.expand(6, 8, 3).transpose(0, 1), training=True),
    ],
    ids=["conv1d", "conv_transpose1d", "conv2d", "max_pool1d", "index", "rrelu"],
)
@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0)])
def test_strides_where_a_dim_has_size_1(f, placement):
    x, w, i = torch.randn(6, 8, 1), torch.randn(3, 1, 3), torch.tensor([0, 1, 1])
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        got = f(*[sw.distribute_tensor(t, mesh, [placement]) for t in (x, w, i)])
    assert _strides(got) == _strides(f(x, w, i))


def test_as_strided_counts_from_the_first_element_of_a_block_that_is_part_of_a_larger_memory():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        # the block of one rank is part of a larger memory, that of the other is not
        block = sw.per_rank(lambda rank: torch.arange(10.0)[2:] if rank else torch.arange(10.0)[2:].clone())
        x = sw.DTensor.from_local(block, mesh, [sw.Replicate()])
        got = [
            x.as_strided((2,), (1,), 0),
            x.as_strided((2,), (1,), 1),
            x.as_strided((2,), (1,)),
            x.as_strided_scatter(torch.zeros_like(x[:2]), (2,), (3,), 1),
        ]
        values = [[t.tolist() for t in y.to_local().ranks] for y in got]
    assert values == [
        [[2.0, 3.0]] * 2,
        [[3.0, 4.0]] * 2,
        [[2.0, 3.0]] * 2,
        [[2.0, 0.0, 4.0, 5.0, 0.0, 7.0, 8.0, 9.0]] * 2,
    ]


def test_bags_from_a_table_whose_blocks_have_different_strides():
    table, bags = torch.randn(3, 2).T, torch.tensor([[0, 1], [1, 1]])
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(table, mesh, [sw.Shard(1)])
        got = torch.nn.functional.embedding_bag(sw.distribute_tensor(bags, mesh), x, mode="sum")
        assert str(got.sharding) == "[2, 3:0]"
        assert torch.allclose(
            got.full_tensor().ranks[0], torch.nn.functional.embedding_bag(bags, table, mode="sum")
        )
