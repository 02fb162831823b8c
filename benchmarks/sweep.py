"""Every op of torch's own `op_db` on drawn layouts, against the dense result: right, wrong or error, op by op."""

import argparse
import collections
import logging
import random
import time
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import shardwise as sw
from shardwise.comm import members_of

MESHES = ((2,), (3,), (2, 2))


def distributed(t: Tensor, mesh: sw.DeviceMesh, draw: random.Random) -> Any:
    """A tensor on the mesh in a drawn layout, pending parts of asymmetric, sign-changing values included."""
    placements: list[sw.Placement] = []
    for _ in range(mesh.ndim):
        options: list[sw.Placement] = [sw.Replicate()] + [sw.Shard(d) for d in range(t.dim())] * 2
        if t.dtype.is_floating_point or t.dtype.is_complex:
            options.append(sw.Partial())
        placements.append(draw.choice(options))
    x = sw.distribute_tensor(t.detach(), mesh, placements)
    if x.layout.partial and t.numel():
        axes = [a for a, _ in x.layout.partial]
        noise = {}
        for rank, coord in members_of(mesh).items():
            block = x.to_local().of_rank(rank)
            key = tuple(c for a, c in enumerate(coord) if a != axes[0])
            n = mesh.shape[axes[0]]
            if key not in noise:
                noise[key] = [torch.randint(-4, 5, block.shape).to(block.dtype) for _ in range(n - 1)]
                noise[key].append(-sum(noise[key]))
            block += noise[key][coord[axes[0]]]
    return x


def swap(value: Any, fn: Any) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, list | tuple):
        return (
            type(value)(*(swap(v, fn) for v in value))
            if hasattr(value, "_fields")
            else type(value)(swap(v, fn) for v in value)
        )
    if isinstance(value, dict):
        return {k: swap(v, fn) for k, v in value.items()}
    return value


def flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [x for v in value for x in flat(v)]
    return [value]


def same(got: Any, want: Any, layout_of: Any) -> str:
    """Empty if they agree, else what is wrong."""
    if isinstance(want, Tensor):
        if isinstance(got, sw.DTensor):
            got = got.full_tensor().ranks[0]
        elif isinstance(got, sw.PerRank):
            got = got.ranks[0]
        if got.shape != want.shape:
            return f"shape {tuple(got.shape)} not {tuple(want.shape)}"
        if got.dtype != want.dtype:
            return f"dtype {got.dtype} not {want.dtype}"
        if want.is_sparse or want.layout is not torch.strided:
            return ""
        tol = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-8, torch.complex128: 1e-8}.get(
            want.dtype, 2e-4
        )
        if not torch.allclose(
            got.to(torch.complex128), want.to(torch.complex128), rtol=tol, atol=tol, equal_nan=True
        ):
            return f"values: {got.flatten()[:4].tolist()} not {want.flatten()[:4].tolist()}"
        return ""
    return "" if got == want or (got != got and want != want) else f"{got!r} not {want!r}"


def check(op: Any, sample: Any, mesh: sw.DeviceMesh, draw: random.Random) -> tuple[str, str]:
    """The verdict on one sample, and what was seen."""
    call = (sample.input, sample.args, sample.kwargs)
    try:
        dense = op(*(lambda i, a, k: (i, *a))(*swap(call, lambda t: t.detach().clone())), **sample.kwargs)
    except Exception:
        return "skipped", "dense fails"
    seen: list[str] = []

    def put(t: Tensor) -> Any:
        x = distributed(t, mesh, draw)
        seen.append(str(x._spec))
        return x

    state = torch.get_rng_state()
    try:
        i, a, k = swap(call, put)
        torch.set_rng_state(state)
        got = op(i, *a, **k)
        results = list(zip(flat(got), flat(dense), strict=True))
        for g, w in results:
            if verdict := same(g, w, None):
                return "wrong", f"{verdict} on {seen} {sample.args} {sample.kwargs}"
    except Exception as error:
        return (
            "error",
            f"{type(error).__name__}: {str(error)[:200]} on {seen} {str(sample.args)[:80]} {sample.kwargs}",
        )
    return "right", ""


