"""Transforms of torch.func, tracing, gradient checks, parametrizations, and the small methods that programs call."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tests.dense import parse_placements, randn
from torch import nn
from torch.func import grad, linearize, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import shardwise as sw
from shardwise import DTensor, PerRank, distribute_tensor
from shardwise.comm import counting

EXPLAINED = r"[\s\S]*\n  why: .+\n  fix: .+"


# torch.func.linearize and gradcheck call deprecated functions of torch themselves
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def mesh():
    """Three ranks: most sizes below are uneven."""
    with sw.simulate(3):
        yield sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))


def spread(t, mesh, text):
    """A DTensor of this value; see `parse_placements`."""
    return distribute_tensor(t.detach().clone(), mesh, parse_placements(text))


def same(got, want):
    """The values on every rank are those of the dense tensor."""
    full = got.full_tensor() if isinstance(got, DTensor) else got
    for block in full.ranks if isinstance(full, PerRank) else [full]:
        torch.testing.assert_close(block.detach(), want.detach(), rtol=1e-9, atol=1e-9, equal_nan=True)


# ---- transforms and tracing


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("placements", ["0 0", "0 1", "1 0", "R 1"])
def test_linearize(mesh, placements):
    x, w, a, b = randn(4, 6), randn(6, 5, seed=1), randn(4, 6, seed=2), randn(6, 5, seed=3)
    on_x, on_w = placements.split()

    def f(x, w):
        return torch.tanh(x @ w).sum(0)

    want, tangent = linearize(f, x, w)
    out, distributed = linearize(f, spread(x, mesh, on_x), spread(w, mesh, on_w))
    same(out, want)
    same(distributed(spread(a, mesh, on_x), spread(b, mesh, on_w)), tangent(a, b))
    captured = spread(w, mesh, on_w)
    _, distributed = linearize(lambda x: f(x, captured), spread(x, mesh, on_x))
    same(distributed(spread(a, mesh, on_x)), linearize(lambda x: f(x, w), x)[1](a))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: torch.relu(x @ w) + 1,
        lambda x, w: (w * 2).T @ x.T,
        lambda x, w: torch.softmax(x @ w, -1).sum(),
        lambda x, w: grad(lambda x: (x @ w).sin().sum())(x),
        lambda x, w: torch.ops.aten.t_((x @ w).unsqueeze_(0).squeeze_(0)) * 2,
    ],
)
def test_make_fx_with_captured_tensors(mesh, f):
    x, w = randn(4, 6), randn(6, 5, seed=1)
    for parameter in (False, True):
        captured = spread(w, mesh, "1")
        captured = nn.Parameter(captured) if parameter else captured
        graph = make_fx(lambda x: f(x, captured))(spread(x, mesh, "0"))  # noqa: B023 - called here only
        same(graph(spread(x * 2, mesh, "0")), f(x * 2, w))
    graph = make_fx(f)(spread(x, mesh, "0"), spread(w, mesh, "1"))
    same(graph(spread(x * 2, mesh, "0"), spread(w * 3, mesh, "1")), f(x * 2, w * 3))


@pytest.mark.parametrize("on_x", ["0", "1", "R"])
@pytest.mark.parametrize("on_w", ["0", "1", "R"])
def test_gradients_of_each_sample(mesh, on_x, on_w):
    x, w, b = randn(5, 6), randn(3, 6, seed=1), randn(3, seed=2)

    def loss(w, b, x):
        return functional.linear(x, w, b).pow(2).sum()

    each = vmap(grad(loss, (0, 1)), (None, None, 0))
    got = each(spread(w, mesh, on_w), spread(b, mesh, "0"), spread(x, mesh, on_x))
    for g, want in zip(got, each(w, b, x), strict=True):
        same(g, want)


@pytest.mark.parametrize("on_index", ["0", "1", "R"])
def test_vmap_of_embedding(mesh, on_index):
    index, tables = torch.tensor([[0, 1, 4], [2, 3, 1], [0, 0, 5]]), randn(3, 6, 4)
    for on_table in ("0", "1"):
        got = vmap(functional.embedding, (0, None))(
            spread(index, mesh, on_index), spread(tables[0], mesh, on_table)
        )
        same(got, functional.embedding(index, tables[0]))
    for on_tables in ("0", "1", "2"):
        got = vmap(functional.embedding)(spread(index, mesh, on_index), spread(tables, mesh, on_tables))
        same(got, vmap(functional.embedding)(index, tables))


def test_gradcheck(mesh):
    x = spread(randn(3, 4), mesh, "0").requires_grad_()
    w = spread(randn(4, 2, seed=1), mesh, "1").requires_grad_()

    def f(x, w):
        return torch.tanh(x @ w)

    assert torch.autograd.gradcheck(f, (x, w))
    assert torch.autograd.gradcheck(f, (x, w), fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (x, w))
    assert not torch.autograd.gradcheck(lambda x: x * x.detach(), (x,), raise_exception=False)


@pytest.mark.parametrize("orthogonal_map", ["matrix_exp", "cayley", "householder"])
@pytest.mark.parametrize("placements", ["0", "1"])
def test_orthogonal(mesh, orthogonal_map, placements):
    dense = nn.Linear(5, 5, bias=False, dtype=torch.float64)
    ours = nn.Linear(5, 5, bias=False, dtype=torch.float64)
    ours.weight = nn.Parameter(spread(dense.weight, mesh, placements))
    for layer in (dense, ours):
        nn.utils.parametrizations.orthogonal(layer, orthogonal_map=orthogonal_map)
    same(ours.weight, dense.weight)
    x = randn(2, 5)
    dense(x).pow(3).sum().backward()
    ours(spread(x, mesh, "0")).pow(3).sum().backward()
    same(ours.parametrizations.weight.original.grad, dense.parametrizations.weight.original.grad)


# ---- helpers


@pytest.mark.parametrize("placements", ["0", "R"])
def test_one_hot(mesh, placements):
    index = torch.tensor([0, 3, 1, 2, 1])
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            same(functional.one_hot(spread(index, mesh, placements)), functional.one_hot(index))
            same(functional.one_hot(spread(index, mesh, placements), 7), functional.one_hot(index, 7))
            for bad, classes in ((index, 3), (index - 1, -1), (index - 1, 5)):
                with pytest.raises(RuntimeError, match="Class values must be"):
                    functional.one_hot(spread(bad, mesh, placements), classes)


@pytest.mark.parametrize("placements", ["0", "1", "R"])
def test_one_hot_of_mapped_tensors(mesh, placements):
    index = torch.tensor([[0, 3, 1], [2, 1, 1]])
    ours = spread(index, mesh, placements)
    same(vmap(lambda t: functional.one_hot(t, 4))(ours), functional.one_hot(index, 4))
    same(vmap(vmap(lambda t: functional.one_hot(t, 5)), 1)(ours), functional.one_hot(index.t(), 5))
    with pytest.raises(RuntimeError, match="explicit positive num_classes"):
        vmap(functional.one_hot)(ours)


@pytest.mark.parametrize("placements", ["0", "1"])
def test_as_strided_with_the_own_strides_moves_nothing(mesh, placements):
    x = randn(6, 4)
    leaf = spread(x, mesh, placements).requires_grad_()
    with counting() as ledger:
        y = leaf.as_strided(leaf.size(), leaf.stride())
        (y * 2).sum().backward()
        turned = leaf.detach().t().as_strided((4, 6), (1, 4), 0)
    assert ledger.collectives == 0
    assert y.placements == leaf.placements
    same(turned, x.t())
    same(leaf.grad, torch.full_like(x, 2))
    y = leaf.detach().as_strided((6, 4), (4, 1))
    y.add_(1)
    same(leaf, x + 1)


@pytest.mark.parametrize(
    ("shape", "dims"), [((1, 4), (0,)), ((1, 4, 1), (0, 2)), ((1, 4, 1), (-1,)), ((4, 1), (0,))]
)
@pytest.mark.parametrize("placements", ["0", "1", "R"])
def test_squeeze_dims_in_place(mesh, shape, dims, placements):
    x, want = spread(randn(*shape), mesh, placements), randn(*shape).squeeze_(dims)
    assert x.squeeze_(dims) is x
    same(x, want)
    x.mul_(2)
    same(x, want * 2)


@pytest.mark.parametrize("placements", ["0", "1", "R"])
@pytest.mark.parametrize("on_value", ["0", "1", "R"])
def test_integers_take_values_that_require_grad(mesh, placements, on_value):
    want, value = torch.arange(12).view(6, 2), randn(2, 2) * 5
    got = spread(want, mesh, placements)
    want[1:3] = value.requires_grad_()
    got[1:3] = spread(value, mesh, on_value).requires_grad_()
    assert (got.requires_grad, got.dtype) == (want.requires_grad, want.dtype)
    same(got, want)


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("placements", ["0", "1"])
def test_fft_where_blocks_are_empty(mesh, shape, placements):
    for f in (
        torch.fft.fft,
        torch.fft.rfft,
        torch.fft.fft2,
        lambda x: torch.fft.irfft(torch.fft.rfft(x), n=x.shape[-1]),
        lambda x: torch.fft.ifft(x, dim=0),
    ):
        x, leaf = randn(*shape).requires_grad_(), spread(randn(*shape), mesh, placements).requires_grad_()
        want, got = f(x), f(leaf)
        same(got, want)
        (want.abs() ** 2).sum().backward()
        (got.abs() ** 2).sum().backward()
        same(leaf.grad, x.grad)


@pytest.mark.parametrize(
    "transform", [grad, lambda f: grad(lambda x: grad(f)(x).square().sum()), lambda f: vmap(grad(f))]
)
def test_constants_are_distributed_inside_transforms(mesh, transform):
    def f(x, place):
        filled = x.clone().index_fill_(0, place(torch.tensor([1])), 2.0)
        return (filled * x * x).sum() + (x * place(torch.ones(3) * 2)).sum()

    x = randn(4, 3)
    got = transform(lambda x: f(x, lambda t: spread(t, mesh, "R")))(spread(x, mesh, "0"))
    same(got, transform(lambda x: f(x, lambda t: t))(x))
    with pytest.raises(sw.LayoutError, match=r"vmap maps over" + EXPLAINED):
        vmap(lambda x: spread(x, mesh, "0"))(x)


def test_blocks_that_are_empty_before_the_last_one():
    """7 on 2 and then 3 ranks are 2, 2, 0 and 1, 1, 1: an op that refuses empty blocks must not run on them."""
    with sw.simulate(6):
        mesh = sw.init_device_mesh("cpu", (2, 3), mesh_dim_names=("tp", "dp"))
        x = randn(4, 7)
        on_both = spread(x, mesh, "1 1")
        for f in (lambda x: torch.fft.rfft(x, dim=0), lambda x: x.t().max(1).values, lambda x: x.argmin(0)):
            same(f(on_both), f(x))


@pytest.mark.parametrize("pending", [False, True])
def test_plain_tensors_take_a_number_of_a_dtensor(mesh, pending):
    number = (
        spread(torch.full((4,), 0.625), mesh, "0").sum() if pending else spread(torch.tensor(2.5), mesh, "R")
    )
    for write in (
        lambda x, s: x.mul_(s),
        lambda x, s: x.add_(s),
        lambda x, s: x.copy_(s),
        lambda x, s: x.clamp_(max=s),
        lambda x, s: x.addcmul_(s, s),
        lambda x, s: x.__setitem__(0, s),
        lambda x, s: torch._foreach_mul_([x, x * 1], s),
        lambda x, s: torch._foreach_add_([x], [s]),
    ):
        got, want = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3)
        write(got, number)
        write(want, torch.tensor(2.5))
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, want)


def test_values_of_python(mesh):
    x, want = spread(randn(3, 2), mesh, "0"), randn(3, 2)
    total, wanted = x.sum(), want.sum()
    assert x.tolist() == want.tolist()
    assert f"{total:.3f} {x[0, 0]:+.1e}" == f"{wanted:.3f} {want[0, 0]:+.1e}"
    assert np.array_equal(x.numpy(), want.numpy())
    assert np.array_equal(np.asarray(x), want.numpy())
    assert (int(total), round(float(total), 9), bool(total > 0)) == (
        int(wanted), round(float(wanted), 9), bool(wanted > 0),
    )  # fmt: skip
    assert [float(v) for v in x[:, 0]] == want[:, 0].tolist()
    np.testing.assert_allclose(x.sum(0).tolist(), want.sum(0).tolist())  # a pending sum
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        leaf.numpy()
    assert leaf.tolist() == want.tolist()


def test_is_same_size_beside_plain_tensors(mesh):
    x = spread(randn(3, 2), mesh, "0")
    assert x.is_same_size(torch.ones(3, 2))
    assert torch.ones(3, 2).is_same_size(x)
    assert not x.is_same_size(torch.ones(2, 2))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_plain_tensors_of_one_element_are_replicated(mesh, shape):
    x, want, one = spread(randn(3, 2), mesh, "0"), randn(3, 2), torch.full(shape, 1.5, dtype=torch.float64)
    for f in (
        lambda x, t: x * t,
        lambda x, t: t / x,
        lambda x, t: torch.where(x > t, x, t),
        lambda x, t: x.clone().add_(t),
        lambda x, t: torch.addcmul(x, t, t),
        lambda x, t: torch.lerp(x, x * 2, t),
        lambda x, t: x.clamp(min=t),
    ):
        same(f(x, one), f(want, one))


def test_what_reads_memory_is_refused(mesh):
    x = spread(randn(3, 2), mesh, "0")
    offsets = spread(torch.tensor([0, 1, 3]), mesh, "R")
    for call in (
        lambda: x.apply_(lambda v: v + 1),
        lambda: x.map_(x, lambda a, b: a),
        lambda: x.share_memory_(),
        lambda: torch.from_dlpack(x),
        lambda: torch.utils.dlpack.to_dlpack(x),
        lambda: np.from_dlpack(x),
        lambda: torch.nested.nested_tensor([x, x]),
        lambda: torch.nested.as_nested_tensor([x, x]),
        lambda: torch.nested.nested_tensor([x, x], layout=torch.jagged),
        lambda: torch.nested.nested_tensor_from_jagged(x, offsets),
        lambda: torch.nested.masked_select(x, x > 0),
        lambda: torch.nested.narrow(x, 1, offsets, offsets, layout=torch.jagged),
    ):
        with pytest.raises(TypeError, match=EXPLAINED):
            call()


def off_the_mesh():
    """`equal` on a mesh of two of four ranks: the answer, or the error on a rank that cannot know it."""
    mesh = sw.DeviceMesh("cpu", [1, 2])
    x = distribute_tensor(randn(3, 2), mesh, [sw.Shard(0)])
    try:
        return [torch.equal(x, x.clone()), torch.equal(x, x + 1)]
    except sw.LayoutError as error:
        return str(error)


@pytest.mark.processes
def test_equal_on_ranks_off_the_mesh(workers):
    found = workers.run(off_the_mesh)
    assert found[1] == found[2] == [True, False]
    assert found[0] == found[3]
    assert re.match(r"aten.equal.default was called on a rank that is not on the mesh" + EXPLAINED, found[0])


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_linearize_and_make_fx_on_processes(workers):
    assert workers.run(traced_on_processes) == [True] * 4


def traced_on_processes():
    mesh = sw.init_device_mesh("cpu", (4,))
    x, w = randn(5, 6), randn(6, 5, seed=1)
    dx, dw = distribute_tensor(x, mesh, [sw.Shard(0)]), distribute_tensor(w, mesh, [sw.Shard(1)])
    graph = make_fx(lambda x: torch.relu(x @ dw))(dx)
    _, tangent = linearize(lambda x: torch.tanh(x @ dw), dx)
    _, wanted = linearize(lambda x: torch.tanh(x @ w), x)
    close = torch.allclose(graph(dx * 2).full_tensor(), torch.relu(x * 2 @ w))
    return close and torch.allclose(tangent(dx).full_tensor(), wanted(x))


def test_memory_of_a_conjugate_is_not_viewed(mesh):
    z = spread(torch.view_as_complex(randn(4, 3, 2)), mesh, "0")
    same(
        torch.view_as_real(z.conj().resolve_conj()),
        torch.view_as_real(z.conj().full_tensor().ranks[0].resolve_conj()),
    )
    with pytest.raises(RuntimeError, match="unresolved conjugated" + EXPLAINED):
        torch.view_as_real(z.conj())
