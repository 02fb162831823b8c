"""policy(): implicit communication is refused before anything is sent, and plain tensors are treated as specified."""

import warnings

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.call.trace import trace_calls
from shardwise.comm import counting

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


@pytest.fixture
def mesh():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def put(mesh, t, placement=S0, grad=False):
    return sw.distribute_tensor(t, mesh, [placement]).requires_grad_(grad)


def pending(mesh, *shape):
    return sw.DTensor.from_local(
        sw.per_rank(lambda rank: torch.full(shape, 1.0 + rank)), mesh, [sw.Partial()]
    )


def adam(mesh, fused):
    p = nn.Parameter(put(mesh, torch.randn(8, 4)))
    p.grad = pending(mesh, 8, 4)
    torch.optim.Adam([p], fused=fused, foreach=False).step()


def write_to_moved_view(mesh):
    put(mesh, torch.randn(8, 4))[2:7].zero_()


def stale_view(mesh):
    x = put(mesh, torch.randn(8, 4))
    with sw.policy(implicit="allow"):
        v = x[2:7]
    x.add_(1)
    return v + 1


def prod_gradient(mesh):
    x = put(mesh, torch.randn(8, 4), grad=True)
    with sw.policy(implicit="allow"):
        y = x.prod().redistribute(placements=[R])
    y.backward()


COMMUNICATES = {
    "topk": lambda m: put(m, torch.randn(2, 800), S1).topk(3, 1),
    "multinomial": lambda m: put(m, torch.rand(2, 8), S1).multinomial(3),
    "fused adam with pending gradients": lambda m: adam(m, fused=True),
    "adam with pending gradients": lambda m: adam(m, fused=False),
    "bernoulli_ by probabilities in another layout": lambda m: put(m, torch.empty(8, 4)).bernoulli_(
        put(m, torch.rand(8, 4), S1)
    ),
    "sort": lambda m: put(m, torch.randn(8, 4)).sort(0),
    "fallback": lambda m: put(m, torch.randn(8, 4)).histc(3),
    "softmax by statistics": lambda m: put(m, torch.randn(2, 80000), S1).softmax(1),
    "convolution with halos": lambda m: torch.conv2d(
        put(m, torch.randn(1, 2, 64, 4), sw.Shard(2)), put(m, torch.randn(2, 2, 3, 3), R), padding=1
    ),
    "cat": lambda m: torch.cat([put(m, torch.randn(8, 4)), put(m, torch.randn(6, 4))]),
    "a write to a view that had to move": write_to_moved_view,
    "a read of a view whose base was written to": stale_view,
    "the gradient of prod": prod_gradient,
    "tensor_split by distributed indices": lambda m: torch.tensor_split(
        put(m, torch.randn(8, 4), S1), put(m, torch.tensor([2, 3, 4, 5]))
    ),
    "sizes of a sparse tensor": lambda m: torch.sparse_coo_tensor(
        put(m, torch.tensor([[0, 1, 2, 3]]), S1), put(m, torch.ones(4), R)
    ),
    "foreach": lambda m: torch._foreach_add([put(m, torch.randn(8, 4))], [put(m, torch.randn(8, 4), S1)]),
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(_with_grad(m), 1.0),
}


def _with_grad(mesh):
    p = nn.Parameter(put(mesh, torch.randn(8, 4)))
    p.grad = put(mesh, torch.randn(8, 4))
    return [p]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", COMMUNICATES)
def test_implicit_communication_is_refused_before_it_is_sent(mesh, name):
    sw.manual_seed(0)
    with counting() as ledger:
        COMMUNICATES[name](mesh)
    steps = [e.step for e in ledger.entries if e.step not in ("scatter", "broadcast")]
    assert steps, "it sends nothing"
    with counting() as ledger, sw.policy(implicit="error"), pytest.raises(sw.CommunicationError):
        COMMUNICATES[name](mesh)
    allowed = {"scatter", "broadcast"} | ({"exchange", "all-reduce"} if name in INSIDE_ALLOW else set())
    assert {e.step for e in ledger.entries} <= allowed


INSIDE_ALLOW = ("a read of a view whose base was written to", "the gradient of prod")


