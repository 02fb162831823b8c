"""Styles that split the parameters of one module: by columns, by rows, or not at all but along the sequence."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, first_rank
from shardwise.layout import Layout, Placement, Replicate, Shard
from shardwise.parallel.attention import attention_layouts
from shardwise.parallel.boundary import Boundary
from shardwise.parallel.forward import wrap_method
from shardwise.parallel.linear import run_on_blocks
from shardwise.parallel.module_tensors import Slot, device_problems, group_ties, owned_tensors, slots_of
from shardwise.parallel.named_layout import named_layout
from shardwise.parallel.named_styles import NamedStyle
from shardwise.parallel.parallel_style import ParallelStyle, distributed
from shardwise.parallel.partition import Split, feature_dim, split_dim
from shardwise.parallel.placing import place, place_tensors
from shardwise.tensor.dtensor import DTensor

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel"]

_STYLED = "_shardwise_styled"
"""Set on modules whose inputs and outputs a style converts; doing it twice would split a block again."""

_ATTENTION_INPUTS = ("query", "key", "value")


class _SplitStyle(ParallelStyle):
    """A style that splits the parameters of a module along one kind of features."""

    split: Split
    _shown = ("input_layouts", "output_layouts", "use_local_output")

    def __init__(
        self, input_layouts: Placement | None, output_layouts: Placement | None, use_local: bool
    ) -> None:
        self.input_layouts = None if input_layouts is None else (input_layouts,)
        self.output_layouts = None if output_layouts is None else (output_layouts,)
        self.use_local_output = use_local

    def _problems(self, module: nn.Module, device_mesh: DeviceMesh) -> list[str]:
        tensors = [t for _, t in owned_tensors(module)]
        name = f"{type(self).__name__} of {type(module).__name__}"
        if problems := device_problems(owned_tensors(module), device_mesh):
            return [f"{name}: {problem}" for problem in problems]
        if problems := self._placed_otherwise(module, device_mesh):
            return [f"{name}: {problem}" for problem in problems]
        if isinstance(module, nn.MultiheadAttention) and self.split == "in":
            return [f"{name}: its heads are split by ColwiseParallel, which includes the output projection"]
        if all(split_dim(module, t, self.split) is None for t in tensors):
            return [f"{name}: it has no parameter with features to split"]
        return []

    def _placed_otherwise(self, module: nn.Module, mesh: DeviceMesh) -> list[str]:
        """What is wrong with tensors that are distributed already; a tied one may have the layout that it needs here."""
        problems = []
        is_styled = _STYLED in vars(module) or isinstance(module, nn.MultiheadAttention)
        for n, t in owned_tensors(module):
            if isinstance(t, DTensor):
                wanted = named_layout(Slot(module, "", n, t), NamedStyle(self.split), axes_of(mesh), 0)
                if is_styled:
                    problems.append(f"{n} is already distributed, by a style")
                elif t.device_mesh != mesh or t.sharding != wanted:
                    problems.append(f"{n} is already distributed, as {t.sharding}, and needs {wanted}")
        return problems

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place_own(module, device_mesh, NamedStyle(self.split), self.src_data_rank)
        run_on_blocks(module)
        vars(module)[_STYLED] = True
        module.register_forward_pre_hook(lambda m, args: self._inputs(m, args, device_mesh))
        module.register_forward_hook(lambda m, args, out: self._outputs(m, out, device_mesh))
        return module

    @abstractmethod
    def _inputs(self, module: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]: ...

    @abstractmethod
    def _outputs(self, module: nn.Module, out: Any, mesh: DeviceMesh) -> Any: ...

    def _local(self, out: DTensor, wanted: Placement) -> Tensor:
        if out.placements != (wanted,):
            out = out.redistribute(placements=(wanted,))
        return out.to_local() if self.use_local_output else out


def place_own(module: nn.Module, mesh: DeviceMesh, style: NamedStyle, src_data_rank: int | None) -> None:
    """Distribute the tensors that a module holds itself by a named style, on a mesh of one axis."""
    axes = axes_of(mesh)
    for group in group_ties([Slot(module, "", n, t) for n, t in owned_tensors(module)]):
        if not isinstance(group[0].tensor, DTensor):
            place(group, mesh, named_layout(group[0], style, axes, 0), src_data_rank)


class ColwiseParallel(_SplitStyle):
    """Split the output features of a module: the columns of its weight in `x @ w`.

    Args:
        input_layouts: the placement of a plain input; by default `Replicate()`, which the module needs.
        output_layouts: the placement of the output; by default its features are split.
        use_local_output: return the block of this rank instead of a DTensor.

    For linear layers and embeddings, convolutions, Conv1D-like layers that keep (in, out) weights, and any module whose
    parameters have output features in the last dim but one. Of `nn.MultiheadAttention` the heads are split: its output
    projection is row-parallel, and its output is replicated by default.

    >>> import torch, shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     layer = sw.parallel.parallelize_module(nn.Linear(4, 6), mesh, ColwiseParallel(use_local_output=False))
    ...     print(layer.weight.sharding, layer(torch.ones(3, 4)).sharding)
    [6:tp, 4] [3, 6:tp]
    """

    split = "out"

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts, use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.MultiheadAttention):
            return self._split_heads(module, device_mesh)
        return super()._apply(module, device_mesh)

    def _split_heads(self, module: nn.MultiheadAttention, mesh: DeviceMesh) -> nn.Module:
        """Split the heads of an attention module; queries, keys and values are replicated, and the output is reduced."""
        layouts = attention_layouts(module, axes_of(mesh), 0)
        place_tensors(module, mesh, layouts, self.src_data_rank)
        wrap_method(module, "forward", Boundary(mesh, 0, "gather", "reduce"))
        (declared,) = self.input_layouts or (Replicate(),)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # once for each tensor: attention of a tensor to itself projects it once
            given = [*args[:3], *(v for k, v in kwargs.items() if k in _ATTENTION_INPUTS)]
            ready = {id(x): distributed(x, mesh, declared, Replicate()) for x in given}
            named = {k: ready[id(v)] if k in _ATTENTION_INPUTS else v for k, v in kwargs.items()}
            return (*(ready[id(x)] for x in args[:3]), *args[3:]), named

        def leave(module: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, Tensor | None]) -> Any:
            (wanted,) = self.output_layouts or (Replicate(),)
            weights = None if out[1] is None else self._local(out[1], Replicate())  # type: ignore[arg-type]
            return self._local(out[0], _counted_from_front(wanted, out[0])), weights  # type: ignore[arg-type]

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)
        return module

    def _inputs(self, module: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        (declared,) = self.input_layouts or (Replicate(),)
        return (distributed(args[0], mesh, declared, Replicate()), *args[1:])

    def _outputs(self, module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        (wanted,) = self.output_layouts or (Shard(feature_dim(module)),)
        return self._local(out, _counted_from_front(wanted, out))


class RowwiseParallel(_SplitStyle):
    """Split the input features of a module: the rows of its weight in `x @ w`. A bias stays replicated and is added once.

    Args:
        input_layouts: the placement of a plain input; by default its features are split.
        output_layouts: the placement of the output; by default `Replicate()`, an all-reduce. `Shard(1)` is a
            reduce-scatter along the sequence.
        use_local_output: return the block of this rank instead of a DTensor.

    For the same modules as `ColwiseParallel`. An embedding needs `input_layouts=Replicate()`: its rows are split.
    """

    split = "in"

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts, output_layouts or Replicate(), use_local_output)

    def _inputs(self, module: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, features = args[0], Shard(feature_dim(module))
        (declared,) = self.input_layouts or (features,)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return (distributed(x, mesh, declared, Replicate()), *args[1:])
        declared, features = (_counted_from_front(p, x) for p in (declared, features))
        shape = None
        size = getattr(module, "in_features", None)
        if declared == features and isinstance(size, int):
            shape = [*first_rank(x).shape]
            shape[features.dim] = size  # blocks may be uneven, and the module knows the full size
        return (distributed(x, mesh, declared, features, shape), *args[1:])

    def _outputs(self, module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        (wanted,) = self.output_layouts or (Replicate(),)
        return self._local(out, _counted_from_front(wanted, out))


def _counted_from_front(placement: Any, x: Tensor) -> Any:
    """The placement with a dim of this tensor that is not negative."""
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + x.dim(), placement.order, placement.factors, placement.factor)
    return placement


class SequenceParallel(ParallelStyle):
    """Run a module on activations that are split along the sequence, with replicated parameters: norms, dropout.

    Args:
        sequence_dim: the dim of the input that is split.
        use_local_output: return the block of this rank instead of a DTensor.

    The gradients of the parameters are summed over the ranks, however many micro-batches are accumulated.
    """

    _shown = ("sequence_dim", "use_local_output")

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim = sequence_dim
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _problems(self, module: nn.Module, device_mesh: DeviceMesh) -> list[str]:
        return device_problems(((s.full_name, s.tensor) for s in slots_of(module)), device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for group in group_ties(slots_of(module)):
            if not isinstance(group[0].tensor, DTensor):
                layout = Layout.replicated(tuple(group[0].tensor.shape), axes_of(device_mesh))
                place(group, device_mesh, layout, self.src_data_rank)
        (split,) = self.sequence_sharding

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (distributed(args[0], device_mesh, split, split), *args[1:])

        def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            return out.to_local() if self.use_local_output else out

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module
