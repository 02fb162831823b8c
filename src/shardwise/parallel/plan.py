"""Reading a plan: which parameters get which layout and which modules which boundary, checked before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of
from shardwise.layout import Layout, LayoutError
from shardwise.parallel.attention import attention_layouts
from shardwise.parallel.boundary import Boundary
from shardwise.parallel.experts import holds_experts
from shardwise.parallel.keys import matching, near_misses, plan_names
from shardwise.parallel.module_tensors import Slot, device_problems, group_ties, owned_tensors, slots_of
from shardwise.parallel.named_layout import named_layout
from shardwise.parallel.named_styles import NAMED_STYLES
from shardwise.parallel.notation import is_notation, parameter_layout
from shardwise.tensor.dtensor import DTensor

__all__ = ["PlanError", "Resolved", "plan_axis", "plan_error", "read_names", "unmatched_problem"]


class PlanError(LayoutError):
    """A plan does not fit the module or the mesh; the error lists every problem of the plan."""


@dataclass(slots=True)
class Resolved:
    """What a plan of strings says about one module tree."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    boundaries: dict[str, Boundary] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def plan_axis(mesh: DeviceMesh, name: str = "tp") -> int:
    """The axis of a mesh that a plan splits over: its only one, or the one of that name."""
    axes = axes_of(mesh)
    if len(axes) == 1:
        return 0
    if name in axes.names:
        return axes.index(name)
    one = f'mesh["{axes.names[-1]}"]' if mesh.mesh_dim_names else "init_device_mesh(device, (n,))"
    raise PlanError(
        f"parallelize_module got a mesh without an axis {name!r}: ({axes}).",
        why="On a mesh of several axes a plan splits over the one of that name, and the others replicate the parameters.",
        fix=f"Pass a mesh of one axis, {one}, or name one of them {name!r}: mesh_dim_names=(..., {name!r}).",
    )


def read_names(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any]) -> tuple[Resolved, list[str]]:
    """The layouts and boundaries of a plan of strings, and all its problems."""
    reading = _Reading(module, mesh, plan)
    reading.read()
    return reading.resolved, reading.problems


def plan_error(problems: list[str]) -> PlanError:
    """One error for all problems of a plan."""
    listed = "".join(f"\n    - {p}" for p in problems)
    return PlanError(
        f"parallelize_module got a plan with {len(problems)} problem{'s' if len(problems) > 1 else ''}:{listed}",
        why="A plan is checked as a whole; nothing was changed.",
        fix="Correct the entries above; sw.describe(module) lists the names of all parameters.",
    )


def unmatched_problem(key: str, names: Iterable[str]) -> str:
    """The problem of a key that matches nothing."""
    near = near_misses(key, names)
    hint = f"; near misses: {', '.join(near)}" if near else ""
    return f"{key!r} matches no module or parameter{hint}"


