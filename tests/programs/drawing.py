"""Drawing programs: statements are drawn one by one, and run on dense tensors to see what the next ones can use."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.programs.program import AXES, Program, Statement, environment, put_dense, with_errors
from tests.values import REDUCTIONS, random_layout
from torch import Tensor

import shardwise as sw
from shardwise.layout import Axes

__all__ = ["TEMPLATES", "Drawing", "draw_program", "template"]

Template = Callable[["Drawing"], str | None]
TEMPLATES: list[tuple[Template, float]] = []

_LARGEST = 1e5
_ELEMENTS = 160
_ERRORS = 0.08
"""The share of statements kept among those that raise on dense tensors."""
_NOT_FINITE = 0.1
MESHES = ((2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (1, 3), (2, 1, 2), (2, 2, 2))


def template(weight: float = 1.0) -> Callable[[Template], Template]:
    """Register a function that draws a statement, or returns None if it cannot."""

    def register(fn: Template) -> Template:
        TEMPLATES.append((fn, weight))
        return fn

    return register


class Drawing:
    """The state of drawing a program: its statements so far, and the tensors that they make on one device."""

    def __init__(self, rng: random.Random, mesh: tuple[int, ...]) -> None:
        self.rng, self.mesh = rng, mesh
        self.axes = Axes(mesh, AXES[: len(mesh)])
        self.env = environment(put_dense)
        self.statements: list[Statement] = []
        self.count = 0
        self.sizes = [rng.choice((2, 3, 4, 5, 6, 7, 8)) for _ in range(3)] + [rng.choice((1, 2, 4, 0, 3))]
        self.dtype = rng.choice(("float64", "float64", "float32"))

    # --- names

    def new(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def tensors(self) -> dict[str, Tensor]:
        return {
            n: v for n, v in self.env.items() if n[0] == "t" and n[1:].isdigit() and isinstance(v, Tensor)
        }

    def __getitem__(self, name: str) -> Any:
        return self.env[name]

    def pick(
        self, kind: str = "a", min_dim: int = 0, where: Callable[[Tensor], bool] | None = None
    ) -> str | None:
        """A tensor of a kind ("f" floating point, "i" integer, "b" bool, "c" complex, "n" real, "d" differentiable)."""
        found = [
            n
            for n, t in self.tensors().items()
            if is_kind(t, kind) and t.dim() >= min_dim and is_usable(t) and (where is None or where(t))
        ]
        if not found:
            return None
        # later ones more often, so that programs have long chains
        return found[max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))]

    def fresh(self, shape: Sequence[int], dtype: str = "", grad: bool | None = None) -> str:
        """A new input in a random layout."""
        dtype = dtype or self.dtype
        name, shape = self.new(), tuple(shape)
        reductions = sorted(REDUCTIONS[getattr(torch, dtype)] - {"product"})
        pending = reductions if self.rng.random() < 0.4 else []
        if pending and self.rng.random() < 0.6 and dtype != "bool":
            pending = ["sum"]
        layout = random_layout(self.rng, self.axes, shape, pending)
        code = f"{name} = put({shape}, {dtype!r}, {self.rng.randrange(1000)}, {layout.text()!r})"
        if (dtype.startswith(("float", "complex"))) and (self.rng.random() < 0.5 if grad is None else grad):
            code += ".requires_grad_()"
        self.run(code)
        return name

    def shape(self, max_dims: int = 3) -> tuple[int, ...]:
        while True:
            out = tuple(self.rng.choice(self.sizes) for _ in range(self.rng.choice((0, 1, 2, 2, 2, 3, 3))))
            if len(out) <= max_dims and torch.Size(out).numel() <= _ELEMENTS:
                return out

    def like(self, x: str, grad: bool | None = None, dtype: str = "") -> str:
        """A tensor with the shape and dtype of another: one that is there, or a new one."""
        t = self[x]
        dtype = dtype or str(t.dtype)[6:]
        there = self.pick(where=lambda s: s.shape == t.shape and str(s.dtype)[6:] == dtype)
        if there and self.rng.random() < 0.6:
            return there
        return self.fresh(t.shape, dtype, grad)

    def broadcastable(self, x: str, dtype: str = "") -> str:
        """A tensor that broadcasts to the shape of another, or with it."""
        t = self[x]
        if self.rng.random() < 0.4:
            return self.like(x, dtype=dtype)
        shape = [n if self.rng.random() < 0.6 else 1 for n in t.shape]
        return self.fresh(shape[self.rng.randrange(len(shape) + 1) :], dtype or str(t.dtype)[6:])

    def dim(self, x: str) -> int:
        d = self.rng.randrange(self[x].dim())
        return d - self[x].dim() if self.rng.random() < 0.3 else d

    def indices(self, shape: Sequence[int], size: int) -> str:
        """An int64 tensor of indices of a dim of this size."""
        raw = self.fresh(shape, "int64")
        name = self.new()
        self.run(f"{name} = {raw} % {max(size, 1)}")
        return name

    # --- statements

    def run(self, code: str) -> bool:
        """Append a statement and run it; False if it raises, and if that statement was not kept."""
        try:
            exec(code, self.env)
        except Exception as e:
            if self.rng.random() > _ERRORS:
                return False
            self.statements.append(Statement(code, type(e).__name__))
            return True
        self.statements.append(Statement(code))
        return True

    def is_sound(self) -> bool:
        """Whether all values are small numbers, so that rounding errors stay small."""
        with torch.no_grad():
            for t in self.tensors().values():
                if t.numel() > 4 * _ELEMENTS:
                    return False
                if t.is_floating_point() and t.numel():
                    if not bool(t.isfinite().all()):
                        if self.rng.random() > _NOT_FINITE:
                            return False
                    elif float(t.abs().max()) > _LARGEST:
                        return False
        return True


def is_usable(t: Tensor) -> bool:
    """Whether Python may look at the tensor: torch refuses that for some views whose base was written to."""
    try:
        return t.is_leaf or True
    except RuntimeError:
        return False


def is_kind(t: Tensor, kind: str) -> bool:
    dtype = t.dtype
    match kind:
        case "f":
            return dtype.is_floating_point
        case "c":
            return dtype.is_complex
        case "d":
            return dtype.is_floating_point or dtype.is_complex
        case "i":
            return dtype == torch.int64
        case "b":
            return dtype == torch.bool
        case "n":
            return not dtype.is_complex and dtype != torch.bool
        case "m":
            return dtype != torch.bool
    return True


def draw_program(seed: int, mesh: tuple[int, ...] | None = None) -> Program:
    """A program of 5 to 30 statements."""
    rng = random.Random(seed)
    mesh = rng.choice(MESHES) if mesh is None else mesh
    goal = rng.randrange(6, 26)
    drawing = Drawing(rng, mesh)
    for _ in range(rng.choice((1, 2, 3))):
        drawing.fresh(drawing.shape())
    if rng.random() < 0.3:
        drawing.fresh(drawing.shape(), rng.choice(("int64", "bool", "complex128")))
    functions, weights = zip(*TEMPLATES, strict=True)
    # a program uses some of the templates, so that these meet each other often
    chosen = rng.choices(functions, weights, k=10) if rng.random() < 0.5 else list(functions)
    chosen_weights = [dict(TEMPLATES)[f] for f in chosen]
    best = list(drawing.statements)
    for _ in range(3 * goal):
        if len(drawing.statements) >= goal:
            break
        (draw,) = rng.choices(chosen, chosen_weights)
        code = draw(drawing)
        if code is None:
            continue
        drawing.run(code)
        if not drawing.is_sound():
            break
        best = list(drawing.statements)
    sw.manual_seed(0)
    return with_errors(Program(mesh, tuple(best)))
