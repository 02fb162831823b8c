"""The stream: who seeds it, what moves it, how it is kept and brought back, and whom it leaves alone."""

import io
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everyone calls it)
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


def drawn(mesh=None):
    return sw.rand(3, 5) if mesh is None else sw.rand(3, 5, device_mesh=mesh, placements=[Shard(0), Shard(1)])


def values(t):
    return t.full_tensor().ranks[0] if isinstance(t, sw.DTensor) else t


def test_a_seed_begins_the_stream_again():
    sw.manual_seed(5)
    first = [drawn(), drawn()]
    sw.manual_seed(5)
    again = [drawn(), drawn()]
    sw.manual_seed(6)
    other = drawn()
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63), 1234567890123])
def test_seeds_are_those_of_torch(seed):
    sw.manual_seed(seed)
    ours = drawn()
    torch.manual_seed(seed)
    assert torch.equal(ours, drawn())


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_has_64_bits(seed):
    with pytest.raises(ValueError, match="64 bits"):
        sw.manual_seed(seed)


def test_torchs_seed_is_ours_too_each_time_it_is_set(mesh):
    torch.manual_seed(9)
    first = values(drawn(mesh))
    torch.manual_seed(9)  # nothing of torch's own was drawn in between
    assert torch.equal(first, values(drawn(mesh)))
    torch.default_generator.manual_seed(10)  # not by the function
    other = values(drawn(mesh))
    assert not torch.equal(first, other)
    torch.manual_seed(10)
    assert torch.equal(other, values(drawn(mesh)))


def test_whoever_held_manual_seed_before_seeds_too():
    held = torch.random.manual_seed
    held(12)
    first = drawn()
    held(12)
    assert torch.equal(first, drawn())


def test_torchs_generator_is_left_alone(mesh):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    x = drawn(mesh)
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


def test_ours_is_left_alone_by_torchs():
    sw.manual_seed(1)
    before = sw.get_rng_state()
    torch.rand(3)
    assert torch.equal(before, sw.get_rng_state())


def test_a_state_is_kept_and_brought_back(mesh):
    sw.manual_seed(77)
    drawn(mesh)
    file = io.BytesIO()
    torch.save({"rng": sw.get_rng_state()}, file)
    expected = values(drawn(mesh))
    sw.manual_seed(1)
    sw.set_rng_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True)["rng"])
    assert torch.equal(expected, values(drawn(mesh)))


def test_another_state_is_refused():
    with pytest.raises(ValueError, match="no state of shardwise's stream"):
        sw.set_rng_state(torch.get_rng_state())


def _fail_after_drawing():
    drawn()
    sw.rand(3, dtype=torch.int64)


def test_a_fork_leaves_the_stream_where_it_was():
    sw.manual_seed(2)
    expected = [drawn(), drawn()]
    sw.manual_seed(2)
    first = drawn()
    with sw.fork_rng():
        sw.manual_seed(8)
        drawn()
    with torch.random.fork_rng():
        torch.manual_seed(8)
        drawn()
    with pytest.raises(LayoutError), sw.fork_rng():
        _fail_after_drawing()
    assert torch.equal(first, expected[0])
    assert torch.equal(drawn(), expected[1])
    with sw.fork_rng(enabled=False):
        moved = drawn()
    assert not torch.equal(drawn(), moved)