class _Reading:
    """A plan of strings while it is read."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any]) -> None:
        self.module, self.mesh, self.plan = module, mesh, plan
        self.axis, self.axes = plan_axis(mesh), axes_of(mesh)
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.slots = {s.full_name: s for s in slots_of(module)}
        self.names = plan_names([*self.modules, *self.slots])
        self.resolved, self.problems = Resolved(), list[str]()
        self.keys: dict[str, str] = {}  # by parameter: the key that decided
        # modules under sequence parallelism scatter what row-parallel modules sum
        self.scatter = "sequence_parallel" in plan.values()

    def read(self) -> None:
        declared = declared_entries(self.module)
        entries = [(key, text) for key, text in self.plan.items() if self._is_known(key, text)]
        found = {key: [self.names[n] for n in matching(key, self.names)] for key, _ in entries}
        for key, text in entries:
            if not found[key] and (key, text) in declared:
                self.resolved.skipped.append(key)  # the model declares it for other configurations
            elif not found[key]:
                self.problems.append(unmatched_problem(key, [*self.modules, *self.slots]))
        # the key of a parameter comes before that of its module
        for key, text in entries:
            for name in found[key]:
                if name in self.slots:
                    self._place(key, self.slots[name], text)
        of_parameters = set(self.keys)
        for key, text in entries:
            for name in found[key]:
                if name in self.modules:
                    self._apply(key, name, text, of_parameters)
        # those that no key names are replicated
        self.problems += device_problems(((n, s.tensor) for n, s in self.slots.items()), self.mesh)
        self._check_ties()
        self._bound_owners()
        self._mark_experts()

    def _is_known(self, key: Any, text: Any) -> bool:
        if not isinstance(key, str):
            self.problems.append(
                f"the key {key!r} is no string; write {str(key)!r}, the name of a module or parameter"
            )
            return False
        if not isinstance(text, str):
            self.problems.append(f"{key!r}: {text!r} is neither a style, nor its name, nor a layout")
            return False
        if is_notation(text) or text in NAMED_STYLES:
            return True
        near = get_close_matches(text, NAMED_STYLES, n=3)
        hint = f"did you mean {' or '.join(near)}" if near else f"known are {', '.join(sorted(NAMED_STYLES))}"
        self.problems.append(f"{key!r} has the unknown style {text!r}; {hint}")
        return False

    def _apply(self, key: str, name: str, text: str, of_parameters: set[str]) -> None:
        """Give a module its boundary, and its own parameters their layouts."""
        module = self.modules[name]
        if is_notation(text):
            self.problems.append(
                f"{key!r} is a module and {text!r} the layout of a parameter; write {key + '.weight'!r}"
            )
            return
        style = NAMED_STYLES[text]
        if isinstance(module, nn.MultiheadAttention) and style.split == "out":
            self._split_heads(key, name, module, of_parameters)
            return
        for own, _ in owned_tensors(module):
            slot = self.slots[f"{name}.{own}" if name else own]
            if slot.full_name not in of_parameters:
                self._place(key, slot, text)
        self.resolved.boundaries[name] = Boundary(
            self.mesh, self.axis, style.inputs, style.outputs, self.scatter
        )

    def _split_heads(
        self, key: str, name: str, module: nn.MultiheadAttention, of_parameters: set[str]
    ) -> None:
        """Split the heads of an attention module, which reduces its output."""
        for own, layout in attention_layouts(module, self.axes, self.axis).items():
            slot = self.slots[f"{name}.{own}" if name else own]
            if slot.full_name not in of_parameters:
                self._settle(key, slot, layout)
        self.resolved.boundaries[name] = Boundary(self.mesh, self.axis, "gather", "reduce", self.scatter)

    def _place(self, key: str, slot: Slot, text: str) -> None:
        """Give a parameter the layout that a style or a notation says."""
        try:
            if is_notation(text):
                layout = parameter_layout(text, tuple(slot.tensor.shape), self.axes)
            else:
                parent = self.modules.get(slot.path.rpartition(".")[0]) if slot.path else None
                layout = named_layout(slot, NAMED_STYLES[text], self.axes, self.axis, parent)
        except LayoutError as error:
            self.problems.append(f"{key!r}: {error.what} {error.why}")
            return
        self._settle(key, slot, layout)

    def _settle(self, key: str, slot: Slot, layout: Layout) -> None:
        """Give a parameter its layout, unless it has another."""
        name, tensor = slot.full_name, slot.tensor
        known = self.resolved.layouts.get(name, layout)
        if isinstance(tensor, DTensor):
            if tensor.sharding is not layout:
                self.problems.append(
                    f"{key!r}: {name} is already distributed, as {tensor.sharding}; give the whole plan in one call"
                )
        elif known is not layout:
            self.problems.append(f"{name} is {known} by {self.keys[name]!r} and {layout} by {key!r}")
        else:
            self.resolved.layouts[name], self.keys[name] = layout, key

    def _check_ties(self) -> None:
        """A tensor that several modules share has one layout; where the plan names one of them, it is that one's."""
        layouts = self.resolved.layouts
        for group in group_ties(list(self.slots.values())):
            placed = {layouts[s.full_name]: s.full_name for s in group if s.full_name in layouts}
            if len(placed) > 1:
                each = " and ".join(f"{name} by {self.keys[name]!r} is {lay}" for lay, name in placed.items())
                self.problems.append(f"{each}, and they are one tied parameter")
            for layout in placed:
                layouts.update((s.full_name, layout) for s in group)

    def _bound_owners(self) -> None:
        """Modules that hold a split parameter and have no style of their own reduce what they leave pending."""
        for name, layout in self.resolved.layouts.items():
            if self.axis in layout.sharded:
                owner = self.slots[name].path
                boundary = Boundary(self.mesh, self.axis, "gather", "reduce", self.scatter)
                self.resolved.boundaries.setdefault(owner, boundary)

    def _mark_experts(self) -> None:
        """Modules whose experts the axis splits route tokens to them."""
        for name, boundary in self.resolved.boundaries.items():
            module = self.modules[name]
            own = {n: f"{name}.{n}" if name else n for n, _ in module.named_parameters(recurse=False)}
            layouts = {
                n: self.resolved.layouts[full] for n, full in own.items() if full in self.resolved.layouts
            }
            if len(layouts) == len(own) and holds_experts(module, layouts, self.axis):
                self.resolved.boundaries[name] = replace(boundary, experts=True)


def declared_entries(module: nn.Module) -> set[tuple[str, Any]]:
    """The entries of the plans that a model itself carries, as those of Hugging Face do: tensor and expert parallel."""
    plans = [getattr(module, name, None) for name in ("tp_plan", "ep_plan")]
    return {entry for plan in plans if isinstance(plan, Mapping) for entry in plan.items()}
