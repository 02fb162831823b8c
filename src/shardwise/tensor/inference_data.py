"""What `x.data` and `x.detach()` of an inference tensor are: tensors that may be written to, whose views may not."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.dispatcher import read_schema
from shardwise.torch_internals.subclass import inference_error

__all__ = ["data_of_inference_tensor", "note_data"]


class _DataOfInferenceTensor:
    """The class of `x.data` and `x.detach()` of an inference tensor: they may be written to, views of them may not."""

    __slots__ = ()

    def is_inference(self) -> bool:
        return True

    def _copy_blocks(self: Any, memo: dict[int, Any]) -> DTensor:
        copy: DTensor = super()._copy_blocks(memo)  # type: ignore[misc]
        return DTensor(copy._local_tensor, copy._spec) if copy._source is None else copy

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch asks the first class of which no other is a subclass: what another class does must not be lost
        kinds = [t.__bases__[1] if issubclass(t, _DataOfInferenceTensor) else t for t in types]
        kind: Any = next((t for t in kinds if issubclass(t, DTensor) and t is not DTensor), DTensor)
        schema = read_schema(func)
        first = schema.arguments[0]
        if not torch.is_inference_mode_enabled() and _writes_to_view(schema, args, kwargs or {}):
            raise inference_error()
        if not first.alias or first.writes or not isinstance(args[0], _DataOfInferenceTensor):
            return kind.__torch_dispatch__(func, types, args, kwargs)
        with torch.inference_mode(False), torch.no_grad():
            result = kind.__torch_dispatch__(func, types, args, kwargs)
        mixin = _DataOfInferenceTensor if func is torch.ops.aten.detach.default else _ViewOfData
        for x in result if isinstance(result, list | tuple) else (result,):
            x.__class__ = _data_class(x.__class__, mixin)
        return result


class _ViewOfData(_DataOfInferenceTensor):
    """The class of views of the data of an inference tensor."""

    __slots__ = ()


def _writes_to_view(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for i, argument in enumerate(schema.arguments):
        if argument.writes:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for t in value if isinstance(value, list | tuple) else (value,):
                if isinstance(t, _ViewOfData):
                    return True
    return False


@cache
def _data_class(cls: Any, mixin: Any = _DataOfInferenceTensor) -> Any:
    if issubclass(cls, _DataOfInferenceTensor):
        cls = cls.__bases__[1]
    return type(cls.__name__, (mixin, cls), {"__slots__": ()})


def data_of_inference_tensor(x: DTensor) -> DTensor:
    """What `x.data` and `x.detach()` of an inference tensor are outside of inference mode."""
    with torch.inference_mode(False):
        out = DTensor(x._local_tensor, x._spec)
    out._adopt(x)
    out.__class__ = _data_class(out.__class__)
    return out


def note_data(x: DTensor, new: DTensor) -> None:
    """Have a tensor whose data became that of another be data of an inference tensor, if the other is."""
    if issubclass(type(new), _DataOfInferenceTensor):
        x.__class__ = _data_class(x.__class__)
