"""Programs as text: running one on dense tensors and on a mesh, and the difference of the two runs.

A program is a mesh and statements. A statement is Python code on the names in `environment`; tensors enter by
`put(shape, dtype, seed, layout)`, which ignores the layout on one device.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from tests.programs.conditioning import Rounding, SeparateOperands
from tests.values import tensor
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

import shardwise as sw
from shardwise.comm import PerRank, axes_of
from shardwise.layout.parse import parse_layout

__all__ = ["AXES", "Difference", "Outcome", "Program", "Statement", "difference", "environment", "run_dense"]

AXES = ("dp", "tp", "cp")
_SEED = 5
_REPLAYS_VIEWS = "new_fn INTERNAL ASSERT FAILED"
"""What torch raises for tensor subclasses where the base of a view no longer requires a gradient and was written to.

For plain tensors it derives the view from strides; for subclasses it runs the view op again, and expects a gradient of it.
"""

_SEPARATE = -1
"""In place of the seed of rounding errors: operands that overlap what is written to are copied."""
_AFTER_REPLAYS = (
    "does not require grad and does not have a grad_fn",  # the whole graph is lost with the view
    "more than one element of the written-to tensor",  # `as_strided` has a dense gradient, that of other views is expanded
)
_OF_DENSE = ("ZeroTensors are immutable", "on an invalid python storage")
"""What torch raises for gradients without memory, which it writes to or copies; those of DTensors have memory."""


@dataclass(frozen=True)
class Statement:
    """A piece of code.

    Attributes:
        raises: the type of the error that dense torch raises for it, or "".
    """

    code: str
    raises: str = ""


@dataclass(frozen=True)
class Program:
    """Statements on a mesh of this shape."""

    mesh: tuple[int, ...]
    statements: tuple[Statement, ...]

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)


@dataclass
class Outcome:
    """What a run of a program gave.

    Attributes:
        errors: the type of the error of each statement, or "".
        described: what Python can see of each tensor, apart from its values, after each statement.
        values: every number, and every tensor with its gradient, at the end.
        derives_views: whether a view's base was written to, after which torch differentiates the view by its strides; for
            tensor subclasses it runs the view op again, and the gradients have other strides, and a graph if they are empty.
    """

    errors: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    described: list[dict[str, str]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    derives_views: bool = False


@dataclass(frozen=True)
class Difference:
    """The first difference of a run on a mesh from the dense one.

    Attributes:
        kind: "error", "missing error", "description" or "values".
        text: what differs.
    """

    kind: str
    text: str


def dense_values(shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """Values without ties or zeros, if they are floating point, whose sums of a few terms are exact."""
    with no_dispatch():  # inputs have no rounding errors
        values = _dense_values(shape, dtype, seed)
        return torch.empty(shape, dtype=values.dtype).copy_(values)  # contiguous also if it is empty


def _dense_values(shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    n = math.prod(shape)
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=rng).view(shape)
    floats = (order - n // 2) / 32 + 1 / 64
    match dtype:
        case "bool":
            return order % 2 == 0
        case "int64":
            return order % 5 - 1
        case "complex128":
            return torch.complex(floats.double(), floats.double().flip(list(range(len(shape)))) * 0.5)
    return floats.to(getattr(torch, dtype))


def environment(put: Callable[..., Any]) -> dict[str, Any]:
    """The names that programs use."""
    return {
        "torch": torch,
        "F": torch.nn.functional,
        "nn": torch.nn,
        "func": torch.func,
        "checkpoint": torch.utils.checkpoint.checkpoint,
        "copy": copy,
        "io": io,
        "functools": functools,
        "one_device": sw.one_device,
        "put": put,
    }


def put_dense(shape: tuple[int, ...], dtype: str, seed: int, layout: str = "") -> Tensor:
    return dense_values(shape, dtype, seed)


def _names(env: Mapping[str, Any]) -> list[str]:
    return [name for name in env if name[0] == "t" and name[1:].isdigit()]


def _describe(t: Any) -> str:
    """What Python can see of a tensor apart from its values; strides only where they mean something."""
    if not isinstance(t, Tensor):
        return type(t).__name__
    try:
        leaf = t.is_leaf
    except RuntimeError:  # a view that torch no longer allows, since its base was written to
        return "invalid"
    sizes, strides = list(t.shape), list(t.stride())
    seen = [s if n > 1 and t.numel() else "_" for n, s in zip(sizes, strides, strict=True)]
    flags = "".join(
        f" {name}"
        for name, on in [
            ("contiguous", t.is_contiguous()),
            ("requires_grad", t.requires_grad),
            ("leaf", leaf),
            ("inference", t.is_inference()),
        ]
        if on
    )
    return f"{str(t.dtype)[6:]} {sizes} strides {seen}{flags}".replace("'", "")


def _is_derived(t: Any) -> bool:
    try:
        return isinstance(t, Tensor) and type(t.grad_fn).__name__ == "AsStridedBackward0"
    except RuntimeError:
        return False


def _run(program: Program, env: dict[str, Any], read: Callable[[Any], Any], stop_at_error: bool) -> Outcome:
    """Run all statements; stop after an error that is not the dense one's."""
    out = Outcome()
    sw.manual_seed(_SEED)
    for statement in program.statements:
        error, message = "", ""
        try:
            exec(statement.code, env)  # programs are text so that they can be shrunk and printed
        except Exception as e:
            error, message = type(e).__name__, str(e)
        out.errors.append(error)
        out.messages.append(message)
        if stop_at_error and bool(error) != bool(statement.raises):
            break
        out.derives_views |= any(_is_derived(env[name]) for name in _names(env))
        out.described.append({name: _describe(env[name]) for name in _names(env)})
    else:
        for name in _names(env):
            if out.described and out.described[-1][name] == "invalid":
                continue
            out.values[name] = read(env[name])
            grad = env[name].grad if isinstance(env[name], Tensor) and env[name].is_leaf else None
            out.values[f"{name}.grad"] = None if grad is None else read(grad)
    torch.set_grad_enabled(True)
    return out


