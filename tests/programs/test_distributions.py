"""`torch.distributions` of DTensors: samples, densities and gradients are those of one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributions as td
from torch import Tensor

import shardwise as sw

SHAPES = {"n": (3, 4), "a": (3, 4), "b": (3, 4), "u": (3, 4), "m": (5, 2), "S": (2, 2)}
DISTRIBUTIONS = {
    "Normal": lambda p: td.Normal(p["n"], p["a"]),
    "Normal of a number": lambda p: td.Normal(0.0, p["a"]),
    "Independent": lambda p: td.Independent(td.Normal(p["n"], 1.0), 1),
    "Uniform": lambda p: td.Uniform(p["n"], p["n"] + p["a"]),
    "LogNormal": lambda p: td.LogNormal(p["n"], p["a"]),
    "Gumbel": lambda p: td.Gumbel(p["n"], p["a"]),
    "StudentT": lambda p: td.StudentT(p["a"] + 3, p["n"], p["b"]),
    "Laplace": lambda p: td.Laplace(p["n"], p["a"]),
    "Kumaraswamy": lambda p: td.Kumaraswamy(p["a"], p["b"]),
    "MultivariateNormal": lambda p: td.MultivariateNormal(p["m"], p["S"]),
    "MultivariateNormal by precision": lambda p: td.MultivariateNormal(p["m"], precision_matrix=p["S"]),
    "LowRank": lambda p: td.LowRankMultivariateNormal(p["m"], p["m"][..., None], p["a"][0, :2].expand(5, 2)),
    "ContinuousBernoulli": lambda p: td.ContinuousBernoulli(p["u"]),
    "RelaxedBernoulli": lambda p: td.RelaxedBernoulli(torch.tensor(0.7).double(), p["u"]),
    "RelaxedOneHot": lambda p: td.RelaxedOneHotCategorical(torch.tensor(0.7).double(), logits=p["n"]),
    "VonMises": lambda p: td.VonMises(p["n"], p["a"]),
    "LKJCholesky": lambda p: td.LKJCholesky(3, p["a"][0, 0]),
    "Binomial": lambda p: td.Binomial(6, p["u"]),
    "Multinomial": lambda p: td.Multinomial(5, p["u"]),
    "Bernoulli": lambda p: td.Bernoulli(logits=p["n"]),
    "Categorical": lambda p: td.Categorical(logits=p["n"]),
    "OneHotCategorical": lambda p: td.OneHotCategorical(logits=p["n"]),
    "Tanh": lambda p: td.TransformedDistribution(td.Normal(p["n"], p["a"]), td.transforms.TanhTransform(cache_size=1)),
    "Beta": lambda p: td.Beta(p["a"], 2.0),
}  # fmt: skip


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.rand(*shape, generator=generator).double() for name, shape in SHAPES.items()}
    values["a"], values["b"], values["u"] = values["a"] + 0.5, values["b"] + 0.5, values["u"] * 0.8 + 0.1
    values["n"], values["m"] = values["n"] - 0.5, values["m"] - 0.5
    values["S"] = values["S"] @ values["S"].T + torch.eye(2).double()
    return values


def facts(make, p: dict[str, Tensor]) -> list[Tensor]:
    """A sample, and what is computed of it."""
    distribution = make(p)
    sample = distribution.rsample((2,)) if distribution.has_rsample else distribution.sample((2,))
    out = [sample.detach(), distribution.log_prob(sample.detach())]
    if distribution.has_rsample:
        out += torch.autograd.grad(sample.square().sum(), list(p.values()), allow_unused=True)
    for method in (distribution.entropy, distribution.enumerate_support):
        try:
            out.append(method())
        except NotImplementedError:
            continue
    return out


@pytest.mark.filterwarnings("ignore:Singular sample")
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_those_of_one_device(name):
    values = parameters()
    sw.manual_seed(3)
    with sw.one_device():
        want = facts(DISTRIBUTIONS[name], {k: v.clone().requires_grad_() for k, v in values.items()})
    placements = {
        "n": [sw.Shard(0), sw.Shard(1)],
        "a": [sw.Shard(1), sw.Replicate()],
        "m": [sw.Shard(0), sw.Partial()],
    }
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2))
        sw.manual_seed(3)
        given = {
            k: sw.distribute_tensor(v, mesh, placements.get(k)).requires_grad_() for k, v in values.items()
        }
        got = [t if t is None else t.full_tensor().ranks[0] for t in facts(DISTRIBUTIONS[name], given)]
    for w, g in zip(want, got, strict=True):
        assert (w is None) == (g is None)
        if w is not None:
            torch.testing.assert_close(g, w)


def test_plain_parameters_beside_dtensors_are_refused():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        loc = sw.distribute_tensor(torch.zeros(4), mesh, [sw.Shard(0)])
        with pytest.raises(sw.PlainTensorError):
            td.Normal(loc, torch.ones(4)).rsample()
        with pytest.raises(sw.PlainTensorError):
            td.Normal(loc, 1.0).log_prob(torch.ones(4))


def test_functions_of_torch_that_create_plain_tensors():
    x, lengths = torch.randn(5, 2, 6), torch.tensor([[1, 2], [3, 3]])
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        d, t = (
            sw.distribute_tensor(x, mesh, [sw.Shard(1)]),
            sw.distribute_tensor(lengths, mesh, [sw.Shard(0)]),
        )
        loss = torch.nn.functional.ctc_loss(d.log_softmax(-1), t, [5, 4], [2, 1])
        layer = torch.nn.MultiheadAttention(6, 2, add_bias_kv=True, add_zero_attn=True)
        want = layer(x, x, x)
        for name, p in list(layer.named_parameters()):
            owner = layer.get_submodule(name.rpartition(".")[0])
            setattr(
                owner, name.rpartition(".")[2], torch.nn.Parameter(sw.distribute_tensor(p.detach(), mesh))
            )
        got = layer(d, d, d)
        torch.testing.assert_close(
            loss.item(), torch.nn.functional.ctc_loss(x.log_softmax(-1), lengths, [5, 4], [2, 1]).item()
        )
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g.full_tensor().ranks[0], w)
