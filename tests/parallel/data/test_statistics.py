"""Running statistics of a simulated rank are those of its rows, as on a process of its own."""

import copy

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.parallel import fully_shard, replicate


@pytest.mark.parametrize("how", [fully_shard, replicate])
def test_each_rank_has_its_own_statistics(how) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)
    )
    rows = torch.randn(4, 2, 8, generator=generator).split([1, 3])
    alone = [copy.deepcopy(model) for _ in rows]
    for own, x in zip(alone, rows, strict=True):
        own(x)
    with sw.simulate(2):
        how(model, mesh=sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        model(sw.per_rank(lambda rank: rows[rank]))
        model.load_state_dict(copy.deepcopy(model).state_dict())
        for layer in (1, 2):
            for name in ("running_mean", "running_var"):
                for own, found in zip(alone, getattr(model[layer], name).ranks, strict=True):
                    torch.testing.assert_close(found, getattr(own[layer], name))
