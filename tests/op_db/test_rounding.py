"""What the sweep calls rounded: as near the truth as rounding allows, and no farther."""

import pytest
import torch
from tests.op_db.rounding import differs, same_up_to_rounding


def evaluated(op, x):
    """As the sweep evaluates an op: its result and the gradient of its input, wherever that is put."""

    def run(put):
        leaf = put(x).requires_grad_()
        out = op(leaf)
        weights = (torch.arange(out.numel()) * 5 % 11 - 5.5).view(out.shape).to(out.dtype) / 8
        (out * weights).sum().backward()
        return [out.detach()], [leaf.grad]

    return run


def as_given(t):
    return t.detach().clone()


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_largest(x):
    return x / torch.linalg.vector_norm(x, float("inf"), 1, keepdim=True)


KINK = 8  # the first trials do not cross it here: what crosses counts for all elements of those


def margin(x):
    return (1 - 7.1875 * (6.90625 - x)).clamp_min(0)


def margin_in_parts(x):
    """The same, with x pending as 2x on one rank and -x on the other."""
    return (1 - (7.1875 * (6.90625 - 2 * x) + 7.1875 * x)).clamp_min(0)


@pytest.mark.parametrize(("dtype", "by"), [(torch.bfloat16, 1.25), (torch.float32, 1.01)], ids=str)
@pytest.mark.parametrize(
    "op",
    [
        by_largest,
        lambda x: x @ x.mT,
        lambda x: (x * x - 1).clamp_min(0),
        lambda x: x.softmax(-1),
        lambda x: x.cumsum(0).sin(),
    ],
)
def test_what_is_off_by_a_little_is_not_rounded(op, dtype, by):
    run = evaluated(op, drawn(6, 6, dtype=dtype))
    (out,), (grad,) = dense = run(as_given)
    assert same_up_to_rounding(run, dense, dense)
    assert not same_up_to_rounding(run, ([out * by], [grad]), dense)
    assert not same_up_to_rounding(run, ([out], [grad * by]), dense)


def test_the_gradient_of_an_extreme_has_a_model():
    """Rounded at random, an extreme would be none of its inputs, and its gradient 0 / 0."""
    run = evaluated(by_largest, drawn(6, 5))
    (out,), (grad,) = dense = run(as_given)
    off = grad * (1 + 3 * torch.finfo(torch.bfloat16).eps)
    assert differs(off, grad)
    assert same_up_to_rounding(run, ([out], [off]), dense)
    assert not same_up_to_rounding(run, ([out], [grad.roll(1, 1)]), dense)


def test_a_kink_may_be_crossed_where_rounding_reaches_it_and_nowhere_else():
    x = torch.full((30,), 6.25, dtype=torch.bfloat16)
    x[KINK] = 6.75
    run = evaluated(margin, x)
    (out,), (grad,) = dense = run(as_given)
    mine = evaluated(margin_in_parts, x)(as_given)
    assert ((mine[1][0] == 0) != (grad == 0)).nonzero().tolist() == [[KINK]]
    assert same_up_to_rounding(run, mine, dense)
    for far in (0, 29):
        wrong = grad.clone()
        wrong[far] = mine[1][0][KINK]
        assert not same_up_to_rounding(run, ([out], [wrong]), dense)
