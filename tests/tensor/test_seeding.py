"""The random stream: seeding, what advances it, saving and restoring its state, and torch's own generator."""

import io
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the usual name)
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import LayoutError, Partial, Replicate, Shard
from shardwise.comm import counting
from shardwise.tensor.seeding import next_draw


@pytest.fixture(autouse=True)
def own_stream():
    with sw.fork_rng(), torch.random.fork_rng():
        yield


@pytest.fixture
def mesh():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def draw(mesh=None):
    return sw.rand(3, 5) if mesh is None else sw.rand(3, 5, device_mesh=mesh, placements=[Shard(0), Shard(1)])


def values(t):
    return t.full_tensor().ranks[0] if isinstance(t, sw.DTensor) else t


def test_a_seed_restarts_the_stream():
    sw.manual_seed(5)
    first = [draw(), draw()]
    sw.manual_seed(5)
    again = [draw(), draw()]
    sw.manual_seed(6)
    other = draw()
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63), 1234567890123])
def test_seeds_have_the_range_of_torchs(seed):
    sw.manual_seed(seed)
    ours = draw()
    torch.manual_seed(seed)
    assert torch.equal(ours, draw())


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_has_64_bits(seed):
    with pytest.raises(ValueError, match="64 bits"):
        sw.manual_seed(seed)


def test_seeding_torch_seeds_the_stream(mesh):
    torch.manual_seed(9)
    first = values(draw(mesh))
    torch.manual_seed(9)  # torch's generator did not advance in between
    assert torch.equal(first, values(draw(mesh)))
    torch.default_generator.manual_seed(10)  # not through torch.manual_seed
    other = values(draw(mesh))
    assert not torch.equal(first, other)
    torch.manual_seed(10)
    assert torch.equal(other, values(draw(mesh)))


def test_torch_random_manual_seed_seeds_the_stream():
    torch.random.manual_seed(12)
    first = draw()
    torch.random.manual_seed(12)
    assert torch.equal(first, draw())


def test_random_ops_do_not_advance_torchs_generator(mesh):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    x = draw(mesh)
    sw.manual_seed(4)
    x.normal_()
    F.dropout(x, 0.5)
    x.uniform_()
    torch.poisson(x)
    torch.multinomial(x, 2)
    torch._standard_gamma(x + 1)
    with sw.one_device():
        nn.Linear(3, 3)
        torch.randperm(5)
        torch._standard_gamma(torch.ones(3))
    assert torch.equal(before, torch.get_rng_state())


def test_torchs_generator_does_not_advance_the_stream():
    sw.manual_seed(1)
    before = sw.get_rng_state()
    torch.rand(3)
    assert torch.equal(before, sw.get_rng_state())


def test_saving_and_restoring_a_state(mesh):
    sw.manual_seed(77)
    draw(mesh)
    file = io.BytesIO()
    torch.save({"rng": sw.get_rng_state()}, file)
    expected = values(draw(mesh))
    sw.manual_seed(1)
    sw.set_rng_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True)["rng"])
    assert torch.equal(expected, values(draw(mesh)))


def test_a_state_of_torchs_generator_is_refused():
    with pytest.raises(ValueError, match="no state of shardwise's stream"):
        sw.set_rng_state(torch.get_rng_state())


def _fail_after_drawing():
    draw()
    sw.rand(3, dtype=torch.int64)


def test_a_fork_restores_the_stream():
    sw.manual_seed(2)
    expected = [draw(), draw()]
    sw.manual_seed(2)
    first = draw()
    with sw.fork_rng():
        sw.manual_seed(8)
        draw()
    with torch.random.fork_rng():
        torch.manual_seed(8)
        draw()
    with pytest.raises(LayoutError), sw.fork_rng():
        _fail_after_drawing()
    assert torch.equal(first, expected[0])
    assert torch.equal(draw(), expected[1])
    with sw.fork_rng(enabled=False):
        advanced = draw()
    assert not torch.equal(draw(), advanced)


