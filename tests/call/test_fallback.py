"""The fallback: what it writes, random numbers, and dtypes."""

import pytest
import torch

import shardwise as sw
from shardwise.call.fallback import draws_random

aten = torch.ops.aten


class Accumulates(torch.autograd.Function):
    """A backward pass that creates a plain tensor and accumulates into it, as torch's chunked losses do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        total = torch.zeros(x.shape)
        total.add_(x)
        total.index_add_(0, torch.tensor([0, 1]), x[:2].contiguous())
        torch.mul(x, total, out=total)
        return total * grad


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()])
def test_simulated_ranks_write_a_plain_tensor_once(placement):
    t = torch.arange(12.0).view(4, 3) - 5
    dense = t.clone().requires_grad_()
    Accumulates.apply(dense).backward()
    with sw.simulate(3):
        x = sw.distribute_tensor(t, sw.init_device_mesh("cpu", (3,)), [placement]).requires_grad_()
        Accumulates.apply(x).backward()
        torch.testing.assert_close(x.grad.full_tensor().ranks[0], dense.grad)


@pytest.mark.parametrize("draw", [torch.rand_like, torch.bernoulli, lambda p: p.clone().exponential_()])
@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0)])
def test_ranks_draw_the_same_random_numbers(draw, placement):
    with sw.simulate(2):
        x = sw.distribute_tensor(torch.full((4, 3), 0.5), sw.init_device_mesh("cpu", (2,)), [placement])
        first, second = draw(x).full_tensor().ranks
        assert torch.equal(first, second)
        assert not torch.equal(draw(x).full_tensor().ranks[0], first)


def test_plain_tensors_created_by_torch_count_as_replicated_and_those_of_the_caller_do_not():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        at = sw.distribute_tensor(torch.tensor([3, 7, 11]), mesh, [sw.Shard(0)])
        rows, columns = torch.unravel_index(at, (3, 4))
        assert rows.full_tensor().ranks[0].tolist() == [0, 1, 2]
        assert columns.full_tensor().ranks[0].tolist() == [3, 3, 3]
        plain = torch.arange(3)
        with pytest.raises(sw.LayoutError, match="got mixed"):
            at.floor_divide(plain)


def test_an_op_that_also_writes_returns_its_result_not_its_target():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        t = torch.tensor([-2.0, -1.0, 0.0, 3.0])
        x, noise = (sw.distribute_tensor(v, mesh, [sw.Shard(0)]) for v in (t, torch.full((4,), 7.0)))
        out = torch.ops.aten.rrelu_with_noise(x, noise, 0.5, 0.5, False)
        assert out.full_tensor().ranks[0].tolist() == [-1.0, -0.5, 0.0, 3.0]


def test_terms_of_an_integer_sum_wrap_around_before_a_cast():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        terms = sw.per_rank(lambda rank: torch.tensor([200, 100], dtype=torch.uint8))
        x = sw.DTensor.from_local(terms, mesh, [sw.Partial()])  # 400 and 200 modulo 256
        assert x.full_tensor().ranks[0].tolist() == [144, 200]
        for op in (torch.sum, lambda t: t.cumsum(0), lambda t: t * 0.5, lambda t: t + t):
            want = op(torch.tensor([144, 200], dtype=torch.uint8))
            got = op(x).full_tensor().ranks[0]
            assert torch.equal(got, want)
            assert got.dtype == want.dtype


def test_all_out_tensors_are_returned():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        t = torch.tensor([[3.0, 1.0], [2.0, 5.0], [4.0, 0.0]])
        x = sw.distribute_tensor(t, mesh, [sw.Shard(0)])
        values, indices = (
            sw.zeros(3, 2, device_mesh=mesh),
            sw.zeros(3, 2, device_mesh=mesh, dtype=torch.int64),
        )
        got = torch.sort(x, 0, out=(values, indices))
        assert got[0] is values
        assert got[1] is indices
        assert torch.equal(values.full_tensor().ranks[0], t.sort(0)[0])
        assert torch.equal(indices.full_tensor().ranks[0], t.sort(0)[1])


def test_integer_averages_are_not_linear_in_a_pending_sum():
    t = torch.arange(16).view(1, 1, 4, 4) - 7
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        terms = sw.per_rank(lambda rank: t + 3 if rank == 0 else torch.full_like(t, -3))
        x = sw.DTensor.from_local(terms, mesh, [sw.Partial()])
        got = torch.nn.functional.avg_pool2d(x, 2).full_tensor().ranks[0]
        assert torch.equal(got, torch.nn.functional.avg_pool2d(t, 2))


@pytest.mark.parametrize(
    ("op", "dropout", "expected"),
    [
        (aten.normal_.default, None, True),
        (aten.binomial.default, None, True),  # not tagged
        (aten._standard_gamma.default, None, True),
        (aten.add.Tensor, None, False),
        (aten._scaled_dot_product_attention_math.default, 0.1, True),
        (aten._scaled_dot_product_attention_math.default, 0.0, False),
    ],
)
def test_which_calls_draw(op: torch._ops.OpOverload, dropout: float | None, expected: bool) -> None:
    assert draws_random(op, (), {} if dropout is None else {"dropout_p": dropout}) == expected
