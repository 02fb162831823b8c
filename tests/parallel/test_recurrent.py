"""Recurrent layers over a split batch: the results of one device, and nothing is sent but the gradients of weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.parallel import parallelize_module

LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"num_layers": 2, "batch_first": True}),
    "lstm, projected, both ways": (nn.LSTM, {"proj_size": 3, "bidirectional": True}),
    "gru": (nn.GRU, {"batch_first": True, "bias": False}),
    "rnn": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    "lstm with dropout, not in training": (nn.LSTM, {"num_layers": 2, "dropout": 0.5}),
}


def full(t: Tensor) -> Tensor:
    t = t.full_tensor() if isinstance(t, sw.DTensor) else t
    return t.ranks[0] if isinstance(t, sw.PerRank) else t


def flat(out: Any) -> list[Tensor]:
    return [out[0], *(out[1] if isinstance(out[1], tuple) else (out[1],))]


@pytest.mark.parametrize("name", LAYERS)
def test_a_split_batch_stays_split(name: str):
    kind, options = LAYERS[name]
    dtype = torch.float64 if "proj_size" in options else torch.float32
    torch.manual_seed(0)
    dense = kind(5, 4, **options, dtype=dtype)
    dense.train(not options.get("dropout"))
    batch = 0 if options.get("batch_first") else 1
    shape = (4, 3, 5) if batch == 0 else (3, 4, 5)
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2)]

    def run(layer: nn.Module, given: list[Tensor]) -> list[Tensor]:
        first = layer(given[0])
        second = layer(given[1], first[1])  # goes on from the states of the first
        sum((t * (1 + torch.ones_like(t).cumsum(-1))).sum() for t in flat(second)).backward()
        return flat(second)

    want = run(dense, inputs)
    grads = [t.grad for t in (*inputs, *dense.parameters())]
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = copy.deepcopy(dense)
        net.zero_grad()
        parallelize_module(net, mesh, {"": "replicate"})
        split = [sw.Shard(batch), sw.Replicate()]
        blocks = [sw.distribute_tensor(t.detach(), mesh, split).requires_grad_() for t in inputs]
        with CommDebugMode() as mode:
            got = run(net, blocks)
        assert {e.step for e in mode.ledger.entries} == {"all-reduce"}
        assert got[0].sharding.sharded
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(full(a), b)
        for t, grad in zip((*blocks, *net.parameters()), grads, strict=True):
            torch.testing.assert_close(full(t.grad), grad)


@pytest.mark.parametrize("batch", [3, 4])
def test_uneven_batches_and_random_numbers_have_the_results_of_one_device(batch: int):
    torch.manual_seed(0)
    dense = nn.LSTM(5, 4, 2, batch_first=True, dropout=0.0 if batch == 3 else 0.5).double()
    x = torch.randn(batch, 3, 5, dtype=torch.float64)
    with sw.one_device():
        sw.manual_seed(1)
        want = dense(x)[0]
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        net = sw.distribute_module(copy.deepcopy(dense), mesh)
        sw.manual_seed(1)
        torch.testing.assert_close(full(net(sw.distribute_tensor(x, mesh, [sw.Shard(0)]))[0]), want)