def run_dense(program: Program, rounding: int | None = None) -> Outcome:
    """Run a program on one device, with random rounding errors of the given seed, or as `_SEPARATE` says."""
    env = environment(put_dense)
    if rounding is None:
        return _run(program, env, _detached, stop_at_error=True)
    # the terms that `tests.values.parts` draws are up to 3
    with (
        SeparateOperands()
        if rounding < 0
        else Rounding(rounding, term=3.0 if any("P(" in s.code for s in program.statements) else 0.0)
    ):
        return _run(program, env, _detached, stop_at_error=True)


def with_errors(program: Program) -> Program:
    """The program with the errors that its statements raise on one device, up to one that only dense tensors have."""
    run = _run(program, environment(put_dense), _detached, stop_at_error=False)
    last = next(
        (i for i, text in enumerate(run.messages) if any(known in text for known in _OF_DENSE)),
        len(run.errors),
    )
    pairs = zip(program.statements[:last], run.errors, strict=False)
    return Program(program.mesh, tuple(Statement(s.code, error) for s, error in pairs))


def _detached(value: Any) -> Any:
    return value.detach().resolve_conj().resolve_neg().clone() if isinstance(value, Tensor) else value


def run_on(mesh: sw.DeviceMesh, program: Program) -> Outcome:
    """Run a program on a mesh."""
    axes = axes_of(mesh)

    def put(shape: tuple[int, ...], dtype: str, seed: int, layout: str) -> Any:
        return tensor(dense_values(shape, dtype, seed), parse_layout(layout, axes)[0], mesh, seed)

    return _run(program, environment(put), _full, stop_at_error=True)


def _full(value: Any) -> Any:
    """The full tensors of all ranks, or the value."""
    if not isinstance(value, Tensor):
        return value
    full = value.detach().full_tensor() if isinstance(value, sw.DTensor) else value.detach()
    ranks = full.ranks if isinstance(full, PerRank) else [full]
    return [t.resolve_conj().resolve_neg().clone() for t in ranks]


def difference(program: Program, mesh: sw.DeviceMesh, dense: Outcome | None = None) -> Difference | None:
    """The first difference of a run on the mesh from the dense run; None if there is none that rounding does not explain."""
    dense = run_dense(program) if dense is None else dense
    try:
        mine = run_on(mesh, program)
    except Exception as e:  # while reading the values
        return Difference("error", f"while reading values: {type(e).__name__}: {e}")
    for i, (got, want) in enumerate(zip(mine.errors, dense.errors, strict=False)):
        replayed = _REPLAYS_VIEWS in mine.messages[i]
        if dense.derives_views and any(text in mine.messages[i] for text in _AFTER_REPLAYS):
            replayed = True
        if replayed or _lost_views(mine.described[: i + 1], dense.described):
            return None
        if got and not want:
            return Difference("error", f"statement {i} raises {got}: {mine.messages[i]}")
        if got != want and not (want and _is_kind_of(got, want)):
            return Difference("missing error", f"statement {i} raises {got or 'nothing'}, not {want}")
        if i == len(mine.described):
            return Difference(
                "error", f"statement {i} raises {got or 'nothing'}, not {program.statements[i].raises}"
            )
        detaches = any(".detach_()" in s.code for s in program.statements[: i + 1])
        if difference := _described_differently(
            mine.described[i], dense.described[i], dense.derives_views, detaches
        ):
            if _depends_on_rounding(program, dense, i):
                return None
            return Difference("description", f"after statement {i}, {difference}")
    wrong = [name for name, want in dense.values.items() if not _close(mine.values.get(name), want)]
    if not wrong or any("] = " in s.code for s in program.statements if s.raises):
        return None  # what a write that is refused has written is not defined
    defined = run_dense(program, _SEPARATE)
    if any(
        not _close([v] if isinstance(v, Tensor) else v, defined.values.get(n))
        for n, v in dense.values.items()
    ):
        return None
    trials = [
        trial for trial in (run_dense(program, seed) for seed in range(8)) if trial.errors == dense.errors
    ]
    for name in wrong:
        if dense.derives_views and any(f".backward({name}," in s.code for s in program.statements):
            continue  # torch adds to a gradient that it was given, if the op passes it on as it is, as most views do
        got, want = mine.values.get(name), dense.values[name]
        if not _explained(got, want, [trial.values.get(name) for trial in trials]):
            return Difference("values", f"{name} is {_shown(got)}, not {_shown(want)}")
    return None