def test_random_ops_send_nothing(mesh):
    with counting() as ledger:
        sw.manual_seed(5)
        x = draw(mesh)
        x.normal_()
        x.bernoulli_(0.5)
        F.dropout(x, 0.2)
        F.dropout2d(x[None, ..., None], 0.2)
        torch.randn_like(x)
        nn.init.kaiming_uniform_(x)
        sw.randperm(7, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    assert ledger.collectives == 0


def test_calls_do_not_share_numbers(mesh):
    sw.manual_seed(5)
    seen = [
        values(sw.rand(4, 4, device_mesh=mesh, placements=p)) for p in ([Shard(0)] * 2, [Replicate()] * 2)
    ]
    seen += [values(torch.rand_like(draw(mesh)))[:, :4] for _ in range(3)]
    numbers = torch.cat([t.flatten() for t in seen])
    assert len(numbers.unique()) == len(numbers)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_a_pending_target_takes_the_numbers_of_one_device(mesh, op):
    for fill in (lambda x: x.normal_(), lambda x: x.bernoulli_(0.5), lambda x: x.uniform_(-1, 1)):
        x = sw.DTensor.from_local(sw.per_rank(lambda r: torch.ones(3, 2)), mesh, [Partial(op), Shard(0)])
        sw.manual_seed(6)
        fill(x)
        sw.manual_seed(6)
        with sw.one_device():
            expected = fill(torch.empty(x.shape))
        assert x.placements[0] == Partial(op)
        assert torch.equal(values(x), expected)
    like = torch.rand_like(x)  # a new tensor is replicated
    assert not any(p.is_partial() for p in like.placements)


def test_dropout_of_a_pending_sum(mesh):
    terms = sw.per_rank(lambda r: torch.arange(6.0) * (r // 2 * 2 - 1.0))
    x = sw.DTensor.from_local(terms, mesh, [Partial(), Replicate()])
    sw.manual_seed(4)
    got = F.dropout(x, 0.5)
    sw.manual_seed(4)
    with sw.one_device():
        expected = F.dropout(values(x), 0.5)
    torch.testing.assert_close(values(got), expected)


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_invalid_arguments_raise_torchs_errors(mesh, p):
    x = draw(mesh)
    with pytest.raises(RuntimeError, match=r"p_in|in \[0, 1\]|between 0 and 1"):
        x.bernoulli_(p)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        torch.dropout(x, p, True)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        torch.feature_dropout(x, p, True)
    with pytest.raises(RuntimeError, match="std >= 0"):
        x.normal_(0, -1)
    with pytest.raises(RuntimeError):
        torch.bernoulli(x + 2)
    with pytest.raises(RuntimeError, match=r"not enough|> 0|cannot sample"):
        torch.multinomial(x, 20)
    with pytest.raises((RuntimeError, NotImplementedError)):
        (x > 0).normal_()


def test_an_explicit_generator_is_used_and_advanced(mesh):
    x = draw(mesh)
    before = sw.get_rng_state()
    own = torch.Generator().manual_seed(3)
    first, second = values(x.clone().normal_(generator=own)), values(x.clone().normal_(generator=own))
    own.manual_seed(3)
    assert torch.equal(first, values(x.clone().normal_(generator=own)))
    assert not torch.equal(first, second)
    own.manual_seed(3)
    with sw.one_device():
        assert torch.equal(first, torch.empty(3, 5).normal_(generator=own))
    assert torch.equal(before, sw.get_rng_state())
    own.manual_seed(3)
    a = values(torch.poisson(x * 9, generator=own))
    own.manual_seed(3)
    assert torch.equal(a, values(torch.poisson(x * 9, generator=own)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_draws_the_same_numbers(mesh, reentrant):
    def run(recompute):
        sw.manual_seed(21)
        x = draw(mesh).requires_grad_()

        def block(h):
            return F.dropout(h * 2, 0.5).sin()

        for _ in range(3):
            draw(mesh)
        h = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
        h = checkpoint(block, h, use_reentrant=reentrant) if recompute else block(h)
        after = draw(mesh)
        h.square().sum().backward()
        return values(h.detach()), values(x.grad), values(after), values(draw(mesh))

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_gradients_use_the_mask_of_the_forward_pass(mesh):
    x = (draw(mesh) + 1).requires_grad_()
    y = F.dropout(x, 0.4)
    y.sum().backward()
    mask = values(y.detach()) != 0
    torch.testing.assert_close(values(x.grad), mask / 0.6)
    x.grad = None
    z = F.rrelu(-x, training=True)
    z.sum().backward()
    torch.testing.assert_close(values(x.grad), -values(z.detach() / -x.detach()))


def test_attention_without_dropout_does_not_advance_the_stream(mesh):
    x = sw.distribute_tensor(torch.randn(2, 2, 3, 4), mesh, [Replicate(), Shard(3)])
    before = sw.get_rng_state()
    F.scaled_dot_product_attention(x, x, x)
    assert torch.equal(before, sw.get_rng_state())


def test_a_mesh_may_have_its_own_stream(mesh):
    part = sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    sw.manual_seed(1)
    sw.manual_seed(2, part)
    before = sw.get_rng_state()
    on_part = sw.rand(4, device_mesh=part, placements=[Shard(0)])
    assert torch.equal(before, sw.get_rng_state())
    assert not torch.equal(before, sw.get_rng_state(part))
    sw.manual_seed(2)
    assert torch.equal(values(on_part), sw.rand(4))


def test_random_factories_without_a_mesh_return_plain_tensors():
    sw.manual_seed(1)
    tensors = [sw.rand(2, 3), sw.randn((2, 3), dtype=torch.float64), sw.randint(3, 9, (4,)), sw.randperm(6)]
    assert [type(t) for t in tensors] == [torch.Tensor] * 4
    assert [t.dtype for t in tensors] == [torch.float32, torch.float64, torch.int64, torch.int64]
    assert sw.rand(3, device="meta").device.type == "meta"
    assert sw.rand(3, requires_grad=True).requires_grad
    with pytest.raises(LayoutError, match="rand"):
        sw.rand(3, dtype=torch.int64)
    with pytest.raises(TypeError, match="no size"):
        sw.randint(3)
    with pytest.raises(RuntimeError):
        sw.randint(5, 3, (2,))


@pytest.mark.parametrize("n", [0, 1, 7, 5000])
def test_a_split_permutation(mesh, n):
    sw.manual_seed(1)
    plain = sw.randperm(n)
    sw.manual_seed(1)
    split = sw.randperm(n, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    assert sorted(plain.tolist()) == list(range(n))
    assert torch.equal(values(split), plain)


def test_restoring_the_stream_of_a_mesh_that_has_none(mesh):
    part = sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    with sw.fork_rng():
        sw.manual_seed(2, part)
        saved = sw.get_rng_state(part)
        expected = values(sw.rand(4, device_mesh=part))
    before = sw.get_rng_state()
    sw.set_rng_state(saved, part)
    assert torch.equal(values(sw.rand(4, device_mesh=part)), expected)
    assert torch.equal(before, sw.get_rng_state())


def test_states_of_torchs_generator_can_be_saved():
    file = io.BytesIO()
    torch.save(torch.get_rng_state(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), torch.get_rng_state())


@pytest.mark.parametrize("ours_first", [True, False])
def test_loaded_states_may_be_set_in_any_order(ours_first):
    torch.manual_seed(123)
    draw()
    theirs, ours = torch.get_rng_state().clone(), sw.get_rng_state()
    expected = draw()
    torch.manual_seed(999)
    if ours_first:
        sw.set_rng_state(ours)
    torch.set_rng_state(theirs)
    if not ours_first:
        sw.set_rng_state(ours)
    assert torch.equal(draw(), expected)


def test_torch_may_be_seeded_before_the_import():
    code = (
        "import torch; torch.manual_seed(5); import shardwise\n"
        "from shardwise.random.stream import stream_of\n"
        "print(stream_of().seed, stream_of().from_torch)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["5", "True"]


def test_importing_again_patches_nothing_twice():
    code = (
        "import importlib, torch, shardwise.tensor\n"
        "mine = torch.get_rng_state, torch.nn.init.sparse_\n"
        "importlib.reload(shardwise.tensor)\n"
        "print(mine == (torch.get_rng_state, torch.nn.init.sparse_))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["True"]


def test_torch_may_be_seeded_inside_a_fork():
    for seed in (torch.manual_seed, torch.default_generator.manual_seed, sw.manual_seed):
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(21)  # takes effect at the next draw
            with sw.fork_rng():
                seed(22)
                sw.rand(1)
            forked = sw.rand(3)
            torch.manual_seed(21)
            assert torch.equal(forked, sw.rand(3)), seed


def test_reading_the_state_while_another_thread_forks_is_safe():
    interval, done, errors = sys.getswitchinterval(), threading.Event(), []

    def read():
        try:
            for _ in range(5000):
                sw.get_rng_state()
        except Exception as error:
            errors.append(error)
        done.set()

    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=read)
        thread.start()
        while not done.is_set():
            with sw.fork_rng():
                pass
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_concurrent_draws_have_different_positions():
    def take():
        positions.extend([next_draw().position for _ in range(5000)])

    positions, interval = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(set(positions)) == len(positions) == 20000


def seed_differently(rank_of):
    """Random numbers on ranks with different torch seeds, and the number of collectives."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(100 + rank_of())
    with counting() as ledger:
        first = sw.rand(3, device_mesh=mesh, placements=[Replicate(), Replicate()]).to_local().tolist()
        sent = ledger.collectives
        second = torch.rand_like(sw.zeros(3, device_mesh=mesh)).to_local().tolist()
        again = ledger.collectives
    torch.manual_seed(100 + rank_of())
    state = sw.get_rng_state()  # before a seed was broadcast
    sw.set_rng_state(state)
    restored = sw.rand(3, device_mesh=mesh).to_local().tolist()
    sw.manual_seed(100)
    with counting() as ledger:
        ours = sw.rand(3, device_mesh=mesh).to_local().tolist()
        none = ledger.collectives
    return first, second, first == ours, restored == ours, sent, again, none


@pytest.mark.processes
def test_ranks_with_different_torch_seeds_use_that_of_the_first(workers):
    seen = workers.run(seed_differently, torch.distributed.get_rank)
    assert seen == [seen[0]] * 4
    assert seen[0][2:] == (True, True, 2, 2, 0)


def unseeded():
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return torch.rand_like(sw.zeros(3, device_mesh=mesh)).to_local().tolist()


@pytest.mark.processes
def test_ranks_of_a_program_without_a_seed_draw_the_same():
    first, second = sw.launch(unseeded, 2)  # new processes, which torch seeds at random
    assert first == second


def off_the_mesh():
    """Run random ops on a mesh of two ranks, then draw on all ranks."""
    part = sw.DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",))
    every = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    sw.manual_seed(5)
    x = sw.rand(4, device_mesh=part, placements=[Shard(0)])
    x.normal_()
    torch.randn_like(x)
    probabilities = x.sigmoid()
    (
        torch.bernoulli(probabilities),
        torch.poisson(probabilities),
        torch.normal(x, probabilities),
        torch._standard_gamma(probabilities),
    )
    (
        torch.binomial(torch.ones_like(x), probabilities),
        torch.multinomial(probabilities, 2),
        x.bernoulli_(probabilities),
    )
    torch.rand(4, out=x)
    with torch.inference_mode():
        F.dropout(x, 0.5), F.dropout(x, 0.5, training=False)
    return sw.rand(3, device_mesh=every).to_local().tolist()


@pytest.mark.processes
def test_ranks_off_the_mesh_advance_the_stream_too(workers):
    seen = workers.run(off_the_mesh)
    assert seen == [seen[0]] * 4


def seed_off_the_mesh(rank_of):
    part = sw.DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",))
    with sw.fork_rng():  # other tests use these processes, and this mesh without its own stream
        try:
            sw.manual_seed(5, part)
        except RuntimeError as error:
            return str(error)
    return rank_of()


@pytest.mark.processes
def test_seeding_a_mesh_from_a_rank_off_it_is_an_error(workers):
    seen = workers.run(seed_off_the_mesh, torch.distributed.get_rank)
    assert seen[:2] == [0, 1]
    assert all("requires the current rank to be a part of the device mesh" in text for text in seen[2:])


def compile_dropout():
    """Whether a compiled program with dropout has the losses and gradients of the eager one, call by call."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = sw.distribute_tensor(torch.ones(6, 4), mesh, [Shard(0), Shard(1)]).requires_grad_()

    def program(x):
        return (F.dropout(x * 2, 0.5) + 1).sum()

    def seen(run):
        sw.manual_seed(4)
        out = []
        for _ in range(3):
            loss = run(x)
            (grad,) = torch.autograd.grad(loss, x)
            out.append((float(loss.detach().full_tensor()), grad.full_tensor().tolist()))
        return out

    plain = seen(program)
    return seen(torch.compile(program, backend="aot_eager")) == plain and plain[0] != plain[1]


@pytest.mark.processes
def test_compiled_programs_draw_the_same(workers):
    assert workers.run(compile_dropout) == [True] * 4


@pytest.mark.parametrize("draw", [torch.rand_like, torch.nn.init.normal_, lambda t: t.bernoulli_(0.5)])
def test_meta_tensors_draw_nothing(draw):
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        sw.manual_seed(5)
        before = sw.get_rng_state()
        with sw.one_device():
            draw(torch.empty(4, device="meta"))
            torch.rand(3, device="meta")
        draw(sw.DTensor.from_local(torch.empty(4, device="meta"), mesh, [sw.Replicate()]))
        assert torch.equal(sw.get_rng_state(), before)
