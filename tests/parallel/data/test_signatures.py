"""`shardwise.fsdp` has the names and signatures of torch's FSDP2."""

import inspect

import pytest
import torch.distributed.fsdp as theirs

import shardwise.fsdp as ours


def methods(cls):
    return {n for n, f in vars(cls).items() if not n.startswith("_") and inspect.isfunction(f)}


def parameters(f):
    return [(p.name, p.kind) for p in inspect.signature(f).parameters.values()]


@pytest.mark.parametrize("name", ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"])
def test_functions(name):
    mine, torchs = (dict(parameters(getattr(package, name))) for package in (ours, theirs))
    assert mine == torchs


def test_methods():
    assert methods(theirs.FSDPModule) <= methods(ours.FSDPModule)
    for name in methods(ours.FSDPModule) & methods(theirs.FSDPModule):
        mine, torchs = (parameters(getattr(package.FSDPModule, name)) for package in (ours, theirs))
        assert mine == torchs, name


@pytest.mark.parametrize(
    "name", ["MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy", "DataParallelMeshDims"]
)
def test_policies(name):
    mine, torchs = (inspect.signature(getattr(package, name)) for package in (ours, theirs))
    for n, p in torchs.parameters.items():
        assert (mine.parameters[n].default, mine.parameters[n].kind) == (p.default, p.kind), n


def test_names_of_newer_versions():
    """What torch 2.15 has, whichever version is installed."""
    assert {"GradientReductionHandle", "ShardPlacementResult"} <= set(ours.__all__)
    newer = {"set_keep_unsharded_storage", "set_manual_backward_finalization", "finalize_backward"}
    assert newer <= methods(ours.FSDPModule)
    assert set(theirs.__all__) - set(ours.__all__) <= FSDP1


FSDP1 = frozenset(
    """BackwardPrefetch CPUOffload FullOptimStateDictConfig FullStateDictConfig FullyShardedDataParallel
    LocalOptimStateDictConfig LocalStateDictConfig MixedPrecision OptimStateDictConfig OptimStateKeyType ShardedOptimStateDictConfig
    ShardedStateDictConfig ShardingStrategy StateDictConfig StateDictSettings StateDictType""".split()
)
