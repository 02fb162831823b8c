"""The modules and names of torch's package that clients import, and what the tests of `install` run in forks."""

from __future__ import annotations

import importlib
import runpy
import sys
from typing import Any

NAMES: dict[str, str] = {
    "": "DTensor DeviceMesh init_device_mesh distribute_tensor distribute_module Shard Replicate Partial Placement"
    " _StridedShard ones zeros empty full rand randn _DTensorSpec _TensorMeta _api _utils _random _redistribute"
    " placement_types device_mesh _dtensor_spec _ops experimental",
    "placement_types": "Placement Shard Replicate Partial _StridedShard _MaskPartial DTensorSpec TensorMeta",
    "_dtensor_spec": "DTensorSpec TensorMeta ShardOrder ShardOrderEntry",
    "_api": "DTensor DTensorSpec distribute_tensor _FromTorchTensor _ToTorchTensor _normalize_placements_for_grad",
    "device_mesh": "DeviceMesh init_device_mesh",
    "_utils": "compute_local_shape_and_global_offset _compute_local_shape_and_global_offset"
    " ExplicitRedistributionContext compute_global_tensor_info compute_global_tensor_shape compute_local_tensor_info"
    " assert_no_mixed_partial_types normalize_to_torch_size try_find_mesh_from_args",
    "_collective_utils": "fill_empty_tensor_to_shards mesh_broadcast mesh_scatter pad_tensor redistribute_cost"
    " shard_dim_alltoall unpad_tensor",
    "_sharding_prop": "ShardingPropagator",
    "_random": "manual_seed",
    "_redistribute": "redistribute_local_tensor",
    "_shards_wrapper": "LocalShardsWrapper",
    "debug": "CommDebugMode visualize_sharding _clear_sharding_prop_cache",
    "debug._comm_mode": "CommDebugMode",
    "debug._op_coverage": "get_inductor_decomp_graphs print_op_coverage_summary",
    "debug._visualize_sharding": "visualize_sharding",
    "experimental._register_sharding": "register_sharding",
    "experimental": "local_map implicit_replication register_sharding context_parallel",
    "experimental._func_map": "_local_map_wrapped",
    "experimental._attention": "set_rotate_method _HeadTailLoadBalancer _PTRRLoadBalancer _context_parallel_shard"
    " _enable_context_parallel_dispatcher",
    "experimental._context_parallel._attention": "flex_cp_allgather",
    "experimental._context_parallel._cp_custom_ops": "flex_cp_allgather",
    "experimental._context_parallel._sharding_rules": "register_cp_sharding_rules unregister_cp_sharding_rules",
    "parallel": "ColwiseParallel ParallelStyle PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput"
    " RowwiseParallel SequenceParallel parallelize_module loss_parallel",
    "parallel.ddp": "_pre_dp_module_transform _localize_dtensor _reconstruct_dtensor",
    "parallel.fsdp": "DTensorExtensions",
    "_ops._pointwise_ops": "register_inductor_prims",
    "_ops.utils": "prod",
    "_ops._view_ops": "InputDim Split infer_size view_groups",
}
"""By module, without the name of the package."""


def torch_files() -> list[str]:
    """Modules that were loaded from the files of torch's package."""
    return [
        name
        for name, module in list(sys.modules.items())
        if "torch/distributed/tensor" in (getattr(module, "__file__", None) or "")
    ]


def missing_names(package: str, install: bool) -> list[str]:
    """Names that the package, with or without `install`, does not have; and checks of `install` itself."""
    import shardwise

    out = []
    if install:
        assert not shardwise.installed()
        shardwise.install()
        shardwise.install()
    assert shardwise.installed() is install
    for module, names in NAMES.items():
        found = importlib.import_module(f"{package}.{module}".rstrip("."))
        assert found is importlib.import_module(f"shardwise.{module}".rstrip("."))
        out += [f"{module}.{n}" for n in names.split() if not hasattr(found, n)]
    return out + (torch_files() if install else [])


def files_of_torch_after(modules: list[str]) -> list[str]:
    """Import clients after `install`; what of torch's package they loaded."""
    import shardwise

    shardwise.install()
    for module in modules:
        importlib.import_module(module)
    import torch

    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = torch.distributed.tensor.distribute_tensor(torch.ones(4, 3), mesh, [shardwise.Shard(0)])
        assert (x + 1).sum().item() == 24
    assert torch.distributed.tensor.__spec__.name == "shardwise"
    return torch_files()


def error_of(path: str) -> str:
    """The error of a program."""
    try:
        sys.argv = [path]
        main: Any = type(sys)("__main__")
        main.__file__ = path
        sys.modules["__main__"] = main
        runpy.run_path(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def error_on(release: str) -> str:
    """The error of `install` on another release of torch."""
    import torch

    import shardwise

    torch.__version__ = release
    try:
        shardwise.install()
    except shardwise.InstallError as error:
        return str(error)
    return "none"


def error_of_unknown_module() -> str:
    """The error for a module of torch's package that we do not have."""
    import shardwise

    shardwise.install()
    try:
        importlib.import_module("torch.distributed.tensor._nothing")
    except ModuleNotFoundError as error:
        return str(error)
    return "none"


def fixed_client(folder: str) -> list[str]:
    """Import a client that has one of the objects that `install` puts right, and lacks another."""
    from pathlib import Path

    import torch

    import shardwise

    lora = Path(folder) / "peft" / "tuners" / "lora"
    lora.mkdir(parents=True)
    for part in (lora, lora.parent, lora.parent.parent):
        (part / "__init__.py").write_text("")
    (lora / "model.py").write_text("def add_lora_tp_hooks_dtensor(tp_module): pass\n")
    (lora / "layer.py").write_text("class Linear:\n    def merge(self): return 1\n")
    sys.path.insert(0, folder)
    shardwise.install()
    model = importlib.import_module("peft.tuners.lora.model")
    layer = importlib.import_module("peft.tuners.lora.layer")
    module = torch.nn.Linear(3, 2)
    module.in_features = 1
    model.add_lora_tp_hooks_dtensor(module)
    assert layer.Linear().merge() == 1
    kept = sorted(name for name in vars(layer.Linear) if not name.startswith("__"))
    return [
        "fixed" if module.in_features == 3 else "not fixed",
        "as it was" if kept == ["merge"] else str(kept),
    ]
