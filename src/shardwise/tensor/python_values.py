"""What Python asks of a tensor: lists, arrays, format strings, `x.new()`; and methods that a distributed tensor cannot have."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from shardwise.comm import first_rank

__all__ = ["PythonMethods"]

_MEMORY = "Each rank has the memory of its own block only."


def _refused(name: str, why: str, fix: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{name} of the DTensor {self._spec} does not exist.\n  why: {why}\n  fix: {fix}")

    method.__name__ = name
    return method


def _each_element(name: str) -> Any:
    return _refused(
        name, "It calls a Python function for each element in memory.", f"x.to_local().{name}(...)"
    )


def _has_number(x: Any) -> bool:
    """Whether `item` of a tensor without dims needs no other rank."""
    if x.is_meta or x._spec.layout.partial or x.device_mesh.get_coordinate() is None:
        return False
    return type(first_rank(x._local_tensor)) is Tensor  # no tensor of a tracer, which has no values


class PythonMethods:
    """Methods of `DTensor` that convert it to values of Python and NumPy, and those that it refuses."""

    __slots__ = ()

    def tolist(self: Any) -> Any:
        """The global value as nested lists of numbers. It sends what `full_tensor()` sends."""
        return _full(self.detach()).tolist()

    def numpy(self: Any, *, force: bool = False) -> Any:
        """The global value as an array. It sends what `full_tensor()` sends."""
        return _full(self).numpy(force=force)

    def new(self: Any, *size: Any, **kwargs: Any) -> Any:
        """An uninitialized tensor on the same mesh, as `new_empty(size)`; or a replicated one with the values of a list."""
        if self.is_sparse or any(
            isinstance(s, Tensor) for s in size
        ):  # indices and values, or a tensor to share
            return Tensor.new(self, *size, **kwargs)
        if len(size) == 1 and isinstance(size[0], list):
            return self.new_tensor(*size, **kwargs)
        return self.new_empty(
            size[0] if len(size) == 1 and isinstance(size[0], tuple) else size or (0,), **kwargs
        )

    def __array__(self: Any, dtype: Any = None) -> Any:
        out = _full(self).numpy()
        return out if dtype is None else out.astype(dtype, copy=False)

    def __format__(self: Any, spec: str) -> str:
        """A number if the tensor has no dims, and either a format is given or all ranks have the number; else its representation."""
        if self.dim() == 0 and (spec or _has_number(self)):
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __len__(self: Any) -> int:
        if self.dim() == 0:  # for torch.tensor([x, y]), whatever has __getitem__ is a sequence
            raise TypeError(
                "len() of a 0-d tensor\n"
                f"  why: The DTensor {self._spec} has no dims. torch.tensor([x, y]) takes DTensors for lists.\n"
                "  fix: torch.stack([x, y]), or torch.tensor([x.item(), y.item()])"
            )
        return int(self.shape[0])

    apply_ = _each_element("apply_")
    map_ = _each_element("map_")
    map2_ = _each_element("map2_")
    share_memory_ = _refused("share_memory_", _MEMORY, "x.to_local().share_memory_()")
    __dlpack__ = _refused("__dlpack__", _MEMORY, "torch.from_dlpack(x.to_local()), or x.full_tensor()")
    __dlpack_device__ = _refused("__dlpack_device__", _MEMORY, "torch.from_dlpack(x.to_local())")


def _full(x: Any) -> Any:
    """The global value as a plain tensor; in a simulation, that of the first rank."""
    return first_rank(x.full_tensor())
