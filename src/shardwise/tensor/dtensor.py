"""DTensor: a tensor that is distributed over a mesh of devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank, axes_of
from shardwise.layout import Layout, Placement, Spec, SpecPattern, pattern_of
from shardwise.tensor.checkpoint_methods import CheckpointMethods
from shardwise.tensor.copy_methods import CopyMethods
from shardwise.tensor.gradient_methods import GradientMethods
from shardwise.tensor.inference import note_inference_mode
from shardwise.tensor.python_values import PythonMethods
from shardwise.tensor.shape_methods import ShapeMethods, may_leave_views
from shardwise.tensor.view_places import REPLACED
from shardwise.torch_internals.subclass import (
    change_places,
    disabled_torch_function,
    has_views,
    is_parameter,
    new_dtensor,
)

__all__ = [
    "DTensor",
    "Implementation",
    "implementation",
    "is_simulated_tensor",
    "local_slot",
]


class Implementation:
    """The functions behind the methods of `DTensor`.

    They construct DTensors, so they are defined in modules that import this one; the package installs them.
    """

    from_local: Callable[..., DTensor]
    to_local: Callable[..., Tensor]
    redistribute: Callable[..., DTensor]
    to_layout: Callable[[DTensor, Layout], DTensor]
    data_of_inference_tensor: Callable[[DTensor], DTensor]
    note_data: Callable[[DTensor, DTensor], None]
    index_of: Callable[[DTensor, Any], Any]
    rebuild: Callable[..., DTensor]
    stable_hash: Callable[[DTensor], str]
    related: Callable[[Tensor, Spec], tuple[Tensor, Spec]]


implementation = Implementation()
_getitem: Any = torch.Tensor.__getitem__
_setitem: Any = torch.Tensor.__setitem__


def _is_differentiable(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype can have gradients."""
    return dtype.is_floating_point or dtype.is_complex


_SIMPLE_INDICES = frozenset({int, slice, type(None), type(...)})


def _is_simple(index: Any) -> bool:
    """Whether an index has no lists or arrays, of which torch would make plain index tensors."""
    kind = type(index)
    return _SIMPLE_INDICES.issuperset(map(type, index)) if kind is tuple else kind in _SIMPLE_INDICES


