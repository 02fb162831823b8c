"""What no tensor can make up for: objects of clients and of torch that are replaced when they are imported under `install()`.

A row names a module, an object in it and what replaces the object; the reason is the docstring of the replacement. A name
that a release of the client does not have is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.api.distribute import distribute_tensor
from shardwise.comm import PerRank, first_rank
from shardwise.comm.simulate import is_simulated, per_rank
from shardwise.drop_in.copied_modules import forward_of_copies
from shardwise.layout import Placement, Replicate, Shard
from shardwise.parallel.data.api import fully_shard
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import policy
from shardwise.torch_internals.dtensor_class import (
    DYNAMO_BUILDER,
    DYNAMO_RULES,
    inline_from_local,
    without_dtensor,
)
from shardwise.torch_internals.fsdp_division import (
    FSDP_COLLECTIVES,
    FSDP_FUNCTIONS,
    FSDP_PARAMETERS,
    divide_once,
)
from shardwise.torch_internals.module_fixer import ModuleFixer
from shardwise.torch_internals.modules import own_parameters

__all__ = ["FIXES", "client_fixer"]


def _with_global_sizes(add_hooks: Callable[..., None]) -> Callable[..., None]:
    """Give the adapter of a rowwise layer the global `in_features`; peft leaves it at the size of the block.

    transformers takes `in_features` for the global width of the input, so training fails, on torch's DTensor as well.
    """

    @wraps(add_hooks)
    def add_hooks_and_sizes(tp_module: Any, *args: Any, **kwargs: Any) -> None:
        add_hooks(tp_module, *args, **kwargs)
        tp_module.out_features, tp_module.in_features = tp_module.weight.shape

    return add_hooks_and_sizes


def _with_equal_plain_tensors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let plain tensors be replicated: peft multiplies one factor of an adapter, a DTensor, with the other, a plain one.

    It is compared between ranks, and an error on all of them if it differs.
    """

    @wraps(method)
    def merged(*args: Any, **kwargs: Any) -> Any:
        with policy(plain="check"):
            return method(*args, **kwargs)

    return merged


