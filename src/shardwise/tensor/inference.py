"""Whether tensors of inference mode may exist: a view is one exactly if its base is, and to ask each base takes time."""

from __future__ import annotations

import torch

__all__ = ["in_inference_mode", "inference_tensors", "note_inference_mode"]

in_inference_mode = torch.is_inference_mode_enabled
inference_tensors: set[str] = set()
"""Not empty once a DTensor may have been created in inference mode. `dispatch` reads it before each op."""


def note_inference_mode() -> None:
    """Remember inference mode, if it is on. Called where DTensors are created other than by an op."""
    if in_inference_mode():
        inference_tensors.add("may exist")
