"""Inputs of a compiled program that share memory, of which the program writes to one: to a compiler they are independent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._subclasses.fake_tensor import UnsupportedMutationAliasingException
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.torch_internals.module_fixer import after_import
from shardwise.torch_internals.subclass import storage_id

__all__ = ["keep_memory_of", "refuse_writes_to_shared_memory"]

_memory: dict[int, tuple[StorageWeakRef, Tensor]] = {}  # by the memory of a tensor, that which it replaced


def keep_memory_of(new: Tensor, old: Tensor) -> Tensor:
    """Have a tensor without values that replaces another one count as being in the memory of that."""
    for key in [key for key, (memory, _) in _memory.items() if memory.expired()]:
        del _memory[key]
    _memory[storage_id(new)] = StorageWeakRef(new.untyped_storage()), old
    return new


def _replaced(x: Tensor) -> Tensor:
    memory, old = _memory.get(storage_id(x), (None, x))
    return x if memory is None or memory.expired() else old


def refuse_writes_to_shared_memory(cls: type[Tensor]) -> None:
    """Have AOTAutograd refuse programs that write to memory which a tensor of a class shares with another input.

    AOTAutograd compares the memory of its inputs themselves, which wrappers do not have, and makes of each write a new tensor:
    what the program computes from the other input would not see it. The exception has `torch.compile` break the graph, so that the
    code runs eagerly, or raise with `fullgraph=True`.
    """

    def fix(module: ModuleType) -> None:
        wrapper: Any = module.AOTSyntheticBaseWrapper
        original = wrapper.pre_compile

        def pre_compile(self: Any, fn: Any, args: Any, *rest: Any, fw_metadata: Any) -> Any:
            written = [info.mutates_data for info in fw_metadata.input_info]
            if any(written) and any(isinstance(a, cls) for a in args):
                _check(args, written)
            return original(self, fn, args, *rest, fw_metadata=fw_metadata)

        wrapper.pre_compile = pre_compile

    after_import("torch._functorch._aot_autograd.runtime_wrappers", fix)


def _check(args: Sequence[Any], written: Sequence[bool]) -> None:
    parts = [(i, part) for i, arg in enumerate(args) for part in _plain_parts(arg)]
    groups: dict[int, list[tuple[int, Tensor]]] = {}
    for i, part in parts:
        groups.setdefault(storage_id(part), []).append((i, part))
    for group in groups.values():
        if len({i for i, _ in group}) < 2 or not any(written[i] for i, _ in group):
            continue
        found = sorted({group[k][0] for k in _overlapping([part for _, part in group])})
        if len(found) > 1 and any(written[i] for i in found):
            raise UnsupportedMutationAliasingException(
                f"A compiled program writes to memory that its inputs {found} share, of which one is a DTensor.\n"
                "  why: The compiled code would compute the results of one input from the values before the write to the other.\n"
                "  fix: pass one of them and take the view of it in the program, or pass a copy: x.clone()"
            )


def _plain_parts(arg: Any) -> Iterator[Tensor]:
    if not isinstance(arg, Tensor):
        return
    wrapper: Any = arg
    if hasattr(wrapper, "__tensor_flatten__"):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(wrapper, name))
    else:
        yield _replaced(arg)


def _overlapping(parts: Sequence[Tensor]) -> set[int]:
    """Which of some tensors in one memory share elements with others, for the sizes at hand."""
    forms: list[Any] = [
        [[*map(_hint, t.shape)], [*map(_hint, t.stride())], _hint(t.storage_offset())] for t in parts
    ]
    memory = torch.empty(_hint(parts[0].untyped_storage().nbytes()), device="meta", dtype=torch.uint8)
    return set(compute_overlapping_tensors([memory.as_strided(*f) for f in forms], symbolic=False))


def _hint(size: Any) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size  # type: ignore[no-any-return]
