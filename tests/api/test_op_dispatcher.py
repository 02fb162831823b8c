"""The names of torch's dispatcher that programs read or set."""

import pytest
import torch

import shardwise as sw
from shardwise import DTensor, Replicate, Shard

aten = torch.ops.aten


def test_implicit_replication_is_an_attribute():
    with sw.simulate(2), sw.policy(plain="error"):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        DTensor._op_dispatcher._allow_implicit_replication = True
        assert DTensor._op_dispatcher._allow_implicit_replication
        assert (x + torch.ones(3)).placements == (Shard(0),)
        DTensor._op_dispatcher._allow_implicit_replication = False
        with pytest.raises(sw.PlainTensorError):
            x + torch.ones(3)
    assert not DTensor._op_dispatcher._allow_implicit_replication


def test_rules_of_users_are_read_and_forgotten():
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    assert rules.pop(aten.softmax.int, None) is None
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])

        @sw.register_sharding(aten._softmax.default)
        def whole(x, dim, half_to_float):
            return [([Replicate()], [Replicate(), None, None])]

        assert torch.softmax(x, 1).placements == (Replicate(),)
        assert rules.pop(aten._softmax.default) is not None
        assert torch.softmax(x, 1).placements == (Shard(0),)
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    assert infos[aten._softmax.default].static_argnum == infos[aten.argmax.default].static_argnum == 1
    assert infos[aten.relu.default].static_argnum == 100


def test_what_there_is_not_is_named():
    assert aten.mm.default in DTensor._op_dispatcher.sharding_propagator.op_to_rules
    with pytest.raises(NotImplementedError, match="register_sharding"):
        DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs[aten.mm.default] = None
    for owner in (DTensor._op_dispatcher, DTensor._op_dispatcher.sharding_propagator):
        with pytest.raises(AttributeError, match=r"(?s)_op_dispatcher.*wrap was used.*why: .*fix: "):
            owner.wrap()
