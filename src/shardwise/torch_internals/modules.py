"""The parameters that a module itself has, by name, to be replaced by tensors of any kind; and calls of all modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as _module

__all__ = ["own_parameters", "set_parameter", "stop_watching_calls", "watch_calls"]


def watch_calls(key: int, before: Callable[[nn.Module, Any], None]) -> None:
    """Call a function before each forward pass of any module, until `stop_watching_calls` with the same key.

    It is what `register_module_forward_pre_hook` does, in a tenth of the time.

    >>> seen = []
    >>> watch_calls(-1, lambda module, args: seen.append(type(module).__name__))
    >>> _ = nn.Identity()(0)
    >>> stop_watching_calls(-1)
    >>> _ = nn.Identity()(0)
    >>> seen
    ['Identity']
    """
    _module._global_forward_pre_hooks[key] = before


def stop_watching_calls(key: int) -> None:
    """End what `watch_calls` began."""
    _module._global_forward_pre_hooks.pop(key, None)


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The module's own parameters by name; None for one that was registered as None. Entries may be replaced.

    >>> list(own_parameters(nn.Linear(2, 2, bias=False)))
    ['weight', 'bias']
    """
    return module._parameters


def set_parameter(module: nn.Module, name: str, tensor: Any) -> None:
    """Replace a parameter of a module by a tensor that need not be a leaf, which `setattr` would refuse.

    >>> linear = nn.Linear(2, 2)
    >>> set_parameter(linear, "bias", linear.bias * 2)
    >>> linear.bias.is_leaf, list(own_parameters(linear))
    (False, ['weight', 'bias'])
    """
    params = own_parameters(module)
    if type(module).__setattr__ is not nn.Module.__setattr__:
        # modules that keep other references to their parameters, such as nn.LSTM, update them in __setattr__
        before = dict(params)
        del params[name]
        setattr(module, name, tensor)
        vars(module).pop(name, None)
        params.clear()
        params.update(before)
    params[name] = tensor
