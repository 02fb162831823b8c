"""Gradients of `prod` equal those of plain tensors, with zeros, NaN and infinities too."""

import logging

import pytest
import torch
from torch.autograd import forward_ad

import shardwise as sw
from shardwise.comm import counting


def _input(name):
    t = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    match name:
        case "one zero":
            t[1, 2] = 0
        case "two zeros":
            t[1, 2] = t[3, 2] = 0
        case "a NaN":
            t[2, 0] = float("nan")
        case "an infinity":
            t[2, 0] = float("inf")
        case "a NaN and two zeros":
            t[2, 0], t[1, 2], t[3, 2] = float("nan"), 0, 0
        case "complex numbers":
            t = torch.complex(t, t.flip(0))
        case "a scalar":
            t = torch.tensor(2.0, dtype=torch.float64)
        case "no elements":
            t = t[:0]
    return t


KINDS = (
    "numbers", "one zero", "two zeros", "a NaN", "an infinity", "a NaN and two zeros", "complex numbers", "a scalar",
    "no elements",
)  # fmt: skip
PRODUCTS = {
    "all": lambda x: x.prod(),
    "along 0": lambda x: x.prod(0),
    "along -1": lambda x: x.prod(-1, keepdim=True),
    "in another dtype": lambda x: x.prod(dtype=torch.complex64 if x.is_complex() else torch.float32),
}


def _derivatives(fn, x):
    out = fn(x)
    loss = (out * out).sum()
    loss = loss.real if loss.is_complex() else loss
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (twice,) = torch.autograd.grad((grad.abs() ** 2).sum(), x)
    return out.detach(), once, twice


PLACED = [
    (name, placement)
    for name in KINDS
    for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial())
    if _input(name).dim() or not placement.is_shard()
]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("name", "placement"), PLACED)
def test_gradients_are_those_of_plain_tensors(name, product, placement, caplog):
    caplog.set_level(logging.ERROR, logger="shardwise")
    t, fn = _input(name), PRODUCTS[product]
    want = _derivatives(fn, t.clone().requires_grad_())
    with sw.simulate(2):
        x = sw.distribute_tensor(t, sw.init_device_mesh("cpu", (2,)), [placement]).requires_grad_()
        for mine, plain in zip(_derivatives(fn, x), want, strict=True):
            torch.testing.assert_close(mine.full_tensor().ranks[0], plain, equal_nan=True)


def _forward_derivative(fn, x):
    """The sum of the forward-mode derivative, and its gradient."""
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, x.detach().cos()))).tangent.sum()
        return out.detach(), *torch.autograd.grad(out, x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("product", ["all", "along 0", "along -1"])
@pytest.mark.parametrize("name", ["numbers", "one zero"])
def test_forward_mode_derivatives_of_tensors_that_require_gradients(name, product, caplog):
    caplog.set_level(logging.ERROR, logger="shardwise")
    t, fn = _input(name), PRODUCTS[product]
    want = _forward_derivative(fn, t.clone().requires_grad_())
    with sw.simulate(2):
        x = sw.distribute_tensor(t, sw.init_device_mesh("cpu", (2,)), [sw.Shard(0)]).requires_grad_()
        for mine, plain in zip(_forward_derivative(fn, x), want, strict=True):
            torch.testing.assert_close(mine.full_tensor().ranks[0], plain)


def test_without_zeros_the_operand_is_not_gathered():
    """The product and the number of zeros are sent: two numbers, whatever the size."""
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.full((1000,), 1.001), mesh, [sw.Shard(0)]).requires_grad_()
        with counting() as ledger:
            x.prod().backward()
        assert ledger.bytes < 100


def on_two_of_four_ranks():
    mesh = sw.DeviceMesh("cpu", [0, 1])
    x = sw.distribute_tensor(torch.tensor([1.0, 2, 3]), mesh, [sw.Shard(0)]).requires_grad_()
    x.prod().backward()
    return x.grad.full_tensor().tolist() if mesh.get_coordinate() is not None else tuple(x.grad.shape)


@pytest.mark.processes
def test_gradients_on_real_processes_with_ranks_off_the_mesh(workers):
    assert workers.run(on_two_of_four_ranks) == [[6, 3, 2]] * 2 + [(3,)] * 2
