"""Building, loading and connecting the extension.

`kernel.cpp` has one kernel per op, which torch calls in place of `__torch_dispatch__`. It runs the calls that Python has
found to be direct, and passes on all others. Python remains the reference: the extension never decides anything itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.call.writes import watched
from shardwise.dispatch import dispatch, find_recipe, on_direct_route
from shardwise.dispatch.key import Entry
from shardwise.plan.settings import DEFAULT_SETTINGS, active, at_forget
from shardwise.tensor.dtensor import DTensor, local_slot
from shardwise.tensor.inference import inference_tensors
from shardwise.torch_internals.dispatcher import is_composite
from shardwise.torch_internals.native_build import NativeBuildError, build_extension
from shardwise.torch_internals.subclass import new_dtensor

__all__ = ["NativeBuildError", "disable", "enable", "is_enabled", "number_of_calls"]

_SOURCE = Path(__file__).with_name("kernel.cpp")
_KINDS = {"direct": 1, "in-place": 2, "view": 3}
_PYTHON = 0  # calls like this one are not direct
_loaded: list[Any] = []
_connected: list[Any] = []


def enable() -> None:
    """Run ops whose blocks need not move by the extension, from now on; it is built when it is first used.

    Results are the same as without it. It takes part where it saves time: on real processes, outside of dispatch modes,
    `torch.inference_mode()` and `policy(...)`.

    Raises:
        NativeBuildError: there is no C++ compiler, or torch's headers do not fit.

    Nothing is communicated. The environment variable `SHARDWISE_NATIVE=1` enables it on import.
    """
    if _connected:
        return
    if not _loaded:
        built = build_extension("shardwise_native", _SOURCE)
        # the slot itself: torch's LocalTensorMode puts a property in its place
        slots = local_slot, DTensor._spec
        built.set_up(DTensor, *slots, new_dtensor, active, DEFAULT_SETTINGS, watched, inference_tensors)
        _loaded.append(built)
    kernels = _loaded[0]
    _connected.append(kernels)
    on_direct_route.append(_register)
    at_forget.append(kernels.forget_all)
    DTensor.__torch_dispatch__ = staticmethod(_answering(kernels))
    for entry, _, runs in list(DEFAULT_SETTINGS.routes.values()):
        if runs:
            _register(entry)


def disable() -> None:
    """Run all ops by Python again."""
    if not _connected:
        return
    kernels = _connected.pop()
    on_direct_route.remove(_register)
    at_forget.remove(kernels.forget_all)
    DTensor.__torch_dispatch__ = staticmethod(dispatch)
    kernels.unregister_all()


def is_enabled() -> bool:
    """Whether the extension is in use."""
    return bool(_connected)


def number_of_calls() -> int:
    """How many ops the extension has run in this process."""
    return int(_loaded[0].number_of_calls()) if _loaded else 0


def _register(entry: Entry) -> None:
    """Let the extension see the calls of an op; composite ops never arrive where it is."""
    func = entry.func
    if not is_composite(func):
        name, _, overload = func.name().partition(".")  # the name of a default overload has no second part
        _connected[0].register_op(func, name, overload, entry.by_type)


def _answering(kernels: Any) -> Any:
    """`dispatch`, which then tells the extension whether calls like this one are direct, if it wants to know."""
    take, answer, withdraw = kernels.take_question, kernels.answer, kernels.withdraw

    def answering(
        func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        question = take()
        if question is None:
            return dispatch(func, types, args, kwargs)
        try:
            result = dispatch(func, types, args, kwargs)
        except BaseException:
            withdraw(question)
            raise
        recipe = find_recipe(func, args, kwargs or {})
        if recipe is None:
            answer(question, _PYTHON, (), [])
        else:
            answer(question, _KINDS[recipe.kind], recipe.specs, recipe.shape)
        return result

    return answering