def test_nothing_is_sent(mesh):
    with counting() as ledger:
        sw.manual_seed(5)
        x = drawn(mesh)
        x.normal_()
        x.bernoulli_(0.5)
        F.dropout(x, 0.2)
        F.dropout2d(x[None, ..., None], 0.2)
        torch.randn_like(x)
        nn.init.kaiming_uniform_(x)
        sw.randperm(7, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    assert ledger.collectives == 0


def test_every_call_has_numbers_of_its_own(mesh):
    sw.manual_seed(5)
    seen = [
        values(sw.rand(4, 4, device_mesh=mesh, placements=p)) for p in ([Shard(0)] * 2, [Replicate()] * 2)
    ]
    seen += [values(torch.rand_like(drawn(mesh)))[:, :4] for _ in range(3)]
    numbers = torch.cat([t.flatten() for t in seen])
    assert len(numbers.unique()) == len(numbers)


def test_a_pending_target_is_an_error(mesh):
    x = sw.DTensor.from_local(sw.per_rank(lambda r: torch.ones(2)), mesh, [Partial(), Replicate()])
    for fill in (lambda: x.normal_(), lambda: x.bernoulli_(0.5), lambda: x.random_()):
        with pytest.raises(LayoutError, match="cannot fill"):
            fill()
    like = torch.rand_like(x)  # a new one is whole
    assert not any(p.is_partial() for p in like.placements)


def test_dropout_of_what_is_pending_stays_pending(mesh):
    parts = sw.per_rank(lambda r: torch.arange(6.0) * (r // 2 * 2 - 1.0))
    x = sw.DTensor.from_local(parts, mesh, [Partial(), Replicate()])
    sw.manual_seed(4)
    got = F.dropout(x, 0.5)
    sw.manual_seed(4)
    with sw.one_device():
        expected = F.dropout(values(x), 0.5)
    torch.testing.assert_close(values(got), expected)


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_torchs_errors(mesh, p):
    x = drawn(mesh)
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


def test_a_generator_of_ones_own_is_torch_seed_and_moves(mesh):
    x = drawn(mesh)
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
def test_a_recomputation_draws_the_same(mesh, reentrant):
    def run(again):
        sw.manual_seed(21)
        x = drawn(mesh).requires_grad_()

        def block(h):
            return F.dropout(h * 2, 0.5).sin()

        for _ in range(3):
            drawn(mesh)
        h = checkpoint(block, x, use_reentrant=reentrant) if again else block(x)
        h = checkpoint(block, h, use_reentrant=reentrant) if again else block(h)
        after = drawn(mesh)
        h.square().sum().backward()
        return values(h.detach()), values(x.grad), values(after), values(drawn(mesh))

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_gradients_are_those_of_the_mask(mesh):
    x = (drawn(mesh) + 1).requires_grad_()
    y = F.dropout(x, 0.4)
    y.sum().backward()
    mask = values(y.detach()) != 0
    torch.testing.assert_close(values(x.grad), mask / 0.6)
    x.grad = None
    z = F.rrelu(-x, training=True)
    z.sum().backward()
    torch.testing.assert_close(values(x.grad), -values(z.detach() / -x.detach()))


def test_attention_without_dropout_moves_nothing(mesh):
    x = sw.distribute_tensor(torch.randn(2, 2, 3, 4), mesh, [Replicate(), Shard(3)])
    before = sw.get_rng_state()
    F.scaled_dot_product_attention(x, x, x)
    assert torch.equal(before, sw.get_rng_state())


def test_a_mesh_may_have_a_stream_of_its_own(mesh):
    part = sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    sw.manual_seed(1)
    sw.manual_seed(2, part)
    before = sw.get_rng_state()
    on_part = sw.rand(4, device_mesh=part, placements=[Shard(0)])
    assert torch.equal(before, sw.get_rng_state())
    assert not torch.equal(before, sw.get_rng_state(part))
    sw.manual_seed(2)
    assert torch.equal(values(on_part), sw.rand(4))


def test_random_tensors_of_no_mesh_are_plain():
    sw.manual_seed(1)
    made = [sw.rand(2, 3), sw.randn((2, 3), dtype=torch.float64), sw.randint(3, 9, (4,)), sw.randperm(6)]
    assert [type(t) for t in made] == [torch.Tensor] * 4
    assert [t.dtype for t in made] == [torch.float32, torch.float64, torch.int64, torch.int64]
    assert sw.rand(3, device="meta").device.type == "meta"
    assert sw.rand(3, requires_grad=True).requires_grad
    with pytest.raises(LayoutError, match="rand"):
        sw.rand(3, dtype=torch.int64)
    with pytest.raises(TypeError, match="no size"):
        sw.randint(3)
    with pytest.raises(RuntimeError):
        sw.randint(5, 3, (2,))


@pytest.mark.parametrize("n", [0, 1, 7, 5000])
def test_a_permutation_in_blocks(mesh, n):
    sw.manual_seed(1)
    alone = sw.randperm(n)
    sw.manual_seed(1)
    split = sw.randperm(n, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    assert sorted(alone.tolist()) == list(range(n))
    assert torch.equal(values(split), alone)


def test_a_mesh_goes_on_alone_in_a_process_in_which_it_had_no_stream(mesh):
    part = sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    with sw.fork_rng():
        sw.manual_seed(2, part)
        saved = sw.get_rng_state(part)
        expected = values(sw.rand(4, device_mesh=part))
    before = sw.get_rng_state()
    sw.set_rng_state(saved, part)
    assert torch.equal(values(sw.rand(4, device_mesh=part)), expected)
    assert torch.equal(before, sw.get_rng_state())


def test_a_state_of_torchs_is_saved_as_without_us():
    file = io.BytesIO()
    torch.save(torch.get_rng_state(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), torch.get_rng_state())


@pytest.mark.parametrize("ours_first", [True, False])
def test_states_from_a_file_are_set_in_any_order(ours_first):
    torch.manual_seed(123)
    drawn()
    theirs, ours = torch.get_rng_state().clone(), sw.get_rng_state()
    expected = drawn()
    torch.manual_seed(999)
    if ours_first:
        sw.set_rng_state(ours)
    torch.set_rng_state(theirs)
    if not ours_first:
        sw.set_rng_state(ours)
    assert torch.equal(drawn(), expected)


def test_torch_may_be_seeded_before_we_are_imported():
    code = (
        "import torch; torch.manual_seed(5); import shardwise\n"
        "from shardwise.random.stream import stream_of\n"
        "print(stream_of().seed, stream_of().from_torch)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["5", "True"]


def test_another_import_wraps_nothing_again():
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
            torch.default_generator.manual_seed(21)  # torch_seed when something is next drawn
            with sw.fork_rng():
                seed(22)
                sw.rand(1)
            forked = sw.rand(3)
            torch.manual_seed(21)
            assert torch.equal(forked, sw.rand(3)), seed


def test_a_thread_may_draw_while_another_brings_back_a_state():
    often, done, wrong = sys.getswitchinterval(), threading.Event(), []

    def draw():
        try:
            for _ in range(5000):
                sw.get_rng_state()
        except KeyError as error:
            wrong.append(error)
        done.set()

    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=draw)
        thread.start()
        while not done.is_set():
            with sw.fork_rng():
                pass
        thread.join()
    finally:
        sys.setswitchinterval(often)
    assert not wrong


def test_threads_that_draw_at_once_have_places_of_their_own():
    def draw():
        places.extend([next_draw().position for _ in range(5000)])

    places, often = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=draw) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(often)
    assert len(set(places)) == len(places) == 20000


def seeded_apart(rank_of):
    """Processes whose torch seeds differ, or agree: what they draw together, and what was sent for it."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(100 + rank_of())
    with counting() as ledger:
        first = sw.rand(3, device_mesh=mesh, placements=[Replicate(), Replicate()]).to_local().tolist()
        sent = ledger.collectives
        second = torch.rand_like(sw.zeros(3, device_mesh=mesh)).to_local().tolist()
        again = ledger.collectives
    torch.manual_seed(100 + rank_of())
    state = sw.get_rng_state()  # before anyone has met
    sw.set_rng_state(state)
    kept = sw.rand(3, device_mesh=mesh).to_local().tolist()
    sw.manual_seed(100)
    with counting() as ledger:
        ours = sw.rand(3, device_mesh=mesh).to_local().tolist()
        none = ledger.collectives
    return first, second, first == ours, kept == ours, sent, again, none


@pytest.mark.processes
def test_processes_whose_torch_seeds_differ_agree_on_the_first_ones(workers):
    seen = workers.run(seeded_apart, torch.distributed.get_rank)
    assert seen == [seen[0]] * 4
    assert seen[0][2:] == (True, True, 2, 2, 0)


def unseeded():
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return torch.rand_like(sw.zeros(3, device_mesh=mesh)).to_local().tolist()


@pytest.mark.processes
def test_a_program_that_seeds_nothing_draws_alike_on_all_ranks():
    first, second = sw.launch(unseeded, 2)  # new processes, which torch seeds as it likes
    assert first == second


def off_the_mesh():
    """Ranks off a mesh pass the op too, and then draw with the others what the others draw."""
    part = sw.DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",))
    every = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    sw.manual_seed(5)
    x = sw.rand(4, device_mesh=part, placements=[Shard(0)])
    x.normal_()
    torch.randn_like(x)
    chances = x.sigmoid()
    torch.bernoulli(chances), torch.poisson(chances), torch.normal(x, chances), torch._standard_gamma(chances)
    torch.binomial(torch.ones_like(x), chances), torch.multinomial(chances, 2), x.bernoulli_(chances)
    torch.rand(4, out=x)
    with torch.inference_mode():
        F.dropout(x, 0.5), F.dropout(x, 0.5, training=False)
    return sw.rand(3, device_mesh=every).to_local().tolist()


@pytest.mark.processes
def test_ranks_off_the_mesh_stay_in_step(workers):
    seen = workers.run(off_the_mesh)
    assert seen == [seen[0]] * 4


def seed_off_the_mesh(rank_of):
    part = sw.DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",))
    with sw.fork_rng():  # the processes serve other tests too, in which this mesh has no stream of its own
        try:
            sw.manual_seed(5, part)
        except RuntimeError as error:
            return str(error)
    return rank_of()


@pytest.mark.processes
def test_a_seed_for_a_mesh_is_given_on_it(workers):
    seen = workers.run(seed_off_the_mesh, torch.distributed.get_rank)
    assert seen[:2] == [0, 1]
    assert all("requires the current rank to be a part of the device mesh" in text for text in seen[2:])


def compiled():
    """A compiled program draws what it draws uncompiled, call by call, and its gradients are those of its masks."""
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
    assert workers.run(compiled) == [True] * 4
