"""Styles that convert the inputs and outputs of a module and leave its parameters alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import LayoutError, Placement
from shardwise.parallel.parallel_style import ParallelStyle, distributed, placements_tuple

__all__ = ["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]

Layouts = Placement | Sequence[Placement | None] | None


# AssertionError is what torch raises here.
class _LengthError(LayoutError, AssertionError):
    """There are more or fewer desired layouts than layouts."""


def _check_lengths(name: str, declared: Sequence[Any], wanted: Sequence[Any]) -> None:
    if len(declared) != len(wanted):
        raise _LengthError(
            f"{name} and desired_{name} should have same length! They have {len(declared)} and {len(wanted)} entries.",
            why="Each layout has the layout that it is converted to.",
            fix="Use None for values that are not converted.",
        )


def _convert(x: Any, declared: Any, wanted: Any, mesh: DeviceMesh, local: bool) -> Any:
    """A value in the wanted placement; as it is if its placement is not declared, or it is no tensor."""
    if declared is None or not isinstance(x, Tensor):
        return x
    out = distributed(x, mesh, declared, declared if wanted is None else wanted)
    return out.to_local() if local else out


def _convert_all(
    what: str, values: Sequence[Any], declared: Sequence[Any], wanted: Sequence[Any], *how: Any
) -> tuple[Any, ...]:
    if len(values) != len(declared):
        raise LayoutError(
            f"module {what}s and {what}_layouts should have same length! There are {len(values)} and {len(declared)}.",
            why="Each value has its own layout, or None if it is not converted.",
            fix=f"Pass {len(values)} layouts; values that are passed by name are not among them.",
        )
    return tuple(_convert(x, a, b, *how) for x, a, b in zip(values, declared, wanted, strict=True))


class PrepareModuleInput(ParallelStyle):
    """Convert the inputs of a module: plain tensors become DTensors, which are redistributed.

    Args:
        input_layouts: the placement of each positional input that is a plain tensor; None for values to leave alone.
        desired_input_layouts: the placement that each of them is redistributed to.
        input_kwarg_layouts: the same for keyword arguments, by name.
        desired_input_kwarg_layouts: the placements that they are redistributed to.
        use_local_output: pass the block of this rank to the module instead of a DTensor.
    """

    _shown = (
        "input_layouts",
        "desired_input_layouts",
        "input_kwarg_layouts",
        "desired_input_kwarg_layouts",
        "use_local_output",
    )

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts, self.desired_input_layouts = (
            None if given is None else placements_tuple(given)
            for given in (input_layouts, desired_input_layouts)
        )
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            if self.desired_input_layouts is None:
                raise _LengthError(
                    "desired module inputs should not be None!",
                    why="input_layouts were given without the layouts to convert them to.",
                    fix="PrepareModuleInput(input_layouts=..., desired_input_layouts=...)",
                )
            _check_lengths("input_layouts", self.input_layouts, self.desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.with_kwargs = input_kwarg_layouts is not None
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise LayoutError(
                f"input_kwarg_layouts has {sorted(self.input_kwarg_layouts)} and desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}.",
                why="Each layout has the layout that it is converted to.",
                fix="Give both for the same names.",
            )

    def _problems(self, module: nn.Module, device_mesh: DeviceMesh) -> list[str]:
        parameters = inspect.signature(module.forward).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return []
        return [
            f"PrepareModuleInput: {type(module).__name__}.forward has no argument {name!r}; it has {', '.join(parameters)}"
            for name in self.input_kwarg_layouts
            if name not in parameters
        ]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        how = device_mesh, self.use_local_output

        def enter(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if self.input_layouts is not None and self.desired_input_layouts is not None:
                args = _convert_all("input", args, self.input_layouts, self.desired_input_layouts, *how)
            wanted = self.desired_input_kwarg_layouts
            declared = {name: p for name, p in self.input_kwarg_layouts.items() if name in kwargs}
            changed = {n: _convert(kwargs[n], p, wanted[n], *how) for n, p in declared.items()}
            return args, kwargs | changed

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Convert the outputs of a module: plain tensors become DTensors, which are redistributed.

    Args:
        output_layouts: the placement of each output that is a plain tensor; None for values to leave alone.
        desired_output_layouts: the placement that each of them is redistributed to.
        use_local_output: return the block of this rank instead of a DTensor.
    """

    _shown = ("output_layouts", "desired_output_layouts", "use_local_output")

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.output_layouts = placements_tuple(output_layouts)
        self.desired_output_layouts = placements_tuple(desired_output_layouts)
        self.use_local_output = use_local_output
        _check_lengths("output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        how = self.output_layouts, self.desired_output_layouts, device_mesh, self.use_local_output

        def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            converted = _convert_all("output", out if isinstance(out, tuple) else (out,), *how)
            return converted if isinstance(out, tuple) else converted[0]

        module.register_forward_hook(leave)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """Convert the inputs and the outputs of a module: `PrepareModuleInput` and `PrepareModuleOutput` in one.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: see `PrepareModuleInput`.
        use_local_input: pass the block of this rank to the module instead of a DTensor.
        output_layouts, desired_output_layouts, use_local_output: see `PrepareModuleOutput`.
    """

    _shown = ("prepare_module_input", "prepare_module_output")

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
        self.use_local_output = use_local_output

    def _problems(self, module: nn.Module, device_mesh: DeviceMesh) -> list[str]:
        return self.prepare_module_input._problems(module, device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)