def _reduce_new_gradients(install_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Sum the gradient of each backward pass over the mesh; transformers sums the accumulated one, earlier passes again."""

    @wraps(install_forward)
    def install(style: object, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        forward = module.forward
        hooked: dict[
            str, nn.Parameter
        ] = {}  # loading replaces parameters, so they are found in the forward pass

        def reduce(grad: Tensor) -> Tensor:
            total = grad.clone()
            dist.all_reduce(total, group=mesh.get_group())
            return total

        def forward_with_hooks(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                for name, p in module.named_parameters(recurse=False):
                    if p.requires_grad and hooked.get(name) is not p:
                        p.register_hook(reduce)  # runs before the gradient is added to that of earlier passes
                        hooked[name] = p
            return forward(*args, **kwargs)

        module.forward = forward_with_hooks
        return module

    return install


def _blocks_of_all_ranks(shard_tensor: Callable[..., Any]) -> Callable[..., Any]:
    """In a simulation, read the blocks of all ranks; transformers asks for the number of its rank, and gets that of the first."""

    @wraps(shard_tensor)
    def blocks(operation: Any, source: Any, tensor_idx: int | None = None, **how: Any) -> Any:
        if not is_simulated():
            return shard_tensor(operation, source, tensor_idx, **how)
        full = source[...].to(**how)
        placements = operation.placements
        if full.ndim == operation.param_ndim - 1:  # one expert of a stacked parameter
            # parts of a packed dim are read one by one, so each is split as a whole
            placements = [Shard(p.dim - 1) if _splits_inner(p) else Replicate() for p in placements]
        return distribute_tensor(full, operation.device_mesh, placements, src_data_rank=None).to_local()

    return blocks


def _splits_inner(p: Placement) -> bool:
    return getattr(p, "dim", 0) != 0


def _experts_of_ranks(set_parameter: Callable[..., Any]) -> Callable[..., Any]:
    """In a simulation, give each rank its experts, once they are stacked: all ranks have read all of them."""

    @wraps(set_parameter)
    def set_blocks(model: nn.Module, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if is_simulated() and isinstance(value, Tensor):
            module, _, last = name.rpartition(".")
            ref = getattr(model.get_submodule(module), last)
            if isinstance(ref, DTensor) and _has_all_rows(value, ref):
                placements = [p if _splits_inner(p) else Replicate() for p in ref.placements]
                whole = DTensor.from_local(
                    value.detach(), ref.device_mesh, placements, shape=ref.shape, stride=ref.stride()
                )
                value = whole.redistribute(placements=ref.placements).to_local()
        return set_parameter(model, name, value, *args, **kwargs)

    return set_blocks


def _has_all_rows(value: Tensor, ref: DTensor) -> bool:
    """Whether a block has rows of all ranks, and is what the layout says otherwise."""
    block = ref._local_tensor.shape
    return value.ndim == ref.ndim > 0 and (value.shape[0], *block[1:]) == (
        ref.shape[0],
        *value.shape[1:],
    ) != tuple(block)


def _parameters_of_ranks(finalize: Callable[..., Any]) -> Callable[..., Any]:
    """In a simulation, give each rank its own plain parameters, beside DTensors; on processes each has its own anyway."""

    @wraps(finalize)
    def finalized(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = finalize(model, *args, **kwargs)
        if is_simulated() and any(isinstance(p, DTensor) for p in model.parameters()):
            spread: dict[int, Any] = {}  # tied parameters stay tied
            for module in model.modules():
                for name, p in own_parameters(module).items():
                    if p is not None and not isinstance(p, DTensor | PerRank):
                        if id(p) not in spread:
                            spread[id(p)] = per_rank(_copy(p))
                        own_parameters(module)[name] = spread[id(p)]
        return out

    return finalized


def _copy(p: Tensor) -> Callable[[int], Tensor]:
    return lambda rank: p.detach().clone().requires_grad_(p.requires_grad)


def _values_of_first_rank(gather: Callable[..., Any]) -> Callable[..., Any]:
    """In a simulation, gather what the first rank has: it is the one that saves."""

    @wraps(gather)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        state = gather(*args, **kwargs)
        return {name: first_rank(t) for name, t in state.items()} if is_simulated() else state

    return gathered


def _refuse_simulation(method: Callable[..., Any]) -> Callable[..., Any]:
    """Raise in a simulation: the code asks for the number of its rank, and would take each rank for the first."""

    @wraps(method)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if is_simulated():
            raise _not_simulated(f"{method.__module__}.{method.__qualname__}")
        return method(*args, **kwargs)

    return refused


def _ours_in_simulation(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """In a simulation, shard with shardwise's engine: torch's takes the part of the rank whose number it asks for."""

    @wraps(theirs)
    def shard(module: Any, **how: Any) -> Any:
        return fully_shard(module, **how) if is_simulated() else theirs(module, **how)

    return shard


def _not_simulated(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} was called in a simulation.\n"
        "  why: It takes the part of the rank whose number it asks for, and a simulation runs one program for all ranks.\n"
        "  fix: Run the program on real processes, shardwise.launch(main, 4), or use shardwise's own in a simulation:\n"
        "       shardwise.fsdp.fully_shard, shardwise.parallel.parallelize_module"
    )


FIXES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "peft.tuners.lora.model": {"add_lora_tp_hooks_dtensor": _with_global_sizes},
    "peft.tuners.lora.layer": {
        f"{layer}.{method}": _with_equal_plain_tensors
        for layer in ("Linear", "Embedding")
        for method in ("merge", "unmerge", "get_delta_weight")
    },
    "transformers.distributed.tensor_parallel": {
        "TensorParallelLayer.install_forward": forward_of_copies,
        "MoeExpertsParallel.install_forward": forward_of_copies,
        "ReplicatedWithGradAllReduce.install_forward": lambda install: forward_of_copies(
            _reduce_new_gradients(install)
        ),
    },
    "transformers.core_model_loading": {"set_param_for_module": _experts_of_ranks},
    "transformers.modeling_utils": {"PreTrainedModel._finalize_model_loading": _parameters_of_ranks},
    "transformers.distributed.mixin": {
        "DistributedMixin.gather_sharded_state_dict_for_save": _values_of_first_rank
    },
    "transformers.distributed.sharding_utils": {"DtensorShardOperation.shard_tensor": _blocks_of_all_ranks},
    "transformers.distributed.expert_parallel": {
        "ExpertParallelLayer.install_forward": forward_of_copies,
        "EpDispatchExpertsParallel.install_forward": forward_of_copies,
        "EpRouterParallel.transform_output_post_forward": _refuse_simulation,
        "EpDispatchExpertsParallel.transform_inputs_pre_forward": _refuse_simulation,
    },
    FSDP_PARAMETERS: {"FSDPParam.__init__": _refuse_simulation},
    FSDP_FUNCTIONS: {"fully_shard": _ours_in_simulation},
    DYNAMO_BUILDER: {"torch": without_dtensor},
    DYNAMO_RULES: {"manual_torch_name_rule_map": inline_from_local},
    FSDP_COLLECTIVES: {"_get_gradient_divide_factors": divide_once},
}
"""By module, the objects that are replaced and the functions that make their replacements."""


def _apply(module: ModuleType) -> None:
    """Replace what the table names."""
    for path, fix in FIXES[module.__name__].items():
        *owners, name = path.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        if owner is not None and hasattr(owner, name):
            setattr(owner, name, fix(getattr(owner, name)))


def client_fixer() -> ModuleFixer:
    """The import hook that applies the table."""
    return ModuleFixer(dict.fromkeys(FIXES, _apply))
