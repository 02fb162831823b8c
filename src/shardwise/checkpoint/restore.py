"""What is loaded into what: the stored tree beside the state of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api.factories import empty
from shardwise.checkpoint.description import clean_key, parameter_names, parameter_numbers
from shardwise.checkpoint.errors import CheckpointMismatchError
from shardwise.checkpoint.metadata import StoredTensor
from shardwise.checkpoint.values import children, decode, is_plain, tensor_name
from shardwise.layout import Replicate, Shard
from shardwise.tensor.dtensor import DTensor

__all__ = ["Restoration", "plan_restore"]


@dataclass
class Restoration:
    """A plan: the tensors to fill by the names of what is stored, and the values to set when they are filled."""

    find: Callable[[str], StoredTensor | None]
    strict: bool
    names: Mapping[Any, str] = field(default_factory=dict)
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    setters: list[Callable[[], object]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _filled: dict[int, list[tuple[str, Tensor]]] = field(default_factory=dict)

    def restore(self, target: Any, stored: Any, path: str) -> Any:
        """The value of `target` after loading; tensors and objects are those of `target`."""
        if isinstance(target, Tensor):
            return self._fill(target, stored, path)
        if isinstance(target, nn.Module):
            self._restore_module(target, stored, path)
        elif isinstance(target, torch.optim.Optimizer):
            self._restore_optimizer(target, stored, path)
        elif hasattr(target, "load_state_dict") and not isinstance(target, type):
            state = decode(stored, self._whole)
            self.setters.append(lambda: target.load_state_dict(state))
        elif isinstance(target, MutableMapping) and (not path or not is_plain(target)):
            self._restore_mapping(target, stored, path)
        elif is_plain(target):
            return self._replace(target, decode(stored, self._whole))
        elif isinstance(target, list | tuple):
            return self._restore_sequence(target, stored, path)
        return target

    def _replace(self, target: Any, value: Any) -> Any:
        """The value for a plain one; a dict stays the same object."""
        if type(target) is not dict or type(value) is not dict:
            return value

        def replace() -> None:
            target.clear()
            target.update(value)

        self.setters.append(replace)
        return target

    def _fill(self, target: Tensor, stored: Any, path: str) -> Tensor:
        name = tensor_name(stored)
        known = None if name is None else self.find(name)
        if name is None or known is None:
            self.problems.append(f"{path} is not a tensor in the checkpoint")
        elif target.is_meta:
            self.problems.append(
                f"{path} is on the meta device: call shardwise.materialize(model) or to_empty first"
            )
        elif isinstance(target, DTensor) and target.sharding.partial:
            self.problems.append(
                f"{path} is pending ({target.sharding}): load into a tensor without Partial placements"
            )
        elif known.shape != tuple(target.shape):
            self.problems.append(
                f"{path} has shape {known.shape} in the checkpoint, not {tuple(target.shape)}"
            )
        elif known.dtype != target.dtype and not (
            known.dtype.is_floating_point and target.is_floating_point()
        ):
            self.problems.append(f"{path} has dtype {known.dtype} in the checkpoint, not {target.dtype}")
        elif not any(t is target and self.find(n) is known for n, t in self._filled.get(id(target), ())):
            self._filled.setdefault(id(target), []).append((name, target))  # a tied parameter is read once
            self.tensors.append((name, target))
        return target

    def _whole(self, name: str) -> Any:
        """A stored tensor as a new plain tensor."""
        known = self.find(name)
        if known is None:
            self.problems.append(f"{name} is not in the checkpoint")
            return None
        out = torch.empty(known.shape, dtype=known.dtype)
        self.tensors.append((name, out))
        return out

    def _restore_module(self, target: nn.Module, stored: Any, path: str) -> None:
        found = children(stored) or {}
        extra = {}
        state = target.state_dict(keep_vars=True)
        keys = {clean_key(k): k for k in state}
        self._compare_keys(keys, found, path)
        for key in keys.keys() & found.keys():
            if isinstance(state[keys[key]], Tensor):
                self._fill(state[keys[key]], found[key], f"{path}.{key}" if path else key)
            else:
                extra[keys[key]] = decode(found[key], self._whole)
        if extra:  # of modules with get_extra_state
            self.setters.append(lambda: target.load_state_dict(extra, strict=False))

    def _compare_keys(self, keys: Any, found: Any, path: str) -> None:
        if self.strict:
            where = f" of {path}" if path else ""
            self.problems += [f"{k}{where} is missing in the checkpoint" for k in keys if k not in found]
            self.problems += [f"{k}{where} of the checkpoint is unknown here" for k in found if k not in keys]

    def _restore_mapping(self, target: MutableMapping[Any, Any], stored: Any, path: str) -> None:
        found = children(stored)
        if found is None:
            self.problems.append(f"{path or 'the state'} is not a dict in the checkpoint")
            return
        self._compare_keys(target, found, path)
        for key in [k for k in target if k in found]:
            before = target[key]
            after = self.restore(before, found[key], f"{path}.{key}" if path else str(key))
            if after is not before:
                self.setters.append(lambda key=key, after=after: target.__setitem__(key, after))  # type: ignore[misc]

    def _restore_sequence(self, target: Any, stored: Any, path: str) -> Any:
        items = (
            stored if isinstance(stored, list) else stored.get("items") if isinstance(stored, dict) else None
        )
        if not isinstance(items, list) or len(items) != len(target):
            self.problems.append(f"{path} is not a sequence of {len(target)} values in the checkpoint")
            return target
        after = [
            self.restore(t, s, f"{path}.{i}") for i, (t, s) in enumerate(zip(target, items, strict=True))
        ]
        if isinstance(target, list):
            self.setters.append(lambda: target.__setitem__(slice(None), after))
            return target
        return tuple(after)

    def _restore_optimizer(self, target: torch.optim.Optimizer, stored: Any, path: str) -> None:
        """Parameters that the checkpoint has no state for have none afterwards, as when it was saved."""
        now = target.state_dict()
        found = children(stored) or {}
        groups, states = found.get("param_groups"), children(found.get("state"))
        if not isinstance(groups, list) or states is None or not isinstance(now.get("state"), Mapping):
            state = decode(stored, self._whole)
            self.setters.append(lambda: target.load_state_dict(state))
            return
        numbers = {name: i for i, name in parameter_numbers(target, self.names).items()}
        parameters = [p for g in target.param_groups for p in g["params"]]
        saved = [
            str(name) for g in groups for name in decode((children(g) or {}).get("params", []), self._whole)
        ]
        if all(name == str(i) for i, name in enumerate(saved)):  # saved without names
            numbers = {name: i for i, name in enumerate(saved[: len(parameters)])}
        self._compare_keys(numbers, saved, f"{path}.param_groups")
        self._compare_group_count(target, groups, path)
        if self.problems:
            return
        state = {
            numbers[str(name)]: self._parameter_state(parameters[numbers[str(name)]], s)
            for name, s in states.items()
            if str(name) in numbers
        }
        options = [
            {
                **decode({k: v for k, v in (children(g) or {}).items() if k != "params"}, self._whole),
                "params": own["params"],
            }
            for g, own in zip(groups, now["param_groups"], strict=True)
        ]
        after = {"state": state, "param_groups": options}
        self.setters.append(lambda: target.load_state_dict(after))

    def _compare_group_count(self, target: torch.optim.Optimizer, groups: list[Any], path: str) -> None:
        if len(groups) != len(target.param_groups):
            self.problems.append(
                f"{path} has {len(groups)} groups of parameters in the checkpoint, not {len(target.param_groups)}"
            )

    def _parameter_state(self, parameter: Tensor, stored: Any) -> dict[str, Any]:
        """New tensors for the state of a parameter; those of its shape are laid out as it is, others that were split are split."""

        def tensor(name: str) -> Any:
            known = self.find(name)
            is_alike = known is not None and known.shape == tuple(parameter.shape)
            if known is None or not isinstance(parameter, DTensor) or (known.is_plain and not is_alike):
                return self._whole(name)
            if is_alike:
                out = torch.empty_like(parameter, dtype=known.dtype, requires_grad=False)
            else:
                out = _split_like(parameter, known)
            self.tensors.append((name, out))
            return out

        with torch.no_grad():
            return {k: decode(v, tensor) for k, v in (children(stored) or {}).items()}


def _split_like(parameter: DTensor, stored: StoredTensor) -> DTensor:
    """A new tensor of another shape than the parameter, split over the same axes along the dim that the checkpoint has in parts."""
    cut = next((d for d, cuts in enumerate(stored.grid.cuts) if len(cuts) > 2), None)
    placements = [
        Replicate() if cut is None or p.is_replicate() else Shard(cut) for p in parameter.placements
    ]
    return empty(stored.shape, dtype=stored.dtype, device_mesh=parameter.device_mesh, placements=placements)


def plan_restore(
    state: Any, tree: Any, find: Callable[[str], StoredTensor | None], strict: bool, source: object
) -> tuple[Restoration, Any]:
    """The plan of loading a stored tree into a state, and what the state is then; nothing has changed yet."""
    plan = Restoration(find, strict, parameter_names(state))
    after = decode(tree, plan._whole) if state is None else plan.restore(state, tree, "")
    if plan.problems:
        listed = "".join(f"\n    - {p}" for p in plan.problems[:20])
        more = f"\n    ... and {len(plan.problems) - 20} more" if len(plan.problems) > 20 else ""
        raise CheckpointMismatchError(
            f"The checkpoint {source} does not fit the state:{listed}{more}",
            why="Each value is loaded from the one at the same place in the state that was saved; nothing was changed on the ranks that it does not fit.",
            fix="Load into a state of the same form, or load(..., strict=False) for the keys that both have.",
        )
    return plan, after
