"""Tensors that a step creates from numbers: code that looks at them does what it does in eager mode."""

import pytest
import torch

from shardwise.compile import capture, fake_mesh
from shardwise.compile.errors import CaptureError


@pytest.fixture
def mesh():
    with fake_mesh((1,), ("tp",)) as mesh:
        yield mesh


def branches(x):
    mask = torch.ones(4, 4).tril()
    return mask @ x if mask.sum() == 10 else x


def reads(x):
    t = torch.tensor([1.0, 2.0])
    total = t.sum().item()
    t.mul_(2)
    return x * total + t[1] + torch.arange(4).tolist()[3]


def size_by_values(x):
    return x[torch.nonzero(torch.arange(4) > 1)[:, 0]]


def written_by_numbers(x):
    t = torch.zeros(4)
    t[1:3] = 2.0
    return x * t if t.sum().item() == 4 else x


@pytest.mark.parametrize("step", [branches, reads, size_by_values, written_by_numbers])
def test_values_of_constants_are_there(step, mesh):
    x = torch.randn(4)
    program = capture(step, x)
    for _ in range(2):
        assert torch.equal(program.run(x), step(x))
        x = torch.randn(4)


def test_constants_are_no_fake_tensors(mesh):
    def step(x):
        assert type(torch.arange(4)[None] + 1) is torch.Tensor
        assert type(x + torch.ones(4)) is not torch.Tensor
        return x

    capture(step, torch.ones(4))


def accumulates(x):
    total = torch.zeros(4)
    total += x
    return total


def writes_to_a_view(x):
    out = torch.zeros(2, 4)
    row = out[0]
    row.copy_(x)
    return out.sum(0)


def writes_to_data(x):
    out = torch.zeros(2, 4)
    out.data[0] = x
    out.detach()[1].add_(x)
    return out.sum(0)


def draws(x):
    return torch.zeros(4).uniform_().mul(0) + x


def accumulates_often(x):
    totals = [torch.zeros(4), torch.ones(4)]
    totals.append(torch.full((4,), 2.0))
    for i in range(3):
        totals[i] += x * i
    return totals[0] + totals[1] * totals[2]


def swallows_exceptions(x):
    total = torch.zeros(4)
    try:
        total += x
    except Exception:
        return x
    return total


@pytest.mark.parametrize(
    "step",
    [accumulates, writes_to_a_view, writes_to_data, draws, accumulates_often, swallows_exceptions],
)
def test_constants_that_inputs_are_written_to_are_none(step, mesh):
    x = torch.randn(4)
    program = capture(step, x)
    for _ in range(2):
        assert torch.equal(program.run(x), step(x))
        x = torch.randn(4)


def reads_after_a_write(x):
    t = torch.zeros(4)
    view = t[1:2]
    t[1] = x[0]
    return x * view.tolist()[0]


def writes_by_numpy(x):
    t = torch.zeros(4)
    t.numpy()[0] = 3
    return t + x


@pytest.mark.parametrize("step", [reads_after_a_write, writes_by_numpy])
def test_values_that_only_a_run_has_are_refused(step, mesh):
    with pytest.raises((CaptureError, RuntimeError)):
        capture(step, torch.ones(4))