class DTensor(PythonMethods, ShapeMethods, CheckpointMethods, CopyMethods, GradientMethods, torch.Tensor):
    """A tensor whose blocks are distributed over a mesh of devices, according to its layout.

    >>> import shardwise as sw
    >>> with sw.simulate(4):
    ...     mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ...     x = sw.distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [sw.Shard(0), sw.Replicate()])
    ...     y = x.redistribute(tp=sw.Shard(1))
    ...     print(x.sharding, y.sharding, y.to_local().ranks[3], torch.equal(y.full_tensor(), x.full_tensor()))
    [4:dp, 3] [4:dp, 3:tp] tensor([[ 8.],
            [11.]]) True
    """

    _local_tensor: Tensor
    _spec: Spec
    __slots__ = ("_local_tensor", "_spec")
    _source: Any = None
    """How a view with memory of its own is computed; None for all other tensors."""
    _op_dispatcher: Any
    """What programs read and set of torch's dispatcher, see `shardwise/api/op_dispatcher.py`."""

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
        if not isinstance(local_tensor, PerRank) and local_tensor.requires_grad:
            if not requires_grad:
                warnings.warn(
                    "The block of a new DTensor requires gradients, but the DTensor does not.\n"
                    "  why: To construct a DTensor that autograd connects with its block there is from_local.\n"
                    "  fix: DTensor.from_local(local, mesh, placements), or DTensor(local.detach(), spec)",
                    stacklevel=2,
                )
            local_tensor = local_tensor.detach()
        note_inference_mode()
        return new_dtensor(cls, local_tensor, spec, requires_grad)  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    __torch_function__ = disabled_torch_function

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor is distributed over."""
        return self._spec.mesh  # type: ignore[no-any-return]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The layout as one placement per mesh axis."""
        return self._spec.placements

    @property
    def sharding(self) -> Layout:
        """The layout on the mesh: the factors of each dim with the axes that split them, and pending reductions.

        `x.layout` is torch's attribute: the memory layout, `torch.strided`.
        """
        return self._spec.layout

    @property
    def data(self) -> DTensor:
        """The tensor detached from its autograd graph. Assigning a DTensor replaces the blocks and the layout."""
        if self.is_inference() and not torch.is_inference_mode_enabled():
            return implementation.data_of_inference_tensor(self)
        return torch.Tensor.data.__get__(self)  # type: ignore[no-any-return, attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, DTensor):
            raise TypeError(
                f"The data of a DTensor was set to a {type(new).__name__}.\n"
                "  why: The layout of a plain tensor on the mesh is unknown.\n"
                "  fix: x.data = distribute_tensor(t, x.device_mesh, x.placements)"
            )
        if has_views(self):
            if (self.shape, self.stride()) != (new.shape, new.stride()) and may_leave_views(self):
                # views are computed from what the tensor was, which would have another shape
                fresh: Any = self.detach()
                fresh._replace_data(new)
                self._become(fresh, is_write=False)
                return
            self.__dict__[REPLACED] = True
        self._replace_data(new)

    def _replace_data(self, new: DTensor) -> None:
        """Take the blocks and the layout of another tensor, whatever views there are."""
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self._adopt(new)
        implementation.note_data(self, new)

    def _adopt(self, other: DTensor) -> None:
        """Share the blocks of another tensor and take its layout."""
        if other._source is None:
            self._local_tensor = other._local_tensor
        else:
            self.__class__ = type(other)
            self._local_tensor = other._source
        self._spec = other._spec

    def _become(self, new: DTensor, is_write: bool = True) -> DTensor:
        """Be another tensor, which becomes what this one was: the base of its views, for autograd."""
        block, other = local_slot.__get__(self), local_slot.__get__(new)
        cls, spec = self.__class__, self._spec
        change_places(self, new, is_write)
        self.__class__, new.__class__ = new.__class__, cls
        local_slot.__set__(self, other)
        local_slot.__set__(new, block)
        self._spec, new._spec = new._spec, spec
        return self

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: tuple[int, ...] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The DTensor whose block on each rank is `local_tensor`; differentiable, and without a copy.

        Args:
            local_tensor: the block of this rank, on the mesh's device type.
            device_mesh: the mesh; by default the one of the `with mesh:` around the call.
            placements: one placement per mesh axis; by default all `Replicate()`.
            run_check: compare the shapes on all ranks, and along `Replicate()` axes the values. Uneven blocks then need no
                `shape`.
            shape: the global shape; by default the blocks are taken to be even.
            stride: the global strides; by default they follow from the block's.
            grad_placements: the placements of the gradient with respect to `local_tensor`.

        Raises:
            LayoutError: the block does not fit the placements, or `run_check` found a difference between ranks.

        With `run_check` it sends one small all-gather, else nothing.
        """
        return implementation.from_local(
            local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements=grad_placements
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The block of this rank; differentiable, and without a copy.

        Args:
            grad_placements: the placements of the block's gradient. By default it is taken to have those of the tensor,
                which is right if all ranks use a replicated block in the same way; if they do not, the gradient is a
                partial sum: `grad_placements=[Partial()]`.

        Raises:
            LayoutError: `grad_placements` split the tensor in another way.

        Nothing is communicated, except that the result of `redistribute(async_op=True)` is waited for.
        """
        return implementation.to_local(self, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        **axes: Placement,
    ) -> DTensor:
        """The same tensor in another layout; differentiable.

        Args:
            device_mesh: the tensor's own mesh, or None; a tensor cannot move to another mesh.
            placements: the wanted placement per mesh axis.
            async_op: do not wait for the last collective; the result waits when it is first used.
            forward_dtype: the dtype to communicate in, which the result has.
            backward_dtype: the dtype to communicate the gradient in.
            **axes: the wanted placement of single axes by name, instead of `placements`: `redistribute(tp=Shard(0))`.

        Raises:
            LayoutError: the placements do not fit the tensor or the mesh.
            MeshError: `device_mesh` is not the tensor's mesh.

        It sends the cheapest plan under the current cost model; `plan_redistribute(x.sharding, y.sharding)` prints it.
        """
        return implementation.redistribute(
            self, device_mesh, placements, axes, async_op, forward_dtype, backward_dtype
        )

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The full tensor on each rank; differentiable.

        Args:
            grad_placements: the placements of its gradient, as for `to_local`.

        It sends what `redistribute` to `Replicate()` on all axes sends.
        """
        return implementation.redistribute(self, None, None, None, False, None, None).to_local(
            grad_placements=grad_placements
        )

    def __getitem__(self, index: Any) -> Tensor:
        kind = type(index)  # `_is_simple` in place, for speed
        if kind is tuple:
            for i in index:
                if type(i) not in _SIMPLE_INDICES:
                    break
            else:
                return _getitem(self, index)  # type: ignore[no-any-return]
        elif kind in _SIMPLE_INDICES:
            return _getitem(self, index)  # type: ignore[no-any-return]
        return _getitem(self, implementation.index_of(self, index))  # type: ignore[no-any-return]

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, Tensor) and value.requires_grad and not _is_differentiable(self.dtype):
            value = (
                value.detach()
            )  # for a 0-d value torch would record the write, and fail to replay the view
        _setitem(self, index if _is_simple(index) else implementation.index_of(self, index), value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        mesh = f"{self.device_mesh.device_type} mesh ({axes_of(self.device_mesh)})"
        try:  # torch.export notices reads of the attribute, and prints tensors that it does not know
            block = DTensor._local_tensor.__get__(self, DTensor)  # type: ignore[attr-defined]
        except AttributeError:  # an asynchronous result, which is waited for
            block = self._local_tensor
        return f"DTensor({self._spec} on {mesh}, local_tensor={block!r}{grad})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[SpecPattern, bool]]:
        return ["_local_tensor"], (pattern_of(self._spec), self.requires_grad)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[SpecPattern, bool], outer_size: Any, outer_stride: Any
    ) -> DTensor:
        pattern, requires_grad = context
        spec, block = pattern.at(outer_size, outer_stride), inner["_local_tensor"]
        if spec.is_symbolic:
            block, spec = implementation.related(block, spec)
        return cls(block, spec, requires_grad=requires_grad)

    def _stable_hash_for_caching(self) -> str:
        return implementation.stable_hash(self)

    def __coerce_tangent_metadata__(self) -> DTensor:
        """The gradient in the layout that compiled code assumes before it has seen one: without pending reductions."""
        return implementation.to_layout(self, self._spec.layout.with_partial({}))

    def __coerce_same_metadata_as_tangent__(
        self, metadata: tuple[SpecPattern, bool], expected_type: type | None = None
    ) -> DTensor | None:
        """The gradient in the layout that compiled code expects; None where it expects a plain tensor."""
        if expected_type is not None and not issubclass(expected_type, DTensor):
            return None
        out = implementation.to_layout(self, metadata[0].layout(self.shape))
        units = metadata[0].units
        return out if out._spec.units == units else DTensor(out._local_tensor, out._spec.with_units(units))

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return implementation.rebuild, (
            self._local_tensor.detach(), self._spec, self.requires_grad, is_parameter(self),
        )  # fmt: skip


local_slot: Any = DTensor._local_tensor
"""The descriptor of the slot that holds the block, which subclasses override with a property."""


def is_simulated_tensor(x: DTensor) -> bool:
    """Whether this process holds the blocks of all ranks; unlike reading the block, this waits for nothing."""
    try:
        block = local_slot.__get__(x) if x._source is None else x._source.block
        return isinstance(block, PerRank)
    except AttributeError:  # the block of an asynchronous result, which only real ranks have
        return False
