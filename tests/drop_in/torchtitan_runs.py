"""torchtitan's Llama 3 debug model in its two DTensor modes, compared with one device; run in forks.

torchtitan has no CPU device and imports triton, whose kernels it uses on GPUs only: the run names the device and imports stand-ins.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch._inductor.compile_fx
import torch._inductor.output_code
import torch.distributed as dist
from tests.clients.float64 import Float64
from torch import Tensor, nn


class _StandIn(ModuleType):
    """A module whose functions return what they get: `triton` while torchtitan is imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_: args[0] if args else (lambda function: function)


_NAMES = ("triton", "triton.language")
sys.modules.update({name: _StandIn(name) for name in _NAMES})
sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]
from torchtitan import config as titan_config  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.distributed import full_dtensor, parallel_dims  # noqa: E402
from torchtitan.distributed import utils as titan_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402

for _name in _NAMES:
    del sys.modules[_name]

parallel_dims.device_type = "cpu"
titan_config.TORCH_DTYPE_MAP["float32"] = torch.float64


def _build(sequence_parallel: bool) -> tuple[Any, nn.Module]:
    spec = model_registry("debugmodel")
    config = spec.model
    del config.layers[2:]
    for layer in config.layers:  # flex_attention is compiled, or slow
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=sequence_parallel)
    with torch.device("meta"):
        model = config.build()
    return spec, model.double()


def _model(backend: str, dims: Any, parallelism: Any) -> nn.Module:
    spec, model = _build(parallelism.enable_sequence_parallel)
    titan_utils.set_spmd_backend(backend)
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=titan_config.TrainingConfig(
            mixed_precision_param="float32", mixed_precision_reduce="float32"
        ),
        parallelism=parallelism,
        compile_config=titan_config.CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    return model


def _materialize(model: nn.Module, seed: int) -> None:
    """Values that do not depend on the layouts."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        for i, p in enumerate(model.parameters()):
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype) / 16
            if isinstance(p, DTensor):
                p.copy_(distribute_tensor(values, p.device_mesh, p.placements))
            else:
                p.copy_(values)


def _full(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[no-any-return]


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 2048, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def _step(
    model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], total: int, wrap: Callable[..., Any]
) -> tuple[Tensor, Tensor]:
    inputs, labels, _ = wrap(*batch, {})
    loss, _ = CrossEntropyLoss(CrossEntropyLoss.Config())(model(inputs), labels, torch.tensor(float(total)))
    loss.backward()
    norm = titan_utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    return _full(loss).detach(), _full(norm)


def train(
    backend: str, tp: int, steps: int = 2, replicate: int = 1, sequence_parallel: bool = True
) -> dict[str, Any]:
    """Train on all ranks and on one device: the greatest relative difference of losses, norms and parameters."""
    with Float64():
        world = dist.get_world_size()
        parallelism = titan_config.ParallelismConfig(
            data_parallel_replicate_degree=replicate,
            data_parallel_shard_degree=world // tp // replicate,
            tensor_parallel_degree=tp,
            enable_sequence_parallel=sequence_parallel,
            spmd_backend=backend,
        )
        dims = parallel_dims.ParallelDims.from_config(parallelism, world)
        dims.build_mesh()
        model = _model(backend, dims, parallelism)
        _, dense = _build(False)
        for m in (model, dense):
            _materialize(m, 0)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=True) for m in (model, dense)]
        parameters = list(model.parameters())
        out: dict[str, Any] = {"split": sum(hasattr(p, "placements") for p in parameters)}
        out["parameters in all"] = len(parameters)
        parts = world // tp
        times = []
        for step in range(steps):
            batch = _batch(step)
            mine = tuple(t.chunk(parts)[dist.get_rank() // tp] for t in batch)

            def wrap(inputs: Tensor, labels: Tensor, extra: Any) -> Any:
                if backend == "full_dtensor":
                    return full_dtensor.parallelize_inputs(dims, inputs, labels, extra)
                return inputs, labels, extra

            begin = time.perf_counter()
            loss, norm = _step(model, optimizers[0], mine, batch[0].numel(), wrap)
            times.append(time.perf_counter() - begin)
            want, want_norm = _step(dense, optimizers[1], batch, batch[0].numel(), lambda *args: args)
            if backend != "full_dtensor":  # each rank has the part of its own rows
                loss = loss.clone()
                dist.all_reduce(loss)
                loss /= tp
            out["loss"] = ((loss - want) / want).abs().item()
            out["norm"] = ((norm - want_norm) / want_norm).abs().item()
        pairs = zip(model.parameters(), dense.parameters(), strict=True)
        out["parameters"] = max(
            ((_full(p).detach() - q).abs().max() / q.abs().max()).item() for p, q in pairs
        )
        out["ms"] = min(times) * 1e3
    return out
