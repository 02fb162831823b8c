"""`DistributedDataParallel` of a tensor-parallel module, which torch calls under these names.

Between calls the module has its blocks as plain parameters, which DDP reduces; in a call it has DTensors of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.modules import own_parameters

__all__: list[str] = []


def _localize_dtensor(module: nn.Module, *_: Any, ignored_params: Iterable[nn.Parameter] = ()) -> None:
    """Give the module its blocks as parameters: those of before a call, or those of its DTensors."""
    ignored = {id(p) for p in ignored_params or ()}
    new: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        params = own_parameters(owner)
        for name, param in list(params.items()):
            if hasattr(param, "_dtensor_spec"):
                owner.__dict__.pop(name, None)
            elif isinstance(param, DTensor) and id(param) not in ignored:
                if id(param) not in new:
                    block: Any = nn.Parameter(param.to_local().detach(), param.requires_grad)
                    block._dtensor_spec = param._spec
                    new[id(param)] = block
                params[name] = new[id(param)]


def _reconstruct_dtensor(module: nn.Module, _input: Any) -> None:
    """Let the module find DTensors, of which its parameters are the blocks, until the call ends."""
    made: dict[int, DTensor] = {}
    for owner in module.modules():
        for name, param in own_parameters(owner).items():
            spec: Spec | None = getattr(param, "_dtensor_spec", None)
            if param is None or spec is None:
                continue
            if id(param) not in made:
                made[id(param)] = DTensor.from_local(
                    param, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride
                )
            # found before the parameter of the same name, which stays registered
            owner.__dict__[name] = made[id(param)]


def _pre_dp_module_transform(module: nn.Module) -> None:
    """Prepare a tensor-parallel module for `DistributedDataParallel`."""
    _localize_dtensor(module)
    module.register_forward_pre_hook(_reconstruct_dtensor)
    module.register_forward_hook(_localize_dtensor)
