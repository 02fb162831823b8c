"""DTensor: a tensor spread over a mesh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._C._dynamo.eval_frame as _frames
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank, axes_of, check_reducible
from shardwise.layout import Layout, LayoutError, Placement, Replicate, Spec
from shardwise.tensor.errors import MeshError

__all__ = ["DTensor"]


class DTensor(torch.Tensor):
    """A tensor whose blocks lie on a mesh of devices, as its layout says.

    >>> import shardwise as sw
    >>> with sw.simulate(4):
    ...     mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ...     x = sw.distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [sw.Shard(0), sw.Replicate()])
    ...     y = x.redistribute(tp=sw.Shard(1))
    ...     print(x.layout, y.layout, y.to_local().ranks[3], torch.equal(y.full_tensor(), x.full_tensor()))
    [4:dp, 3] [4:dp, 3:tp] tensor([[ 8.],
            [11.]]) True
    """

    _local_tensor: Tensor
    _spec: Spec
    __slots__ = ("_local_tensor", "_spec")

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
        # half the price of `_make_wrapper_subclass`: it reads `spec.tensor_meta` and sets both slots itself
        make: Any = torch.Tensor._dtensor__new__
        if not isinstance(local_tensor, PerRank) and local_tensor.requires_grad:
            local_tensor = local_tensor.detach()
        return make(cls, local_tensor, spec, requires_grad=requires_grad)  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    # Functions on a DTensor are those of torch; only the ops beneath autograd are ours.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh the tensor lies on."""
        return self._spec.mesh  # type: ignore[no-any-return]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The layout as one placement per axis of the mesh."""
        return self._spec.placements

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """How the tensor lies on the mesh: each dim's factors and the axes that split them."""
        # torch's own Python code asks every tensor for its memory layout by this name
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return torch.strided  # type: ignore[return-value]
        return self._spec.layout

    @property
    def data(self) -> DTensor:
        """The tensor without its graph; setting it replaces the blocks and their layout."""
        return torch.Tensor.data.__get__(self)  # type: ignore[no-any-return, attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, DTensor):
            raise TypeError(
                f"the data of a DTensor was set to {type(new).__name__}.\n"
                "  why: nothing says how a plain tensor lies on the mesh\n"
                "  fix: x.data = distribute_tensor(t, x.device_mesh, x.placements)"
            )
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self._local_tensor, self._spec = new._local_tensor, new._spec

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
        """The tensor of which each rank holds `local_tensor` as its block; differentiable, without a copy.

        Without `shape` the blocks are taken to be even. `run_check` compares shapes on all ranks, and for
        Replicate the values too, at the price of one small all-gather; uneven blocks then need no `shape`.
        """
        return _local.from_local(
            local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements=grad_placements
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The block of this rank; differentiable.

        The gradient of the block is taken to lie as the tensor does, which is right for a block that is used
        alike on all ranks; if a replicated one is used differently, say `grad_placements=[Partial()]`.
        """
        return _local.to_local(self, grad_placements)

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
        """The same tensor in another layout, given as placements or axis by axis: `redistribute(tp=Shard(0))`.

        With `async_op` the last collective is waited for when the value is first used. The dtypes are those
        to communicate in, forward and backward; the result has `forward_dtype`, the gradient this dtype.
        """
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            raise LayoutError(
                f"redistribute got {device_mesh!r} for a mesh.",
                why="the mesh comes first, then the placements",
                fix="redistribute(placements=[…]), or by axis: redistribute(tp=Shard(0))",
            )
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise MeshError(
                f"redistribute of {self._spec} to another mesh, {device_mesh}.",
                why=f"it lies on {self.device_mesh}, and blocks move within one mesh",
                fix="x.full_tensor() there and distribute_tensor(…, src_data_rank=None) here",
            )
        target = Layout.of(self.shape, axes_of(self.device_mesh), self._named(placements, axes))
        for _, op in target.partial:
            check_reducible(forward_dtype or self.dtype, op)
        return _autograd.Redistribute.apply(  # type: ignore[no-any-return, no-untyped-call]
            self, target, async_op, forward_dtype or self.dtype, backward_dtype or self.dtype
        )

    def _named(
        self, placements: Sequence[Placement] | None, axes: dict[str, Placement]
    ) -> Sequence[Placement]:
        if placements is None and not axes:
            raise LayoutError(
                "placements is needed for redistribute!",
                why="neither placements nor an axis was given",
                fix="redistribute(placements=[Shard(0), …]), or by axis: redistribute(tp=Shard(0))",
            )
        if placements is not None and axes:
            raise LayoutError(
                f"redistribute got placements and {', '.join(axes)}.",
                why="the layout is said once: as a whole, or axis by axis",
                fix="drop one of the two",
            )
        if placements is not None:
            return placements
        names = axes_of(self.device_mesh)
        out = list(self.placements)
        for name, placement in axes.items():
            out[names.index(name)] = placement
        return out

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor, on each rank; differentiable."""
        whole = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        where = f"{self.device_mesh.device_type} mesh ({axes_of(self.device_mesh)})"
        return f"DTensor({self._spec} on {where}, local_tensor={self._local_tensor!r}{grad})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Spec, bool]]:
        return ["_local_tensor"], (self._spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], kept: tuple[Spec, bool], outer_size: Any, outer_stride: Any
    ) -> DTensor:
        spec, requires_grad = kept
        return DTensor(inner["_local_tensor"], spec, requires_grad=requires_grad)

    def __coerce_tangent_metadata__(self) -> DTensor:
        """A gradient as compiled code is to expect it before it has seen one: nothing of it is pending."""
        return _autograd.redistributed(self, self.layout.with_partial({}))

    def __coerce_same_metadata_as_tangent__(
        self, metadata: tuple[Spec, bool], expected_type: type | None = None
    ) -> DTensor | None:
        """A gradient that came, in the layout that compiled code expects; None where it expects a plain tensor."""
        if expected_type is not None and not issubclass(expected_type, DTensor):
            return None
        return _autograd.redistributed(self, metadata[0].layout)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        is_param = bool(getattr(self, "_is_param", False))
        return rebuild, (self._local_tensor.detach(), self._spec, self.requires_grad, is_param)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol.\n"
                "  why: a copy has no place in the graph that made this tensor\n"
                "  fix: x.detach() first"
            )
        local = self._local_tensor.detach()
        copy = type(self)(
            _each(local, lambda t: t.clone()), self._spec, requires_grad=self.requires_grad
        )  # fmt: skip
        copy.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_local_tensor", "_spec")})
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        return copy


def _each(local: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    return PerRank({r: fn(t) for r, t in local._blocks.items()}) if isinstance(local, PerRank) else fn(local)


def rebuild(local: Tensor, spec: Spec, requires_grad: bool, is_param: bool) -> DTensor:
    """A DTensor from what was pickled of it."""
    out = _sparse.made(local, spec, requires_grad=requires_grad)
    if is_param:
        out._is_param = True
    return out


# These make DTensors, so they can only come after it.
from shardwise.dispatch.router import dispatch  # noqa: E402
from shardwise.tensor import autograd as _autograd  # noqa: E402
from shardwise.tensor import local as _local  # noqa: E402
from shardwise.tensor import sparse_tensor as _sparse  # noqa: E402

# static, for to bind a class method takes longer than to call this
DTensor.__torch_dispatch__ = staticmethod(dispatch)
# where torch.compile breaks a graph, an op runs as it stands: what it does on the way is not for compiling either
_frames.set_code_exec_strategy(
    dispatch.__code__, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
)
