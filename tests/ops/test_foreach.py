"""Each foreach op of torch on lists of DTensors, compared with plain tensors."""

import pytest
import torch

import shardwise as sw

OPS = sorted(name for name in dir(torch) if name.startswith("_foreach_"))


def lists(number: int) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    return [[torch.rand(3, 2) + 0.5, torch.rand(4) + 0.5] for _ in range(number)]


def arguments():
    a, b, c = lists(3)
    square = [torch.rand(3, 3), torch.rand(2, 2)]  # for products
    return [[a], [a, b], [a, 2.0], [a, b, c], [a, [1.0, 2.0]], [a, b, 0.5], [square, square]]


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_a_foreach_op_equals_the_one_on_plain_tensors(name, shard, caplog):
    caplog.set_level("ERROR", logger="shardwise")
    op, compared = getattr(torch, name), 0
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        placements = [sw.Shard(0) if shard else sw.Replicate()]

        def distribute(values):
            return [sw.distribute_tensor(t, mesh, placements) for t in values]

        for args in arguments():
            dense = [
                [t.clone() for t in x] if isinstance(x, list) and isinstance(x[0], torch.Tensor) else x
                for x in args
            ]
            distributed = [
                distribute(x) if isinstance(x, list) and isinstance(x[0], torch.Tensor) else x for x in args
            ]
            try:
                want = op(*dense)
            except (TypeError, RuntimeError):
                continue  # the op does not take such arguments
            got = op(*distributed)
            compared += 1
            pairs = zip(
                distributed[0] if want is None else got, dense[0] if want is None else want, strict=True
            )
            for x, t in pairs:
                torch.testing.assert_close(x.full_tensor().ranks[1], t, equal_nan=True)
    assert compared
