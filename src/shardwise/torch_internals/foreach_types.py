"""The tensor classes for which torch's optimizers and norms choose their `foreach` versions by default."""

from __future__ import annotations

from torch import Tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

__all__ = ["support_foreach"]


def support_foreach(cls: type[Tensor]) -> None:
    """Let optimizers and `clip_grad_norm_` use `foreach` ops for a tensor class where they do for plain tensors.

    >>> support_foreach(Tensor)
    >>> optimizer._foreach_supported_types.count(Tensor)
    1
    """
    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if cls not in known:
            known.append(cls)
