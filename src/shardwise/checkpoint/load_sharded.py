"""Loading full weights into a distributed module, of which each rank reads its own blocks only."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint.safetensors_file import open_safetensors
from shardwise.comm import on_mesh
from shardwise.layout import LayoutError, owned
from shardwise.parallel.module_tensors import Slot, group_ties, slots_of
from shardwise.tensor.dtensor import DTensor

__all__ = ["load_sharded"]

Source = Mapping[str, Tensor] | str | Path | Iterable[str | Path]


def load_sharded(model: nn.Module, source: Source, *, strict: bool = True) -> nn.Module:
    """Load full weights into a module, in place; each rank reads only the blocks that it holds.

    Args:
        model: the module, distributed or not; tensors on the meta device get memory.
        source: a state dict of full tensors, a safetensors file, several, a directory of them, or their index file.
        strict: refuse weights that are missing in the source or unknown to the module.

    Returns:
        The module; its parameters are the same objects, in their dtypes and layouts.

    Raises:
        LayoutError: weights are missing, unknown or of another shape. Nothing was changed then.

    Nothing is communicated.

    >>> import shardwise as sw
    >>> weights = nn.Linear(4, 6).state_dict()
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     layer = sw.parallel.parallelize_module(nn.Linear(4, 6, device="meta"), mesh, {"": "colwise"})
    ...     _ = sw.load_sharded(layer, weights)
    ...     torch.equal(layer.weight.full_tensor().ranks[1], weights["weight"])
    True
    """
    stored = _open(source)
    for group, value in _match(model, group_ties(slots_of(model)), stored, strict):
        _load(group, value.detach())
    return model


def _open(source: Source) -> Mapping[str, Tensor]:
    """The stored tensors by name; those in files are read when they are used."""
    if isinstance(source, Mapping):
        return source
    return {name: t for path in _paths(source) for name, t in open_safetensors(path).items()}


def _paths(source: str | Path | Iterable[str | Path]) -> Iterator[Path]:
    for given in [source] if isinstance(source, str | Path) else source:
        path = Path(given)
        if path.is_dir():
            yield from sorted(path.glob("*.safetensors"))
        elif path.suffix == ".json":
            names = json.loads(path.read_text())["weight_map"].values()
            yield from (path.parent / name for name in dict.fromkeys(names))
        else:
            yield path


def _match(
    model: nn.Module, groups: list[list[Slot]], stored: Mapping[str, Tensor], strict: bool
) -> list[tuple[list[Slot], Tensor]]:
    """The tensors of the module with what is stored for them; tied ones under any of their names."""
    persistent = model.state_dict(keep_vars=True).keys()
    found, problems, used = [], [], set()
    for group in groups:
        names = [s.full_name for s in group]
        used.update(names)
        name = next((n for n in names if n in stored), None)
        if name is None:
            if strict and any(n in persistent for n in names):
                problems.append(f"{names[0]} is missing")
            continue
        shape, wanted = tuple(stored[name].shape), tuple(group[0].tensor.shape)
        if shape != wanted:
            problems.append(f"{name} has shape {shape}, not {wanted}")
        found.append((group, stored[name]))
    if strict:
        problems += [f"{name} is unknown to the module" for name in stored if name not in used]
    if problems:
        listed = "".join(f"\n    - {p}" for p in problems[:20])
        raise LayoutError(
            f"load_sharded got weights that do not fit {type(model).__name__}:{listed}",
            why="Each parameter and persistent buffer is loaded from the weight of its name; nothing was changed.",
            fix="Rename the weights, or load_sharded(..., strict=False) for those that fit.",
        )
    return found


def _load(group: list[Slot], value: Tensor) -> None:
    """Read the blocks of one tensor, and give it memory if it has none."""
    first = group[0]
    if first.tensor.is_meta:
        device = first.tensor.device_mesh.device_type if isinstance(first.tensor, DTensor) else "cpu"
        for slot in group:
            if getattr(slot.owner, slot.name).is_meta:
                slot.owner.to_empty(device=device, recurse=False)
    target = getattr(first.owner, first.name)
    with torch.no_grad():
        if not isinstance(target, DTensor):
            target.copy_(value)
            return
        layout = target.sharding

        def fill(coord: Sequence[int], block: Tensor) -> Tensor:
            return block.copy_(_read(value, owned(layout, coord)))

        on_mesh(target.device_mesh, fill, target.to_local())


def _read(value: Tensor, indices: Sequence[Sequence[int]]) -> Tensor:
    """The elements at the given indices of each dim, read in as few boxes as there are runs of consecutive indices."""
    runs = [_runs(i) for i in indices]
    if not runs:
        return value
    boxes = [value[box] for box in itertools.product(*runs)]
    return _join(boxes, [len(r) for r in runs])


def _runs(indices: Sequence[int]) -> list[slice]:
    """Indices in ascending order as slices.

    >>> _runs([0, 1, 2, 5, 6]), _runs([])
    ([slice(0, 3, None), slice(5, 7, None)], [slice(0, 0, None)])
    """
    starts = [i for k, i in enumerate(indices) if k == 0 or indices[k - 1] != i - 1]
    ends = [i + 1 for k, i in enumerate(indices) if k + 1 == len(indices) or indices[k + 1] != i + 1]
    return [slice(a, b) for a, b in zip(starts, ends, strict=True)] or [slice(0, 0)]


def _join(boxes: list[Tensor], counts: Sequence[int]) -> Tensor:
    """The boxes, in row-major order of a grid of these sizes, as one tensor."""
    for dim in reversed(range(len(counts))):
        n = counts[dim]
        boxes = [boxes[i] if n == 1 else torch.cat(boxes[i : i + n], dim) for i in range(0, len(boxes), n)]
    return boxes[0]
