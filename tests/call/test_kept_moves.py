"""An operand that several ops need in the same other layout is moved once, and no write to it is missed."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.call import kept_moves
from shardwise.comm import counting

linear = torch.nn.functional.linear
SEQUENCE, HIDDEN, OUT = (
    10,
    8,
    48,
)  # ten positions on four ranks: blocks of 3, 3, 3 and 1; weights cost more to gather


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def mesh():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def steps(ledger):
    return [e.step for e in ledger.entries]


def weights(mesh, *, grad=True):
    full = [values(OUT, HIDDEN, seed=i) for i in (1, 2, 3)]
    return full, [sw.distribute_tensor(w, mesh, [Shard(0)]).requires_grad_(grad) for w in full]


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("shape", [(2, SEQUENCE, HIDDEN), (SEQUENCE, HIDDEN)])
@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values_gather_their_input_once(mesh, is_leaf, shape, bias):
    full, split = weights(mesh)
    x = values(*shape)
    added = values(OUT, seed=9) if bias else None

    def qkv(h, weights, b):
        h = h if is_leaf else h.sin()
        return [linear(h, w, b) for w in weights]

    dense_x, dense_w = x.clone().requires_grad_(), [w.clone().requires_grad_() for w in full]
    want = qkv(dense_x, dense_w, added)
    (want[0] * want[1] * want[2]).sum().backward()
    h = sw.distribute_tensor(x, mesh, [Shard(len(shape) - 2)]).requires_grad_()
    b = None if added is None else sw.distribute_tensor(added, mesh, [Shard(0)])
    with counting() as ledger:
        q, k, v = qkv(h, split, b)
    assert steps(ledger) == ["all-gather"]
    with counting() as ledger:
        (q * k * v).sum().backward()
    # the pending gradients are added before they are reduced
    assert steps(ledger).count("reduce-scatter") == (0 if is_leaf else 1)
    assert "all-reduce" not in steps(ledger)
    for got, expected in zip(
        [q, k, v, h.grad, *(w.grad for w in split)],
        [*want, dense_x.grad, *(w.grad for w in dense_w)],
        strict=True,
    ):
        torch.testing.assert_close(got.full_tensor().ranks[3], expected.detach())


def test_without_gradients_too(mesh):
    _, split = weights(mesh, grad=False)
    x = sw.distribute_tensor(values(2, SEQUENCE, HIDDEN), mesh, [Shard(1)])
    with torch.no_grad(), counting() as ledger:
        for w in split:
            linear(x, w)
    assert steps(ledger) == ["all-gather"]


def test_a_pending_sum_is_reduced_once(mesh):
    x = sw.distribute_tensor(values(6, 6), mesh, [Shard(1)]) @ sw.distribute_tensor(
        values(6, 6), mesh, [Shard(0)]
    )
    with counting() as ledger:
        x.relu(), x.exp(), x.softmax(-1)
    assert steps(ledger) == ["all-reduce"]


def test_a_weight_that_is_gathered_between_does_not_displace_the_input(mesh):
    _, split = weights(mesh)
    x = sw.distribute_tensor(values(SEQUENCE, HIDDEN), mesh, [Shard(0)])
    other = sw.distribute_tensor(values(HIDDEN, 2), mesh, [Shard(1)])
    with counting() as ledger:
        for w in split:
            linear(x, w)
            other.cumsum(1)
    assert steps(ledger) == ["all-gather"] * 2


WRITES = {
    "in place": lambda x: x.add_(1),
    "to a view": lambda x: x.view(-1).mul_(2),
    "to a row": lambda x: x[2].zero_(),
    "to a column": lambda x: x[:, 1].fill_(3),
    "through detach": lambda x: x.detach().add_(1),
    "through data": lambda x: x.data.add_(1),
    "copy": lambda x: x.copy_(x * 3),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "out": lambda x: torch.mul(x, 2, out=x),
    "assigned data": lambda x: setattr(x, "data", x * 5),
    "index": lambda x: x.__setitem__(3, 7.0),
    "set by mask": lambda x: x.masked_fill_(x > 0, 0.5),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("through_view", [False, True])
def test_a_write_is_seen_by_the_next_op(mesh, write, through_view):
    full, split = weights(mesh, grad=False)
    dense = values(SEQUENCE, HIDDEN)
    x = sw.distribute_tensor(dense, mesh, [Shard(0)])
    dense = dense.clone()

    def use(t, w):
        return linear(t.view(SEQUENCE, 1, HIDDEN) if through_view else t, w)

    use(x, split[0])
    WRITES[write](dense)
    WRITES[write](x)
    for w, d in zip(split, full, strict=True):
        torch.testing.assert_close(use(x, w).full_tensor().ranks[0], use(dense, d))


@pytest.mark.parametrize("rank", [None, 2])
def test_a_write_to_a_block_is_seen_by_the_next_op(mesh, rank):
    full, split = weights(mesh, grad=False)
    x = sw.distribute_tensor(values(SEQUENCE, HIDDEN), mesh, [Shard(0)])
    linear(x, split[0])
    for r, block in enumerate(x.to_local().ranks):
        if rank in (None, r):
            block.add_(1)
    want = linear(x.full_tensor().ranks[0], full[0])
    torch.testing.assert_close(linear(x, split[0]).full_tensor().ranks[0], want)


@pytest.mark.parametrize("is_grad", [True, False])
def test_a_write_to_the_block_of_a_view_is_seen_by_the_next_op(mesh, is_grad):
    x = sw.distribute_tensor(torch.ones(8, 8), mesh, [Shard(1)])
    with torch.set_grad_enabled(is_grad):
        rows, column = x[:2], x.view(64).view(8, 8)[:, :8]
        for number, view in enumerate((rows, column)):
            x.cumsum(1)
            for block in view.to_local().ranks:
                block[0].fill_(-number)
            torch.testing.assert_close(x.cumsum(1).full_tensor().ranks[0], x.full_tensor().ranks[0].cumsum(1))


def test_views_of_one_tensor_are_told_apart(mesh):
    full, split = weights(mesh, grad=False)
    dense = values(HIDDEN, HIDDEN)
    x = sw.distribute_tensor(dense, mesh, [Shard(0)])
    views = [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t.view(4, 2, HIDDEN),
        lambda t: t.view(2, 4, HIDDEN).transpose(0, 1),
    ]
    views += [
        lambda t: t[:4],
        lambda t: t[4:],
        lambda t: t[:, :4].repeat(1, 2),
        lambda t: t[:1].expand(4, HIDDEN),
    ]
    for view in [*views, *reversed(views)]:
        got = torch.matmul(view(x), split[0].t())
        torch.testing.assert_close(got.full_tensor().ranks[0], torch.matmul(view(dense), full[0].t()))


def test_a_result_shares_no_memory_with_what_is_kept(mesh):
    x = sw.distribute_tensor(values(4, 6), mesh, [Shard(1)])
    want = x.full_tensor().ranks[0].cumsum(1)
    for _ in range(2):
        got = x.cumsum(1)
        torch.testing.assert_close(got.full_tensor().ranks[0], want)
        got.zero_()
        x.tril()
        x.triu().zero_()


def test_errors_do_not_depend_on_what_is_kept(mesh):
    _, split = weights(mesh, grad=False)
    x = sw.distribute_tensor(values(SEQUENCE, HIDDEN), mesh, [Shard(0)])
    linear(x, split[0])
    with sw.policy(implicit="error"), pytest.raises(sw.CommunicationError, match="would communicate"):
        linear(x, split[1])


def test_the_policy_bounds_what_is_kept(mesh):
    _, split = weights(mesh, grad=False)
    x = sw.distribute_tensor(values(SEQUENCE, HIDDEN), mesh, [Shard(0)])
    bytes_gathered = SEQUENCE * HIDDEN * 8
    for reuse, expected in ((0, 3), (bytes_gathered - 1, 3), (bytes_gathered, 1)):
        with sw.policy(reuse=reuse), counting() as ledger:
            for w in split:
                linear(x, w)
        assert len(steps(ledger)) == expected
    with pytest.raises(ValueError, match="number of bytes"), sw.policy(reuse=-1):
        pass


def test_inference_tensors_have_no_versions_and_are_not_kept(mesh):
    _, split = weights(mesh, grad=False)
    with torch.inference_mode():
        x = sw.distribute_tensor(values(SEQUENCE, HIDDEN), mesh, [Shard(0)]) * 1
        with counting() as ledger:
            for w in split:
                linear(x, w)
    assert steps(ledger) == ["all-gather"] * 3


def kept_blocks():
    return [one.block for one in kept_moves._slots.kept if one.block is not None]


def test_a_block_is_freed_with_its_tensor(mesh):
    kept_moves.forget_moves()
    tensors = [sw.distribute_tensor(values(6, 6, seed=i), mesh, [Shard(1)]) for i in range(4)]
    for n, x in enumerate(tensors):
        x.cumsum(1)
        assert len(kept_blocks()) == n + 1
    gone = weakref.ref(kept_blocks()[2].ranks[0])
    slots = len(kept_moves._slots.kept)
    del x, tensors[2]
    gc.collect()
    assert gone() is None
    assert len(kept_blocks()) == 3
    assert len(kept_moves._slots.kept) == slots  # a slot is not freed earlier on one rank than on another


def test_all_kept_blocks_together_take_no_more_than_the_policy_says(mesh):
    kept_moves.forget_moves()
    tensors = [sw.distribute_tensor(values(6, 6, seed=i), mesh, [Shard(1)]) for i in range(40)]
    with sw.policy(reuse=3 * 36 * 8 + 100):
        for n, x in enumerate(tensors):
            x.cumsum(1)
            assert len(kept_blocks()) == min(n + 1, 3)
    for x in tensors:  # there is room, but looking for one takes time
        x.cumsum(1)
    assert len(kept_blocks()) == kept_moves._MOST


def test_a_tensor_can_be_swapped_and_copied_while_a_block_of_it_is_kept(mesh):
    full, split = weights(mesh, grad=False)
    dense = [values(SEQUENCE, HIDDEN, seed=i) for i in (4, 5)]
    x, y = (sw.distribute_tensor(t, mesh, [Shard(0)]) for t in dense)
    linear(x, split[0])
    torch.utils.swap_tensors(x, y)
    for t, d in ((x, dense[1]), (y, dense[0])):
        torch.testing.assert_close(linear(t, split[0]).full_tensor().ranks[0], linear(d, full[0]))
    z = copy.deepcopy(x).mul_(2)
    torch.testing.assert_close(linear(z, split[0]).full_tensor().ranks[0], linear(dense[1] * 2, full[0]))


@given(st.data())
def test_programs_of_reads_and_writes_equal_dense_and_send_no_more(data):
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2))
        placement = st.sampled_from([Replicate(), Shard(0), Shard(1), Partial()])
        dense = [values(6, 6, seed=i) for i in range(2)]
        split = [sw.distribute_tensor(t, mesh, [data.draw(placement), data.draw(placement)]) for t in dense]
        dense = [t.clone() for t in dense]
        reads = [
            torch.exp,
            lambda t: t.softmax(0),
            lambda t: t.t() @ t,
            lambda t: t.cumsum(1),
            lambda t: t.view(36).sin(),
        ]
        writes = [
            lambda t: t.mul_(0.5),
            lambda t: t[1].sub_(1),
            lambda t: t.view(36)[5:20].zero_(),
            lambda t: t.data.neg_(),
        ]
        for _ in range(data.draw(st.integers(2, 8))):
            i = data.draw(st.integers(0, 1))
            if data.draw(st.integers(0, 3)) == 0:
                write = data.draw(st.sampled_from(writes))
                write(dense[i])
                try:
                    write(split[i])
                except (RuntimeError, ValueError):  # a pending sum may refuse to be written to
                    split[i] = sw.distribute_tensor(dense[i], mesh, [Shard(0), Replicate()])
                continue
            read = data.draw(st.sampled_from(reads))
            with sw.policy(reuse=0), counting() as alone:
                read(split[i])
            with counting() as sent:
                got = read(split[i])
            rest = steps(alone)
            for step in steps(sent):  # nothing that the call alone would not send
                rest.remove(step)
            for rank in got.full_tensor().ranks:
                torch.testing.assert_close(rank, read(dense[i]))


HEADS = 8


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attention(h, norm, weights, biases, cos, sin):
    """A block of a transformer: between two uses of `x` other tensors are moved, if they are split."""
    x = functional.layer_norm(h, (HIDDEN,), norm)
    heads = []
    for number in range(3):
        y = linear(x, weights[number], biases[number]).unflatten(-1, (HEADS, -1)).transpose(-3, -2)
        if number < 2:
            y = rotate(y, cos, sin)
            y = y / (y.norm(dim=-1, keepdim=True) + 1)
        heads.append(y)
    q, k, v = heads
    mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    return h + linear(mixed.transpose(-3, -2).flatten(-2), weights[3])


MODES = {
    "no_grad": attention,
    "grad": attention,
    "checkpoint": lambda *args: checkpoint(attention, *args, use_reentrant=False),
    "reentrant": lambda *args: checkpoint(attention, *args, use_reentrant=True),
}


def attention_operands():
    width = 8 * HEADS
    full = [values(width, HIDDEN, seed=i) for i in (1, 2, 3)]
    tables = [values(SEQUENCE, 8, seed=i) for i in (8, 9)]
    return (
        values(HIDDEN, seed=4).abs(), [*full, values(HIDDEN, width, seed=5)],
        [values(width, seed=i) for i in (5, 6, 7)], *tables,
    )  # fmt: skip


def sent_by_attention(mesh, shape, mode, split):
    """What a block of a transformer sends in its forward and backward pass, its result and the gradients."""
    norm, full, biases, *tables = attention_operands()

    def distributed(t, placement):
        return sw.distribute_tensor(t, mesh, [placement]).requires_grad_(mode != "no_grad")

    ours = (
        distributed(norm, Replicate()),
        [distributed(w, Shard(i // 3)) for i, w in enumerate(full)],
        [distributed(b, Shard(0)) for b in biases],
        *[distributed(t, Shard(0) if split else Replicate()).detach() for t in tables],
    )
    h = distributed(values(*shape), Shard(len(shape) - 2))
    with torch.set_grad_enabled(mode != "no_grad"), counting() as forward:
        y = MODES[mode](h, *ours)
    z = y.redistribute(placements=h.placements)
    with counting() as backward:
        if mode != "no_grad":
            z.sin().sum().backward()
    return forward, backward, y, [h.grad, ours[0].grad, *[t.grad for t in (*ours[1], *ours[2])]]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, SEQUENCE, HIDDEN), (SEQUENCE, HIDDEN)])
def test_a_block_of_a_transformer_moves_its_input_once(mesh, mode, split, shape):
    forward, backward, y, grads = sent_by_attention(mesh, shape, mode, split)
    assert steps(forward) == ["all-gather"] * (3 if split else 1)
    operands = attention_operands()
    dense = [values(*shape), operands[0], *operands[1], *operands[2]]
    h, norm, *rest = (t.clone().requires_grad_() for t in dense)
    want = attention(h, norm, rest[:4], rest[4:], *operands[3:])
    torch.testing.assert_close(y.full_tensor().ranks[2], want.detach())
    if mode == "no_grad":
        return
    # the gradient of the result is gathered, and where the input of the linears is computed again, so is that
    assert steps(backward) == ["all-gather"] * (1 if mode == "grad" else 2) + ["reduce-scatter"]
    want.sin().sum().backward()
    for got, t in zip(grads, (h, norm, *rest), strict=True):
        torch.testing.assert_close(got.full_tensor().ranks[1], t.grad)


def test_what_a_checkpoint_saved_is_kept_no_longer_than_it_lives(mesh):
    kept_moves.forget_moves()
    results = sent_by_attention(mesh, (2, SEQUENCE, HIDDEN), "checkpoint", False)
    del results
    gc.collect()
    assert not kept_blocks()


def _attention_on_a_rank():
    mesh = sw.init_device_mesh("cpu", (4,))
    out = []
    for mode in MODES:
        forward, backward, y, _ = sent_by_attention(mesh, (2, SEQUENCE, HIDDEN), mode, True)
        out.append((steps(forward), steps(backward), y.sum().item()))
    return out


def test_a_block_of_a_transformer_on_processes(workers):
    every = workers.run(_attention_on_a_rank)
    assert every[0] == every[1] == every[2] == every[3]
    assert [len(forward) for forward, _, _ in every[0]] == [3] * 4
    assert [backward.count("reduce-scatter") for _, backward, _ in every[0]] == [0, 1, 1, 1]


def _on_a_rank():
    mesh = sw.init_device_mesh("cpu", (4,))
    sw.manual_seed(0)
    out = []
    for shape in ((5, 4), (2, 4), (1, 4), (4, 3)):  # uneven and empty blocks
        x = sw.distribute_tensor(values(*shape), mesh, [Shard(0)]).requires_grad_()
        w = sw.distribute_tensor(values(shape[1], 6, seed=1), mesh, [Shard(1)])
        with counting() as ledger:
            y = (
                sum((x.view(shape) @ w).sum() for _ in range(3))
                + (x.t().reshape(-1) * 2).sum()
                + x.softmax(0).sum()
            )
            y.backward()
        out.append((steps(ledger), y.item()))
    return out


def test_all_ranks_decide_alike(workers):
    every = workers.run(_on_a_rank)
    assert every[0] == every[1] == every[2] == every[3]
    assert [steps.count("all-gather") for steps, _ in every[0]] == [1] * 4
