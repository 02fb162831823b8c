"""Which results count as equal up to rounding."""

import pytest
import torch
from tests.op_db.rounding import differs, same_up_to_rounding


def evaluation(op, x):
    """The result of an op and the gradient of its input, evaluated as in the sweep."""

    def run(put):
        leaf = put(x).requires_grad_()
        out = op(leaf)
        weights = (torch.arange(out.numel()) * 5 % 11 - 5.5).view(out.shape).to(out.dtype) / 8
        (out * weights).sum().backward()
        return [out.detach()], [leaf.grad]

    return run


def copy(t):
    return t.detach().clone()


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def normalized(x):
    return x / torch.linalg.vector_norm(x, float("inf"), 1, keepdim=True)


KINK = 8  # an element at which the first trials do not cross the kink


# The results are on both sides of the kink, not at it: torch 2.14 changed the gradient there.
def margin(x):
    return (1.03125 - 7.1875 * (6.90625 - x)).clamp_min(0)


def margin_of_terms(x):
    """The same with x as a pending sum of 2x and -x."""
    return (1.03125 - (7.1875 * (6.90625 - 2 * x) + 7.1875 * x)).clamp_min(0)


@pytest.mark.parametrize(("dtype", "by"), [(torch.bfloat16, 1.25), (torch.float32, 1.01)], ids=str)
@pytest.mark.parametrize(
    "op",
    [
        normalized,
        lambda x: x @ x.mT,
        lambda x: (x * x - 1).clamp_min(0),
        lambda x: x.softmax(-1),
        lambda x: x.cumsum(0).sin(),
    ],
)
def test_a_small_error_is_more_than_rounding(op, dtype, by):
    run = evaluation(op, randn(6, 6, dtype=dtype))
    (out,), (grad,) = dense = run(copy)
    assert same_up_to_rounding(run, dense, dense)
    assert not same_up_to_rounding(run, ([out * by], [grad]), dense)
    assert not same_up_to_rounding(run, ([out], [grad * by]), dense)


def test_gradients_of_a_maximum_can_be_compared():
    """If the trials rounded the maximum, it would equal none of its inputs, and its gradient would be 0 / 0."""
    run = evaluation(normalized, randn(6, 5))
    (out,), (grad,) = dense = run(copy)
    off = grad * (1 + 3 * torch.finfo(torch.bfloat16).eps)
    assert differs(off, grad)
    assert same_up_to_rounding(run, ([out], [off]), dense)
    assert not same_up_to_rounding(run, ([out], [grad.roll(1, 1)]), dense)


def test_only_elements_that_rounding_brings_to_a_kink_may_cross_it():
    x = torch.full((30,), 6.25, dtype=torch.bfloat16)
    x[KINK] = 6.75
    run = evaluation(margin, x)
    (out,), (grad,) = dense = run(copy)
    mine = evaluation(margin_of_terms, x)(copy)
    assert ((mine[1][0] == 0) != (grad == 0)).nonzero().tolist() == [[KINK]]
    assert same_up_to_rounding(run, mine, dense)
    for far in (0, 29):
        wrong = grad.clone()
        wrong[far] = mine[1][0][KINK]
        assert not same_up_to_rounding(run, ([out], [wrong]), dense)
