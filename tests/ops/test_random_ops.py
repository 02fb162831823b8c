"""Random ops on DTensors of any mesh give bitwise the same numbers as on one device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import strategies
from torch.nn import functional as F  # noqa: N812 (the usual name)
from torch.nn import init

import shardwise as sw
from shardwise import LayoutError, Replicate, Shard
from shardwise.comm import counting, members_of
from shardwise.layout import owned
from shardwise.random.uniform import last_below

MESHES = {
    "2": ((2,), [Shard(0)]),
    "2, columns": ((2,), [Shard(1)]),
    "2, replicated": ((2,), [Replicate()]),
    "3": ((3,), [Shard(0)]),
    "3, columns": ((3,), [Shard(1)]),
    "2x2": ((2, 2), [Shard(0), Shard(1)]),
    "2x2, one dim": ((2, 2), [Shard(1), Shard(1)]),
    "2x2, replicated on dp": ((2, 2), [Replicate(), Shard(0)]),
}


def mesh_of(shape):
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def full(t):
    if isinstance(t, sw.DTensor):
        ranks = t.full_tensor()
        ranks = list(ranks.ranks) if isinstance(ranks, sw.PerRank) else [ranks]
        assert all(torch.equal(r, ranks[0]) for r in ranks), "ranks differ"
        return ranks[0]
    return t


X = torch.arange(35, dtype=torch.float32).view(5, 7).sin()
IMAGE = torch.arange(2 * 6 * 4 * 5, dtype=torch.float32).view(2, 6, 4, 5).cos()
INTS = torch.arange(35).view(5, 7)

BITWISE = {
    "normal_": lambda x, i, n: [x.clone().normal_(), x.clone().normal_(2, 3), x.double().normal_(), x.bfloat16().normal_()],
    "uniform_": lambda x, i, n: [x.clone().uniform_(), x.clone().uniform_(-1, 4), x.double().uniform_(), x.half().uniform_()],
    "bernoulli_": lambda x, i, n: [x.clone().bernoulli_(), x.clone().bernoulli_(0.2), n.clone().bernoulli_(0.7), (x > 0).bernoulli_(0.4)],
    "bernoulli_ of probabilities": lambda x, i, n: [x.clone().bernoulli_(x.abs()), x.clone().bernoulli_(x[:1].abs()), n.clone().bernoulli_(x.abs().double())],
    "exponential_": lambda x, i, n: [x.clone().exponential_(), x.clone().exponential_(3.0), x.double().exponential_(0.5)],
    "cauchy_": lambda x, i, n: [x.clone().cauchy_(), x.clone().cauchy_(1, 2)],
    "log_normal_": lambda x, i, n: [x.clone().log_normal_(), x.clone().log_normal_(0.5, 0.3)],
    "geometric_": lambda x, i, n: [x.clone().geometric_(0.4), n.clone().geometric_(0.1)],
    "random_": lambda x, i, n: [x.clone().random_(), x.clone().random_(10), n.clone().random_(-3, 9), n.clone().random_(), n.to(torch.uint8).random_(), (n > 3).random_(), n.clone().random_(-5, None)],
    "complex": lambda x, i, n: [x.to(torch.complex64).normal_(), torch.randn_like(x, dtype=torch.complex64)],
    "like": lambda x, i, n: [torch.rand_like(x), torch.randn_like(x), torch.rand_like(x, dtype=torch.float64), torch.randint_like(x, 10), torch.randint_like(n, -5, 5), torch.randn_like(i)],
    "bernoulli": lambda x, i, n: [torch.bernoulli(x.abs()), torch.bernoulli(x, 0.3), torch.bernoulli(x.abs().double())],
    "dropout": lambda x, i, n: [F.dropout(x, 0.3), F.dropout(x.clone(), 0.3, inplace=True), F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x, 0.5, training=False), *torch.native_dropout(x, 0.25, True)],
    "dropout of features": lambda x, i, n: [F.dropout1d(i[0], 0.5), F.dropout2d(i, 0.5), F.dropout3d(i[..., None], 0.5), F.dropout2d(i.clone(), 0.3, inplace=True), F.feature_alpha_dropout(i, 0.3), F.feature_alpha_dropout(i.clone(), 0.3, inplace=True), F.dropout2d(i, 1.0), F.dropout2d(i, 0.4, training=False)],
    "alpha dropout": lambda x, i, n: [F.alpha_dropout(x, 0.3, True), F.alpha_dropout(x.clone(), 0.3, True, inplace=True)],
    "rrelu": lambda x, i, n: [F.rrelu(x, training=True), F.rrelu(x.clone(), 0.1, 0.9, training=True, inplace=True), F.rrelu(x)],
    "normal of tensors": lambda x, i, n: [torch.normal(x, 2.0), torch.normal(0.5, x.abs()), torch.normal(x, x.abs()), torch.normal(x[:, :1], x.abs())],
    "multinomial": lambda x, i, n: [torch.multinomial(x.abs() + 0.1, 3), torch.multinomial(x.abs() + 0.1, 9, replacement=True), torch.multinomial(x[0].abs() + 0.1, 2), torch.multinomial(x.abs() + 0.1, 1)],
    "poisson": lambda x, i, n: [torch.poisson(x.abs() * 3), torch.poisson(x.abs() * 100), torch.poisson(x.double().abs())],
    "other distributions": lambda x, i, n: [torch.binomial(n.float(), x.abs()), torch._standard_gamma(x.abs() + 0.5)],
    "views": lambda x, i, n: [x.clone().t().normal_(), x.clone().view(-1).uniform_(), i.clone().flatten(1, 2).normal_(), i.clone().transpose(1, 3).uniform_()],
    "slices": lambda x, i, n: [_fill_slices(x)],
    "out": lambda x, i, n: [torch.bernoulli(x.abs(), out=torch.empty_like(x)), torch.normal(x, 1.0, out=torch.empty_like(x))],
    "in inference mode": lambda x, i, n: _in_inference(x, i),
    "with gradients": lambda x, i, n: _with_gradients(x),
    "in transforms": lambda x, i, n: _in_transforms(x, i),
    "two calls": lambda x, i, n: [torch.rand_like(x), torch.rand_like(x)],
}  # fmt: skip


def _fill_slices(x):
    y = x.clone()
    y[:, 2:5].normal_()
    y[1].uniform_()
    y[:, 0].fill_(3)
    return y


def _in_inference(x, i):
    with torch.inference_mode():
        return [
            F.dropout(x, 0.5),
            F.dropout(x.clone(), 0.5, inplace=True),
            F.dropout(x, 0.5, training=False),
            F.alpha_dropout(x, 0.3, training=True),
            F.rrelu(x, training=True),
            F.dropout2d(i, 0.5),
            torch.rand_like(x),
        ]


def _in_transforms(x, i):
    grad, vmap = torch.func.grad, torch.func.vmap
    return [
        grad(lambda x: F.dropout(x, 0.5).sum())(x),
        grad(lambda x: F.dropout(x * 1, 0.5, inplace=True).sum())(x),
        grad(lambda x: F.alpha_dropout(x, 0.5, training=True).sum())(x),
        grad(lambda i: F.dropout2d(i, 0.5).sum())(i),
        grad(lambda i: F.feature_alpha_dropout(i, 0.5, training=True).sum())(i),
        vmap(lambda x: F.dropout(x, 0.5), randomness="different")(x),
        vmap(lambda x: F.dropout(x, 0.5), in_dims=1, randomness="different")(x),
        vmap(grad(lambda x: F.dropout(x, 0.5).sum()), randomness="different")(x),
        vmap(lambda x: torch.randn_like(x), randomness="same")(x),
    ]


def _with_gradients(x):
    x = x.clone().requires_grad_()
    y = x * 2
    y[:, 1:3].uniform_()
    y[2].normal_()
    (x * 1).bernoulli_(0.5)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return [y.detach(), grad]


def _under_autocast(i):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(i, i, i, dropout_p=0.3)
    assert out.dtype == torch.bfloat16
    return (out.float() * 8).round()


CLOSE = {
    "attention": lambda x, i, n: [
        F.scaled_dot_product_attention(i, i * 2, i * 3, dropout_p=0.3),
        F.scaled_dot_product_attention(i, i, i, is_causal=True, dropout_p=0.1),
    ],
    "attention with masks": lambda x, i, n: [
        F.scaled_dot_product_attention(i, i, i, attn_mask=i[0, 0] @ i[0, 0].t() > 0, dropout_p=0.3),
        F.scaled_dot_product_attention(i, i, i, attn_mask=i[0, 0] @ i[0, 0].t(), dropout_p=0.3, scale=0.2),
    ],
    "attention under autocast": lambda x, i, n: [_under_autocast(i)],
    "dirichlet": lambda x, i, n: [torch._sample_dirichlet(x.abs() + 0.5)],
    "gumbel": lambda x, i, n: [F.gumbel_softmax(x), F.gumbel_softmax(x, hard=True)],
    "trunc_normal_": lambda x, i, n: [
        init.trunc_normal_(x.clone()),
        init.trunc_normal_(x.clone(), 1, 2, -1, 3),
    ],
    "xavier": lambda x, i, n: [init.xavier_uniform_(x.clone()), init.xavier_normal_(i.clone())],
    "kaiming": lambda x, i, n: [
        init.kaiming_uniform_(x.clone(), a=5**0.5),
        init.kaiming_normal_(i.clone(), mode="fan_out"),
    ],
    "orthogonal": lambda x, i, n: [init.orthogonal_(x.clone()), init.orthogonal_(i.clone(), gain=2)],
    "constants": lambda x, i, n: [
        init.eye_(x.clone()),
        init.dirac_(i.clone()),
        init.zeros_(x.clone()),
        init.ones_(x.clone()),
        init.constant_(x.clone(), 3),
    ],
    "sparse": lambda x, i, n: [init.sparse_(x.clone(), 0.4)],
    "low rank": lambda x, i, n: [torch.svd_lowrank(x, 3)[1], torch.pca_lowrank(x, 2)[1]],
    "uniform and normal": lambda x, i, n: [init.uniform_(x.clone(), 1, 2), init.normal_(i.clone(), 1, 2)],
}


def on_one_device(program):
    sw.manual_seed(11)
    with sw.one_device():
        return program(X.clone(), IMAGE.clone(), INTS.clone())


def on_mesh(program, shape, placements):
    mesh = mesh_of(shape)
    tensors = [sw.distribute_tensor(t, mesh, placements) for t in (X, IMAGE, INTS)]
    sw.manual_seed(11)
    return [full(t) for t in program(*tensors)]


@pytest.mark.parametrize("name", BITWISE)
@pytest.mark.parametrize("where", MESHES)
def test_random_ops_are_bitwise_those_of_one_device(where, name):
    expected = on_one_device(BITWISE[name])
    shape, placements = MESHES[where]
    with sw.simulate(6):
        got = on_mesh(BITWISE[name], shape, placements)
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == b.dtype, number
        assert torch.equal(a, b), number


@pytest.mark.parametrize("name", CLOSE)
@pytest.mark.parametrize("where", MESHES)
def test_functions_of_random_numbers_are_close_to_those_of_one_device(where, name):
    expected = on_one_device(CLOSE[name])
    shape, placements = MESHES[where]
    with sw.simulate(6):
        got = on_mesh(CLOSE[name], shape, placements)
    torch.testing.assert_close(got, expected)


def differences():
    wrong = []
    for where, (shape, placements) in MESHES.items():
        if shape == (3,):
            continue
        mesh = (
            mesh_of(shape)
            if shape == (2, 2)
            else sw.DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",))
        )
        for name, program in (BITWISE | CLOSE).items():
            tensors = [sw.distribute_tensor(t, mesh, placements) for t in (X, IMAGE, INTS)]
            if mesh.get_coordinate() is None:
                continue
            sw.manual_seed(11)
            got = [t.full_tensor() if isinstance(t, sw.DTensor) else t for t in program(*tensors)]
            for number, (a, b) in enumerate(zip(got, on_one_device(program), strict=True)):
                same = torch.equal(a, b) if name in BITWISE else torch.allclose(a, b, rtol=1e-5, atol=1e-5)
                if a.dtype != b.dtype or not same:
                    wrong.append((where, name, number))
    return wrong


@pytest.mark.processes
def test_random_ops_on_real_processes_are_those_of_one_device(workers):
    assert workers.run(differences) == [[]] * 4


def test_a_plain_out_is_resized_as_torch_does():
    with sw.one_device():
        assert torch.bernoulli(X.abs(), out=torch.empty(0)).shape == X.shape


def test_only_plain_tensors_created_by_torch_count_as_replicated_inside_one_device():
    with sw.simulate(2), sw.one_device():
        mesh = mesh_of((2,))
        x = sw.distribute_tensor(torch.ones(2, 2, 4, 4), mesh, [Shard(0)])
        assert x[:, [0, 1]].shape == x.shape
        assert F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.1).shape == x.shape
        plain = torch.ones(4)
        with pytest.raises(LayoutError, match="mixed"):
            x + plain


def test_one_device_does_not_change_other_ops():
    a, b = (
        torch.arange(12.0).view(4, 3).sin() + 1j * torch.arange(12.0).view(4, 3).cos() * n for n in (1, 2)
    )
    expected = torch.linalg.lstsq(a, b, driver="gels").residuals
    with sw.one_device():  # a plain dispatch mode would lose the conjugate bit here
        torch.testing.assert_close(torch.linalg.lstsq(a, b, driver="gels").residuals, expected)


@pytest.mark.parametrize(
    ("draw", "message", "collectives"),
    [
        (lambda x: torch.bernoulli(x / 2), "p_in >= 0", 1),
        (torch.poisson, "Poisson rate", 1),
        (lambda x: torch.normal(x, x), "std >= 0", 1),
        (lambda x: torch.multinomial(x, 2), "element < 0", 2),
    ],
    ids=["bernoulli", "poisson", "normal", "multinomial"],
)
def test_value_checks_raise_on_every_rank_and_obey_the_policy(draw, message, collectives):
    values = X.abs() + 0.1
    sw.manual_seed(11)
    with sw.one_device():
        expected = draw(values)
    with sw.simulate(2):
        mesh = mesh_of((2,))
        x = sw.distribute_tensor(values, mesh, [Shard(0)])
        sw.manual_seed(11)
        with counting() as ledger:
            got = draw(x)
        with sw.policy(implicit="error"), counting() as refused, pytest.raises(sw.CommunicationError):
            draw(x)
        assert refused.collectives == 0
        assert [(sent.step, sent.axes) for sent in ledger.entries] == [("all-reduce", ("dp",))] * collectives
        assert torch.equal(full(got), expected)
        values[-1, 3] = -1  # in the block of the last rank
        with pytest.raises(RuntimeError, match=message):
            draw(sw.distribute_tensor(values, mesh, [Shard(0)]))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (torch.poisson, "invalid Poisson rate"),
        (torch._standard_gamma, "positive and finite concentrations"),
        (lambda x: torch.binomial(x, torch.zeros_like(x)), "non-negative integer counts"),
    ],
)
def test_infinite_parameters_are_found_before_any_rank_draws(draw, message):
    values = torch.tensor([1.0, 2.0, 3.0, float("inf")])
    with sw.one_device(), pytest.raises(RuntimeError, match=message):
        draw(values)
    with sw.simulate(2), counting() as ledger:
        x = sw.distribute_tensor(values, mesh_of((2,)), [Shard(0)], src_data_rank=None)
        with pytest.raises(RuntimeError, match=message):
            draw(x)
        assert [sent.step for sent in ledger.entries] == ["all-reduce"]  # all ranks learn of it


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_modules_create_their_initial_state(kind):
    module = kind(7, 3, num_layers=2, dropout=0.5)
    sw.manual_seed(11)
    with sw.one_device():
        expected = module(X[None])[0].detach()
    with sw.simulate(2):
        mesh = mesh_of((2,))
        for key, p in list(module._parameters.items()):
            module._parameters[key] = torch.nn.Parameter(
                sw.distribute_tensor(p.detach(), mesh, [Replicate()])
            )
        module._init_flat_weights()
        sw.manual_seed(11)
        got = module(sw.distribute_tensor(X[None], mesh, [Replicate()]))[0]
        torch.testing.assert_close(full(got.detach()), expected)


KINDS = {
    "normal": (torch.float32, lambda x: x.normal_(1, 2)),
    "normal, wide": (torch.float64, lambda x: x.normal_()),
    "normal, complex": (torch.complex64, lambda x: x.normal_()),
    "uniform": (torch.float32, lambda x: x.uniform_(-1, 3)),
    "uniform, narrow": (torch.bfloat16, lambda x: x.uniform_()),
    "bernoulli": (torch.bool, lambda x: x.bernoulli_(0.3)),
    "integers": (torch.int32, lambda x: x.random_(-7, 100)),
    "exponential": (torch.float32, lambda x: x.exponential_(2)),
}


@given(st.data())
def test_random_numbers_do_not_depend_on_the_layout(data):
    axes = data.draw(strategies.axes(max_count=12))
    layout = data.draw(strategies.layouts(axes, partial=False))
    dtype, draw = KINDS[data.draw(st.sampled_from(sorted(KINDS)))]
    sw.manual_seed(8)
    with sw.one_device():
        expected = draw(torch.empty(layout.shape, dtype=dtype))
    with sw.simulate(axes.count):
        mesh = sw.init_device_mesh("cpu", axes.sizes, mesh_dim_names=axes.names)
        sw.manual_seed(8)
        got = draw(sw.distribute_tensor(torch.zeros(layout.shape, dtype=dtype), mesh, layout.placements))
        assert got.sharding == layout
        for rank, coord in members_of(mesh).items():
            block = expected
            for dim, indices in enumerate(owned(layout, coord)):
                block = block.index_select(dim, torch.tensor(list(indices), dtype=torch.int64))
            assert torch.equal(got.to_local().of_rank(rank), block)


def test_the_default_device_does_not_change_random_numbers():
    def draw():
        sw.manual_seed(5)
        integers = sw.randint(1, 9, (4,), dtype=torch.float32, device="cpu")
        return torch.cat([integers, sw.rand(4, device="cpu"), sw.randn(4, device="cpu")])

    expected = draw()
    last_below.cache_clear()
    with torch.device("meta"):
        assert torch.equal(draw(), expected)
