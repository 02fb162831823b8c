"""All optimizers of `torch.optim`, with their loops over tensors, over lists, and their fused kernels."""

from __future__ import annotations

import inspect

import pytest
import torch
from tests.programs.models import perceptron
from tests.programs.worlds import CASES, compare, initialized, randn, state
from torch import nn

OPTIONS = {
    "ASGD": {"lr": 0.1, "t0": 1.0},
    "Adadelta": {"lr": 0.5, "weight_decay": 0.1},
    "Adafactor": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "maximize": True},
    "Adamax": {"lr": 0.1},
    "LBFGS": {"lr": 0.5, "max_iter": 3},
    "Muon": {"lr": 0.1},
    "NAdam": {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {"lr": 0.1},
    "RMSprop": {"lr": 0.1, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    "SparseAdam": {"lr": 0.1},
}
MODES = ("foreach", "fused")
OPTIMIZERS = [
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
]
VARIANTS = [
    (name, mode)
    for name in OPTIMIZERS
    for mode in ("plain", *MODES)
    if mode == "plain" or mode in inspect.signature(getattr(torch.optim, name)).parameters
]


def test_every_optimizer_has_options():
    assert set(OPTIMIZERS) == set(OPTIONS)


def optimizer_program(name, mode):
    """Three steps of an optimizer, and its state."""

    def program(world):
        if name == "SparseAdam":
            model = world.model(initialized(nn.ModuleList([nn.Embedding(7, 3, sparse=True)])))
        else:
            model = world.model(initialized(perceptron(4, 5, 3)))
        parameters = [p for p in model.parameters() if p.dim() == 2 or name != "Muon"]
        chosen = {"foreach": mode == "foreach"} if (name, "foreach") in VARIANTS and mode != "fused" else {}
        chosen = {"fused": True} if mode == "fused" else chosen
        optimizer = getattr(torch.optim, name)(parameters, **OPTIONS[name], **chosen)
        x = world.data(torch.tensor([1, 2, 2, 5, 0, 6])) if name == "SparseAdam" else world.data(randn(6, 4))

        def closure():
            optimizer.zero_grad()
            out = model[0](x) if name == "SparseAdam" else model(x)
            loss = (out - 1).pow(2).mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        found = {f"loss {i}": loss for i, loss in enumerate(losses)}
        found |= {f"parameter {n}": p for n, p in model.named_parameters()}
        for i, p in enumerate(parameters):
            for key, value in optimizer.state[p].items():
                if isinstance(value, torch.Tensor) and key != "step":
                    found[f"state {i} {key}"] = value
        return found if name == "SparseAdam" else found | state(model)

    return program


@pytest.mark.parametrize(
    ("number", "variant"), list(enumerate(VARIANTS)), ids=[f"{n}-{m}" for n, m in VARIANTS]
)
def test_optimizer(number, variant):
    mesh, scheme = CASES[number % len(CASES)]
    # Muon multiplies matrices in bfloat16, where the order of a sum matters
    compare(optimizer_program(*variant), mesh, scheme, tol=2e-2 if variant[0] == "Muon" else 1e-9)


def test_muon_differs_from_one_device_by_roundings_only(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    for mesh, scheme in CASES[:3]:
        compare(optimizer_program("Muon", "plain"), mesh, scheme, tol=1e-9)