@pytest.mark.parametrize("name", COMMUNICATES)
def test_implicit_communication_warns(mesh, name):
    sw.manual_seed(0)
    with (
        sw.policy(implicit="warn"),
        pytest.warns(UserWarning, match=r"Implicit redistribution: .* would communicate"),
    ):
        COMMUNICATES[name](mesh)


REQUESTS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).all()),
    "equal": lambda x: torch.equal(x, x + 1),
    "equal in another layout": lambda x: torch.equal(
        x, sw.distribute_tensor(torch.ones(8, 4), x.device_mesh, [S1])
    ),
    "full_tensor": lambda x: x.full_tensor(),
    "redistribute": lambda x: x.redistribute(tp=R),
    "redistribute, backward": lambda x: x.requires_grad_().redistribute(tp=R).sum().backward(),
    "allclose": lambda x: torch.allclose(x, x),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_explicit_communication_is_neither_refused_nor_logged(mesh, name, caplog):
    for how in ("error", "warn"):
        x, routes = put(mesh, torch.randn(8, 4)), []
        with warnings.catch_warnings(), sw.policy(implicit=how), counting() as ledger:
            warnings.simplefilter("error")
            with trace_calls(lambda call, routes=routes: routes.append(call.route)):
                REQUESTS[name](x)
        assert ledger.collectives
        assert "fallback" not in routes
    assert not caplog.records


def test_equal_sends_one_number(mesh):
    x, y = put(mesh, torch.ones(8, 4)), put(mesh, torch.ones(8, 4))
    with counting() as ledger:
        assert torch.equal(x, y)
    y[0] = 3
    assert ledger.collectives == 1
    assert ledger.bytes == 2 * 3 * 4  # a ring of four ranks, four bytes
    assert not torch.equal(x, y)


@pytest.mark.parametrize("placement", [S0, S1, R, sw.Partial(), sw.Partial("max")])
@pytest.mark.parametrize("change", [None, 0, 31])
def test_equal_gives_the_dense_answer(mesh, placement, change):
    t = torch.arange(32.0).view(8, 4)
    u = t.clone()
    if change is not None:
        u.view(-1)[change] = -1
    x, y = sw.distribute_tensor(t, mesh, [placement]), put(mesh, u, S0)
    assert torch.equal(x, y) is torch.equal(t, u)
    assert not torch.equal(x, put(mesh, torch.zeros(4, 8)))


def test_policies_nest_and_keep_the_settings_that_are_not_given(mesh):
    x = put(mesh, torch.randn(8, 4))
    plain = torch.ones(8, 4)
    with sw.policy(implicit="error"):
        with sw.policy(plain="replicate"):
            x + plain
            with pytest.raises(sw.CommunicationError):
                x.cumsum(0)
            with sw.policy(implicit="allow"):
                x.cumsum(0) + plain
            with pytest.raises(sw.CommunicationError):
                x.cumsum(0)
        with pytest.raises(sw.PlainTensorError):
            x + plain
    x.cumsum(0)


@pytest.mark.parametrize("wrong", [{"implicit": "never"}, {"plain": "yes"}, {"implicit": True}])
def test_an_unknown_policy_is_an_error(wrong):
    with (
        pytest.raises(ValueError, match=r"(?s)policy\(\) got .*why: .* is one of .*fix: "),
        sw.policy(**wrong),
    ):
        pass


def test_a_plain_tensor_is_refused_whether_it_is_a_variable_a_temporary_or_a_view(mesh):
    x = put(mesh, torch.randn(8, 4))
    variable = torch.ones(8, 4)
    for make in (
        lambda: variable,
        lambda: torch.ones(8, 4),
        lambda: variable.clone(),
        lambda: torch.ones(4, 8).t(),
        lambda: variable[:],
    ):
        with pytest.raises(sw.PlainTensorError, match="got mixed torch"):
            x + make()
        with pytest.raises(sw.PlainTensorError):
            make() @ x.t()
    assert (x + torch.tensor([[2.0]])).shape == x.shape  # one element counts as replicated
    assert (x * torch.tensor(2.0)).shape == x.shape


