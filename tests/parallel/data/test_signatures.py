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
        assert [kind for _, kind in mine] == [kind for _, kind in torchs], name


@pytest.mark.parametrize(
    "name", ["MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy", "DataParallelMeshDims"]
)
def test_policies(name):
    mine, torchs = (inspect.signature(getattr(package, name)) for package in (ours, theirs))
    assert {n: p.default for n, p in mine.parameters.items()} == {
        n: p.default for n, p in torchs.parameters.items()
    }