def loss_of(result: Any, mesh: Any) -> Any:
    """A weighted sum of what can be differentiated, or None."""
    total = None
    for out in flat(result):
        if (
            isinstance(out, Tensor)
            and out.requires_grad
            and (out.dtype.is_floating_point or out.dtype.is_complex)
        ):
            w = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
            if isinstance(out, sw.DTensor):
                w = sw.distribute_tensor(w, mesh, [sw.Replicate()] * mesh.ndim)
            term = (out * w).sum()
            term = term.real if term.dtype.is_complex else term
            total = term if total is None else total + term
    return total


def check_grad(op: Any, sample: Any, mesh: sw.DeviceMesh, draw: random.Random) -> tuple[str, str]:
    """The verdict on the gradients of one sample."""
    call = (sample.input, sample.args, sample.kwargs)
    leaves: list[Tensor] = []
    mine: list[Any] = []
    seen: list[str] = []

    def leaf(t: Tensor) -> Tensor:
        out = t.detach().clone().requires_grad_(t.dtype.is_floating_point or t.dtype.is_complex)
        leaves.append(out)
        return out

    def put(t: Tensor) -> Any:
        x = distributed(t, mesh, draw).requires_grad_(t.dtype.is_floating_point or t.dtype.is_complex)
        mine.append(x)
        seen.append(str(x._spec))
        return x

    try:
        i, a, k = swap(call, leaf)
        loss = loss_of(op(i, *a, **k), mesh)
        if loss is None:
            return "skipped", ""
        loss.backward()
    except Exception:
        return "skipped", "dense fails"
    try:
        i, a, k = swap(call, put)
        loss_of(op(i, *a, **k), mesh).backward()
        for x, t in zip(mine, leaves, strict=True):
            if (x.grad is None) != (t.grad is None):
                if (t.grad if x.grad is None else x.grad.full_tensor().ranks[0]).abs().sum() != 0:
                    return "wrong", f"grad {x.grad is None} {t.grad is None} on {seen}"
            elif t.grad is not None and (verdict := same(x.grad, t.grad, None)):
                return "wrong", f"grad {verdict} on {seen} {sample.args} {sample.kwargs}"
    except Exception as error:
        return (
            "error",
            f"{type(error).__name__}: {str(error)[:200]} on {seen} {str(sample.args)[:80]} {sample.kwargs}",
        )
    return "right", ""


RANDOM = {
    "bernoulli",
    "normal",
    "multinomial",
    "rand_like",
    "randn_like",
    "randint_like",
    "randint",
    "randn",
    "nn.functional.dropout",
    "nn.functional.alpha_dropout",
    "nn.functional.feature_alpha_dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.rrelu",
    "uniform",
    "exponential",
    "cauchy",
    "geometric",
    "log_normal",
    "empty",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "empty_strided",
    "empty_permuted",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "pca_lowrank",
    "svd_lowrank",
    "normal.number_mean",
    "normal.in_place",
    "bernoulli_",
    "nn.functional.scaled_dot_product_attention_dropout",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grad", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("shardwise").setLevel(logging.ERROR)
    dtype = getattr(torch, options.dtype)
    counts: collections.Counter[str] = collections.Counter()
    bad: dict[str, list[str]] = {}
    start = time.perf_counter()
    for op in op_db:
        if options.only and options.only not in op.full_name:
            continue
        if options.grad and not op.supports_autograd:
            continue
        if dtype not in op.supported_dtypes("cpu") or op.name in RANDOM or "sparse" in op.name:
            continue
        draw = random.Random(f"{options.seed}{op.full_name}")
        torch.manual_seed(0)
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
        for sample in draw.sample(samples, min(options.samples, len(samples))):
            shape = draw.choice(MESHES)
            world = 1
            for n in shape:
                world *= n
            with sw.simulate(world):
                mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
                verdict, why = (check_grad if options.grad else check)(op, sample, mesh, draw)
            counts[verdict] += 1
            if verdict in ("wrong", "error"):
                bad.setdefault(f"{verdict} {op.full_name}", []).append(why)
    for name, whys in sorted(bad.items()):
        print(name, len(whys), " ".join(whys[0].split())[:300])
    print(dict(counts), f"{time.perf_counter() - start:.0f} s", len(bad), "ops")


if __name__ == "__main__":
    main()