def test_plain_tensors_that_torch_creates_itself_count_as_replicated(mesh):
    x = put(mesh, torch.randn(8, 4))
    for call in (
        lambda t: t[[0, 3]],
        lambda t: t[[True, False] * 4],
        lambda t: t[:, [1, 2]],
        lambda t: t.quantile(0.3, 0),
        lambda t: torch.nn.functional.scaled_dot_product_attention(t[None], t[None], t[None], is_causal=True),
        lambda t: torch.combinations(t[:, 0]),
        lambda t: torch.masked.mean(t, 0),
        lambda t: torch.masked.var(t, 0, unbiased=False),
    ):
        dense = call(x.full_tensor().ranks[0])
        torch.testing.assert_close(call(x).full_tensor().ranks[0], dense)
    y = x.clone()
    y[[0, 3]] = 5.0
    assert y.full_tensor().ranks[0][3].tolist() == [5.0] * 4
    for call in (
        lambda t: t[torch.tensor([0, 3])],
        lambda t: t.quantile(torch.tensor([0.1, 0.2]), 0),
        lambda t: torch.nn.functional.scaled_dot_product_attention(t[None], t[None], torch.ones(1, 8, 4)),
    ):
        with pytest.raises(sw.PlainTensorError):
            call(x)


def check_plain(difference):
    """The result or error of policy(plain="check") with a plain tensor that differs by `difference` between ranks."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(torch.ones(8, 4), mesh, [S0])
    plain = torch.ones(8, 4) + difference * mesh.get_rank()
    with sw.policy(plain="check"), counting() as ledger:
        try:
            return (x + plain).full_tensor().tolist(), ledger.collectives
        except sw.PlainTensorError as error:
            return str(error)


def test_policy_check_compares_plain_tensors_between_ranks(workers):
    assert workers.run(check_plain, 0.0) == [([[2.0] * 4] * 8, 2)] * 4
    errors = workers.run(check_plain, 1.0)
    assert len(set(errors)) == 1
    assert "differs between ranks: at (tp=1), (tp=2), (tp=3)" in errors[0]


def run_lstm():
    """Whether the result is dense, the number of comparisons between ranks, and whether the policy refuses these."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(
        torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1)), mesh, [sw.Shard(1)]
    )
    lstm = nn.LSTM(4, 4, batch_first=True)
    torch.manual_seed(0)
    for p in lstm.parameters():
        nn.init.uniform_(p)
    want = lstm(x.full_tensor())[0].detach()
    for name, p in list(lstm.named_parameters()):
        setattr(lstm, name, nn.Parameter(sw.distribute_tensor(p.detach(), mesh)))
    with counting() as ledger:
        got = lstm(x)[0].full_tensor()
    refused = False
    with sw.policy(implicit="error"):
        try:
            lstm(x)
        except sw.CommunicationError as error:
            refused = "compared between ranks" in str(error)
    return torch.allclose(got, want), [e.step for e in ledger.entries].count("compare blocks"), refused


def test_operands_that_torch_creates_are_compared_between_ranks(workers):
    assert workers.run(run_lstm) == [(True, 2, True)] * 4


def draw_after_seeding():
    """Whether the broadcast of a seed after torch.manual_seed is refused; sw.manual_seed sends nothing."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = sw.empty(8, 4, device_mesh=mesh, placements=[S0])
    torch.manual_seed(3)
    refused = ""
    with sw.policy(implicit="error"):
        try:
            x.normal_()
        except sw.CommunicationError as error:
            refused = str(error)
        sw.manual_seed(3)
        x.normal_()
    return "shardwise.manual_seed" in refused


def test_the_broadcast_of_a_seed_is_implicit_communication(workers):
    assert workers.run(draw_after_seeding) == [True] * 4


def test_strict_also_refuses_moves_that_send_nothing(mesh):
    x, y = put(mesh, torch.arange(8.0).view(8, 1)), put(mesh, torch.ones(8, 1), R)
    with counting() as sent, sw.policy(implicit="error"):
        assert (x + y).placements == (S0,)  # y is sliced
    assert not sent.entries
    with sw.policy(implicit="strict"):
        with pytest.raises(sw.CommunicationError, match="would move an operand"):
            x + y
        assert (x + y.redistribute(placements=[S0])).placements == (S0,)
        with pytest.raises(sw.CommunicationError, match="would communicate"):
            x.cumsum(0)