def _depends_on_rounding(program: Program, dense: Outcome, i: int) -> bool:
    """Whether dense runs with other rounding errors give tensors of another shape, as `unique` may."""
    sizes = [
        [re.sub(r" strides.*", "", text) for _, text in sorted(run.described[i].items())]
        for run in (dense, *(run_dense(program, seed) for seed in range(8)))
        if i < len(run.described)
    ]
    return any(s != sizes[0] for s in sizes)


def _lost_views(mine: Sequence[Mapping[str, str]], dense: Sequence[Mapping[str, str]]) -> bool:
    """Whether torch refuses views that it allows on plain tensors: see `_REPLAYS_VIEWS`."""
    return bool(mine) and any(
        text == "invalid" and dense[len(mine) - 1].get(name) != "invalid" for name, text in mine[-1].items()
    )


def _is_kind_of(got: str, want: str) -> bool:
    """Whether an error of ours is of torch's type, too."""
    ours = {"LayoutError": sw.LayoutError, "PlainTensorError": sw.PlainTensorError}
    return got in ours and want in [kind.__name__ for kind in ours[got].__mro__]


def _described_differently(
    mine: Mapping[str, str], dense: Mapping[str, str], derives_views: bool, detaches: bool
) -> str:
    for name, want in dense.items():
        got = mine.get(name)
        if derives_views and got is not None and _without_strides(got) == _without_strides(want):
            continue
        if got == f"{want.removesuffix(' leaf')} requires_grad leaf" and detaches:
            continue  # a view without a graph: its base requires a gradient for those that have one
        if got != want:
            return f"{name} is {mine.get(name)}, not {want}"
    return ""


def _without_strides(text: str) -> str:
    text = re.sub(r" strides \[[^]]*\]( contiguous)?", "", text)
    # a view whose base no longer requires a gradient and was written to: torch derives it, and says that it requires one
    text = re.sub(r" leaf$| requires_grad$", "", text)
    # torch gives zeros without a graph as the gradient of a view without elements
    return re.sub(r" requires_grad| leaf", "", text) if re.search(r"[\[ ]0[,\]]", text) else text


def _close(got: Any, want: Any) -> bool:
    if not isinstance(want, Tensor):
        if isinstance(want, float):
            return isinstance(got, float) and math.isclose(got, want, rel_tol=1e-5, abs_tol=1e-6)
        if isinstance(want, list | tuple):
            return len(got) == len(want) and all(_close(g, w) for g, w in zip(got, want, strict=True))
        return type(got) is type(want) and (got == want or not isinstance(want, int | str | complex))
    if not isinstance(got, list):
        return False
    return all(_tensors_close(g, want) for g in got)


def _tensors_close(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        return torch.equal(got, want)
    tolerance = 1e-4 if want.dtype in (torch.float32, torch.complex64) else 1e-8
    finite = want[want.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance * max(scale, 1.0), equal_nan=True)


def _explained(got: Any, want: Any, trials: Sequence[Any]) -> bool:
    """Whether dense runs with other rounding errors differ from the dense run, too, and about as much."""
    if all(_close([t] if isinstance(t, Tensor) else t, want) for t in trials):
        return False
    tensors = [t for t in trials if isinstance(t, Tensor)]
    if not isinstance(want, Tensor) or not isinstance(got, list) or len(tensors) < len(trials):
        return True
    if any(t.shape != want.shape or t.dtype != want.dtype for t in (*got, *tensors)):
        return all(t.dtype == want.dtype for t in got)  # how many values there are may depend on rounding
    # eight runs do not find the largest change, but its order of magnitude
    return _largest_change(got, want) <= 50 * _largest_change(tensors, want)


def _largest_change(found: Iterable[Tensor], want: Tensor) -> float:
    changes = [
        (_exact(t) - _exact(want)).abs().nan_to_num(math.inf) for t in found if not torch.equal(t, want)
    ]
    return max((float(c.max()) for c in changes if c.numel()), default=0.0)


def _exact(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.dtype.is_complex else torch.float64)


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        value = value[0] if all(_tensors_close(v, value[0]) for v in value) else value
    if isinstance(value, Tensor) and value.numel() > 12:
        return f"{str(value.flatten()[:12].tolist())[:-1]}, …]"
    return str(value.tolist() if isinstance(value, Tensor) else value)[:400]


def simulated_difference(program: Program) -> Difference | None:
    """The difference of a simulated run from the dense one."""
    with sw.simulate(program.world_size):
        mesh = sw.init_device_mesh("cpu", program.mesh, mesh_dim_names=AXES[: len(program.mesh)])
        return difference(program, mesh)


def check_simulated(program: Program) -> None:
    """Raise if a simulated run differs from the dense one."""
    found = simulated_difference(program)
    if found is not None:
        raise AssertionError(f"{found.kind}: {found.text}")
