"""Programs as lines of text, run on dense tensors and on DTensors side by side.

A line is a Python statement. Both runs have the same names; `make` creates a dense tensor in one and a DTensor in the other.
After each line, what Python can see of every tensor is compared without reading its values; the line `check()` compares
the values. Reading the values of a view may refresh it, so programs decide when that happens.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tests.dense import parse_placements
from tests.values import dense_tensor, tensor
from torch import Tensor
from torch.autograd.graph import increment_version

import shardwise as sw
from shardwise.comm import PerRank, axes_of
from shardwise.layout import Layout

CHECK = "check()"


class DifferenceError(AssertionError):
    """The dense and the distributed run of a program differ."""


def _save_and_load(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


class Side:
    """The names of one run."""

    def __init__(self, make: Callable[..., Tensor], local: Callable[[Tensor], Tensor]) -> None:
        self.names: dict[str, Any] = {
            "torch": torch, "make": make, "local": local, "deepcopy": copy.deepcopy, "saved": _save_and_load,
        }  # fmt: skip
        self.given = set(self.names)
        self.versions: dict[str, tuple[int, int]] = {}

    def define(self, name: str, value: Any) -> None:
        """Add a function that programs may call."""
        self.names[name] = value
        self.given.add(name)

    def run(self, line: str) -> Exception | None:
        """Execute a line; the error that it raises, if any."""
        if "swap_tensors" in line:
            self.versions = {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, self.names)
        except Exception as error:
            return error
        return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors that have names, also those in lists."""
        for name, value in list(self.names.items()):
            if name in self.given or name == "__builtins__":
                continue
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, list | tuple):
                yield from ((f"{name}[{i}]", t) for i, t in enumerate(value) if isinstance(t, Tensor))

    def facts(self) -> dict[str, dict[str, Any]]:
        """What Python sees of every tensor, without reading values."""
        facts = {name: self._facts_of(name, t) for name, t in self.tensors()}
        self.versions = {name: v for name, v in self.versions.items() if name in facts}  # ids are used again
        return facts

    def _facts_of(self, name: str, t: Tensor) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "shape": tuple(t.shape),
            "dtype": t.dtype,
            "stride": _strides_that_matter(t),
            "is_contiguous": t.is_contiguous(),
            "requires_grad": t.requires_grad,
            "is_inference": t.is_inference(),
            "lazy bits": (t.is_conj(), t.is_neg()),
        }
        try:
            facts |= {"is_leaf": t.is_leaf, "has grad_fn": t.grad_fn is not None}
        except (RuntimeError, IndexError):  # a view that autograd does not allow to be used any more
            facts["is_leaf"] = "error"
        if t.is_inference():
            return facts
        try:
            known = self.versions.get(name)
            if known is None or known[0] != id(t):
                known = self.versions[name] = (id(t), t._version)
            facts["version"] = t._version - known[1]
        except RuntimeError:
            facts["version"] = "none"  # it has the data of an inference tensor
        return facts


def _strides_that_matter(t: Tensor) -> tuple[int, ...]:
    """The strides of dims with several elements."""
    return tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) if t.numel() else ()


def sides(mesh: Any) -> tuple[Side, Side]:
    """The two runs of a program on a mesh."""

    def dense(
        shape: Sequence[int], layout: str, dtype: str = "float64", grad: bool = False, seed: int = 0
    ) -> Tensor:
        return dense_tensor(shape, getattr(torch, dtype), seed).requires_grad_(grad)

    def distributed(
        shape: Sequence[int], layout: str, dtype: str = "float64", grad: bool = False, seed: int = 0
    ) -> Tensor:
        on = Layout.of(shape, axes_of(mesh), parse_placements(layout))
        x = tensor(dense_tensor(shape, getattr(torch, dtype), seed), on, mesh, seed=seed)
        return x.detach().requires_grad_(grad)

    def block(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.to_local()  # type: ignore[attr-defined, no-any-return]

    left, right = Side(dense, lambda x: x.data), Side(distributed, block)
    left.define(
        "sgd", lambda p, g: (_fused_sgd(p, g), increment_version(p))
    )  # torch forgets it, and reads old values
    right.define("sgd", _fused_sgd)
    return left, right


def _fused_sgd(p: Tensor, grad: Tensor) -> None:
    options = {"momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([p], [grad], [], lr=1.0, is_first_step=True, **options)


def _full(x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return _ranks(x.detach().full_tensor())  # type: ignore[attr-defined]


def _ranks(block: Tensor) -> list[Tensor]:
    return list(block.ranks) if isinstance(block, PerRank) else [block]


def _values_differ(name: str, want: Tensor, got: Tensor) -> str | None:
    if not isinstance(got, sw.DTensor):
        return f"{name} is a {type(got).__name__}"
    for rank, r in enumerate(_full(got)):
        w = want.detach().resolve_conj().resolve_neg()
        if not torch.equal(r, w) and not torch.allclose(r, w, equal_nan=True, rtol=1e-9, atol=1e-9):
            return f"{name} on rank {rank} is {r.tolist()}, dense {w.tolist()}"
    if got.is_contiguous() and not all(b.is_contiguous() for b in _ranks(got.detach().to_local())):
        return f"{name} is contiguous, but a block is not"
    return None


def _differences(dense: Side, distributed: Side, values: bool) -> Iterator[str]:
    want, got = dense.facts(), distributed.facts()
    if want.keys() != got.keys():
        yield f"names: {sorted(got)}, dense {sorted(want)}"
        return
    for name, facts in want.items():
        for fact, value in facts.items():
            if got[name].get(fact) != value:
                yield f"{name}: {fact} is {got[name].get(fact)}, dense {value}"
    if not values:
        return
    for (name, w), (_, g) in zip(dense.tensors(), distributed.tensors(), strict=True):
        text = _values_differ(name, w, g)
        if text:
            yield text
        if w.requires_grad and want[name]["is_leaf"] is True:
            if (w.grad is None) != (g.grad is None):
                yield f"{name}.grad is {g.grad}, dense {w.grad}"
            elif w.grad is not None and (text := _values_differ(name + ".grad", w.grad, g.grad)):
                yield text


def run_program(lines: Sequence[str], mesh: Any) -> None:
    """Run a program on both sides; raise at the first difference."""
    dense, distributed = sides(mesh)
    errors: tuple[Exception | None, Exception | None] = (None, None)
    for number, line in enumerate([*lines, CHECK]):
        if number == len(lines) and errors[0] is not None:
            return  # what a refused write has written is not defined
        errors = (None, None) if line == CHECK else (dense.run(line), distributed.run(line))
        if (errors[0] is None) != (errors[1] is None):
            raise DifferenceError(
                _report(lines, number, [f"raised {errors[1]!r}, dense {errors[0]!r}"])
            ) from errors[1]
        found = list(itertools.islice(_differences(dense, distributed, line == CHECK), 4))
        if found:
            raise DifferenceError(_report(lines, number, found))


def _report(lines: Sequence[str], number: int, found: Sequence[str]) -> str:
    shown = [
        f"    {line}" + ("    # <- here" if i == number else "") for i, line in enumerate([*lines, CHECK])
    ]
    return "\n".join(["", *shown, *(f"  {f}" for f in found)])


@contextlib.contextmanager
def simulated_mesh(sizes: Sequence[int]) -> Iterator[Any]:
    """A mesh of simulated ranks."""
    world = torch.Size(sizes).numel()
    with sw.simulate(world):
        yield sw.init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("dp", "tp")[: len(sizes)])
