"""What a state consists of: a tree of plain values in JSON, and its tensors by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.errors import CheckpointStateError
from shardwise.checkpoint.safetensors_file import has_name
from shardwise.checkpoint.values import encode
from shardwise.comm import PerRank
from shardwise.layout import Replicate
from shardwise.tensor.dtensor import DTensor

__all__ = ["Description", "clean_key", "describe_state", "parameter_names"]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing add to the names of parameters."""


@dataclass
class Description:
    """A state: `tree` in JSON, the tensors in it by name, and names that mean the same tensor as another."""

    tree: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    _seen: dict[int, tuple[Tensor, str]] = field(default_factory=dict)

    def keep(self, tensor: Tensor, path: str) -> str:
        """The name under which a tensor is saved; a tensor that is there already is saved once."""
        check_tensor(tensor, path)
        name, number = path, 1
        while name in self.tensors or name in self.aliases:
            number += 1
            name = f"{path}#{number}"
        _, known = self._seen.setdefault(id(tensor), (tensor, name))
        if known != name:
            self.aliases[name] = known
        else:
            self.tensors[name] = tensor.detach()
        return name


def describe_state(state: Any) -> Description:
    """The tree and the tensors of a state; nothing is copied."""
    out = Description()
    with torch.no_grad():
        out.tree = encode(_with_states(state, parameter_names(state)), "", out.keep)
    # in one order on all ranks, whatever the order of their dicts is
    out.tensors = dict(sorted(out.tensors.items()))
    return out


def _with_states(value: Any, names: Mapping[Any, str]) -> Any:
    """A value in which modules, optimizers and other objects are replaced by their states."""
    if isinstance(value, Tensor | Counter):
        return value
    if isinstance(value, nn.Module):
        # keep_vars: tied parameters are the same object, on every rank alike
        return {clean_key(k): v for k, v in value.state_dict(keep_vars=True).items()}
    if isinstance(value, torch.optim.Optimizer):
        return optimizer_state(value, names)
    if hasattr(value, "state_dict") and not isinstance(value, type):
        return _with_states(value.state_dict(), names)
    if isinstance(value, Mapping):
        return {k: _with_states(v, names) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_states(v, names) for v in value]
    if isinstance(value, tuple):
        return tuple(_with_states(v, names) for v in value)
    return value


def clean_key(key: str) -> str:
    """The name of a parameter without what wrappers add to it."""
    for wrapper in _WRAPPERS:
        key = key.replace(wrapper, "")
    return key


def modules_in(state: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a state and where they are."""
    if isinstance(state, nn.Module):
        yield "", state
    elif isinstance(state, Mapping):
        for k, v in state.items():
            for path, module in modules_in(v):
                yield (f"{k}.{path}" if path else str(k)), module


def parameter_names(state: Any) -> dict[Any, str]:
    """The names of the parameters of all modules in a state; where there are several modules, with the path of theirs."""
    found = list(modules_in(state))
    out: dict[Any, str] = {}
    for path, module in found:
        prefix = f"{path}." if len(found) > 1 and path else ""
        for name, parameter in module.named_parameters():  # a tied parameter has its first name
            out.setdefault(parameter, prefix + clean_key(name))
    return out


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> Any:
    """The state of an optimizer with the names of parameters for their numbers, where a module of the state has them."""
    found = optimizer.state_dict()
    if not _is_numbered(found):
        return found  # an optimizer with a form of its own
    by_number = parameter_numbers(optimizer, names)
    groups = [{**g, "params": [by_number[i] for i in g["params"]]} for g in found["param_groups"]]
    state = {by_number[i] if i in by_number else str(i): _reduced(v) for i, v in found["state"].items()}
    return {**found, "state": state, "param_groups": groups}


def _reduced(value: Any) -> Any:
    """The state of a parameter with its pending tensors reduced; LBFGS has quotients of sums, which no layout can express."""
    if isinstance(value, DTensor) and value.sharding.partial:
        return value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])
    if isinstance(value, Mapping):
        return {k: _reduced(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_reduced, value))
    return value


def _is_numbered(found: Mapping[str, Any]) -> bool:
    return isinstance(found.get("state"), Mapping) and all(
        isinstance(g.get("params"), list) for g in found.get("param_groups", [{}])
    )


def parameter_numbers(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[int, str]:
    """The names of an optimizer's parameters by their numbers in its state dict."""
    out: dict[int, str] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            out[len(out)] = names.get(p, str(len(out)))
    return out


def check_tensor(tensor: Tensor, path: str) -> None:
    """Refuse tensors that have no values of their own to save."""
    what, why, fix = "", "", ""
    if isinstance(tensor, PerRank):
        what = "has different values on each simulated rank"
        why = "A plain tensor counts as the same on all ranks and is saved once."
        fix = "Make it a DTensor: DTensor.from_local(x, mesh, [Shard(0)])."
    elif isinstance(tensor, DTensor) and tensor.sharding.partial:
        what = f"is pending: {tensor.sharding}"
        why = "Each rank holds a term of a reduction that has not been done, so no rank has its values."
        fix = "x.redistribute(placements=[Replicate(), ...]) before it is saved."
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        what = "is sparse or quantized"
        why = "Files have dense values."
        fix = "Save x.to_dense(), or its values and indices."
    elif tensor.is_nested:
        what = "is a nested tensor"
        why = "Files have tensors of one shape."
        fix = "Save x.unbind(), the list of its tensors."
    elif not has_name(tensor.dtype):
        what = f"has dtype {tensor.dtype}, which files of safetensors have no name for"
        why = "Files state the dtypes of their tensors."
        fix = "Save x.view(torch.uint8), or another dtype."
    elif tensor.is_meta:
        what = "is on the meta device"
        why = "It has no values."
        fix = "Call shardwise.materialize(model) first."
    if what:
        raise CheckpointStateError(f"state[{path!r}] {what}.", why=why, fix=fix)
