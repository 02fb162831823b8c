"""torch's state dicts and checkpoints of our tensors, with and without `install()`."""

from __future__ import annotations

import sys
from functools import partial

from shardwise.api.distribute import distribute_tensor
from shardwise.api.geometry import compute_local_shape_and_global_offset
from shardwise.layout import Placement
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.module_fixer import ModuleFixer
from shardwise.torch_internals.state_dicts import STATE_DICT_MODULES, OurTensors, know_both_classes

__all__ = ["support_state_dicts"]


def support_state_dicts() -> None:
    """Let torch's `get_*` and `set_*_state_dict` and its checkpoints know our tensor, whether they are loaded already or not."""
    ours = OurTensors(DTensor, Placement, distribute_tensor, compute_local_shape_and_global_offset)
    fixer = ModuleFixer(dict.fromkeys(STATE_DICT_MODULES, partial(know_both_classes, ours=ours)))
    fixer.fix_loaded()
    sys.meta_path.insert(0, fixer)
