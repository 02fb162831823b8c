"""Drawn programs about aliasing: a pool of tensors and views, which are read and written in every way that torch has.

Programs are drawn while the dense run executes them, so that shapes and memory are known. What torch leaves undefined is not
drawn: elementwise ops on memory that overlaps, and uninitialised memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.programs.side_by_side import CHECK, DifferenceError, run_program, sides
from torch import Tensor

MODES = ("", "", "", "with torch.no_grad(): ", "with torch.inference_mode(): ")
SHAPES = ((5, 4), (4, 6), (3, 4), (1, 4), (4, 1), (6,), (5,), (2, 3, 4), (4, 2, 3), (2, 2), ())


def draw_layout(rng: random.Random, ndim: int, axes: int) -> str:
    """Placements as text, one per mesh axis."""
    kinds = ["R", *map(str, range(ndim)), *map(str, range(ndim))]
    return " ".join("P" if rng.random() < 0.15 else rng.choice(kinds) for _ in range(axes))


class Drawing:
    """A program in the making."""

    def __init__(self, seed: int, axes: int) -> None:
        self.rng, self.axes = random.Random(seed), axes
        self.side = sides(None)[0]
        self.lines: list[str] = []
        self.reshaped: set[str] = set()
        self.roots: set[str] = set()
        """Tensors whose blocks are not views: `local(x)` is their memory."""

    def program(self, steps: int) -> list[str]:
        """Draw a program of so many steps."""
        self.emit(self.new_tensor(), "")
        while len(self.lines) < steps:
            kind = self.rng.random()
            if kind < 0.1 or not self.pool():
                line = self.new_tensor()
                self.emit(line, "" if "grad=" in line else self.rng.choice(MODES))
            elif kind < 0.5:
                self.emit(self.read(), self.rng.choice(MODES))
            elif kind < 0.9:
                mode = self.rng.choice(MODES)
                self.emit(self.write(mode), mode)
            elif kind < 0.96:
                self.lines.append(CHECK)
            else:
                self.emit(self.rng.choice([self.copy, self.backward, self.requires_grad, self.forget])(), "")
        return self.lines

    def emit(self, line: str | None, mode: str) -> None:
        """Add a line and run it on the dense side."""
        if line is None:
            return
        self.lines.append(mode + line)
        name = line.partition(" = ")[0]
        before = self.side.names.get(name)
        self.side.run(mode + line)
        now = self.side.names.get(name)
        self.roots &= self.side.names.keys()
        if name.isidentifier() and before is None and now is not None and "make(" in line:
            self.roots.add(name)

    def name(self) -> str:
        """A new name."""
        used = len([n for n in self.side.names if n[0] == "t" and n[1:].isdigit()])
        return next(f"t{i}" for i in range(used, 1000) if f"t{i}" not in self.side.names)

    def pool(self) -> list[tuple[str, Tensor]]:
        """The tensors that exist, by the text that refers to them."""
        return list(self.side.tensors())

    def pick(self, wanted: Callable[[Tensor], bool] = lambda t: True) -> tuple[str, Tensor] | None:
        """A tensor of the pool; later ones are preferred."""
        found = [(n, t) for n, t in self.pool() if wanted(t)]
        return self.rng.choice(found + found[-3:]) if found else None

    def new_tensor(self) -> str:
        rng, shape = self.rng, self.rng.choice(SHAPES)
        dtype = rng.choice(["float64", "float64", "float64", "complex128", "int64"])
        grad = dtype != "int64" and rng.random() < 0.3
        layout = draw_layout(rng, len(shape), self.axes)
        options = f", {dtype!r}" if dtype != "float64" else ""
        options += ", grad=True" if grad else ""
        return f"{self.name()} = make({shape}, {layout!r}{options}, seed={rng.randrange(100)})"

    # reads

    def read(self) -> str | None:
        """A line that creates a tensor from one of the pool: a view, a copy, or a result."""
        name, x = self.pick() or ("", None)
        if x is None:
            return None
        return f"{self.name()} = {self.rng.choice(self.reads(x))}".replace("$", name)

    def reads(self, x: Tensor) -> list[str]:
        rng, n = self.rng, x.dim()
        out = [
            "$.detach()", "$.data", "$.view_as($)", "$.as_strided($.size(), $.stride())", "$.contiguous()", "$.clone()",
            "$ * 1", "$.to($.dtype)", "$.unsqueeze(0)", "$.squeeze()", "$.reshape(-1)", "$.expand_as($)",
            "$.expand(2, *$.shape)", "$.ravel()", "$[..., None]", "-$", "torch.ops.aten.alias($)", "$.unsqueeze(-1)",
        ]  # fmt: skip
        if x.is_complex():
            out += [
                "$.conj()",
                "$.real",
                "$.imag",
                "torch.view_as_real($.resolve_conj())",
                "$.conj().imag",
                "$.resolve_conj()",
                "$.resolve_neg()",
            ] * 2
        else:
            out += ["torch._neg_view($)", "$.conj()", "$.abs()", "$.resolve_neg()"]
        if x.dtype is torch.int64 and not x.is_inference() and not x.is_neg():
            out += ["$.view(torch.int32)"]
        if n == 0:
            return out
        out += self.reads_of_dims(x, rng.randrange(n)) * 2
        if n > 1:
            d, e = rng.sample(range(n), 2)
            out += [
                f"$.transpose({d}, {e})", f"$.diagonal({rng.choice([0, 0, 1, -1])}, {d}, {e})", "$.mT", "$.mH",
                f"$.permute({rng.sample(range(n), n)})", f"$.movedim({d}, {e})", "$.flatten(0, 1)", "$.view(-1)",
                f"$.reshape({x.shape[0] * x.shape[1]}, *$.shape[2:])", f"$.swapaxes({d}, {e})",
            ]  # fmt: skip
        return out

    def reads_of_dims(self, x: Tensor, d: int) -> list[str]:
        rng, size = self.rng, x.shape[d]
        before = ":, " * d
        if size == 0:
            return [f"$.narrow({d}, 0, 0)", f"$.flip({d})", f"$.transpose({d}, 0)"]
        i, step = rng.randrange(size), rng.choice([1, 1, 2, 3])
        a, b = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
        window = rng.randrange(1, size + 1)
        out = [
            f"$[{before}{i}]", f"$[{before}{-1 - i}]", f"$.select({d}, {i})", f"$[{before}{a}:{b}]", f"$[{before}{a}::{step}]",
            f"$.narrow({d}, {i}, {rng.randrange(size - i + 1)})", f"$.unbind({d})", f"$.unbind({d})[{i}]",
            f"$.split({rng.randrange(1, size + 1)}, {d})", f"$.split({rng.randrange(1, size + 1)}, {d})[0]",
            f"$.chunk({rng.choice([2, 3])}, {d})[0]", f"$.chunk({rng.choice([2, 3])}, {d})[-1]",
            f"$.tensor_split({rng.choice([2, 3])}, {d})[1]", f"$.unfold({d}, {window}, {rng.choice([1, 2])})",
            f"$.roll({rng.choice([1, size, -size])}, {d})", f"$.flip({d})", f"$.squeeze({d})", f"$.unsqueeze({d})",
            f"$.sum({d})", f"$.cumsum({d})",
            f"$.split([{a}, {size - a}], {d})[{rng.randrange(2)}]",
        ]  # fmt: skip
        for factor in (2, 3):
            if size % factor == 0:
                out.append(f"$.unflatten({d}, ({factor}, {size // factor}))")
        return out

    # writes

    def write(self, mode: str) -> str | None:
        """A line that writes to memory."""
        # a write to an inference tensor elsewhere is an error, after which torch has written some of it or nothing
        name, x = self.pick(lambda t: "inference" in mode or not t.is_inference()) or ("", None)
        if x is None or (_overlaps_itself(x) and (x.is_neg() or x.is_conj())):
            return None  # torch resolves lazy bits by a copy, which it refuses for expanded tensors
        makers = [
            self.fill,
            self.elementwise,
            self.elementwise,
            self.assign,
            self.foreach,
            self.other_memory,
            self.reshape,
        ]
        return self.rng.choice([self.fill] if _overlaps_itself(x) else makers)(name, x)

    def number(self, x: Tensor) -> str:
        numbers = ["2", "-1", "3"] if not x.is_complex() else ["2", "-1", "1j", "(1+1j)"]
        return self.rng.choice(numbers)

    def fill(self, name: str, x: Tensor) -> str:
        return self.rng.choice([f"{name}.fill_({self.number(x)})", f"{name}.zero_()"])

    def elementwise(self, name: str, x: Tensor) -> str:
        number, other = self.number(x), self.operand(x)
        out = [
            f"{name}.add_({number})",
            f"{name}.mul_(-1)",
            f"{name}.neg_()",
            f"{name}.sub_({name})",
            f"{name}.copy_({other})",
        ]
        if not x.is_complex():
            out += [
                f"{name}.clamp_(-8, 8)",
                f"{name}.masked_fill_({name} > 1, {number})",
                f"{name}.mul_({name}.clamp(-1, 1))",
            ]
        if x.dim():
            size = x.shape[0]
            out += [
                f"{name}.add_({other})",
                f"{name}.sub_({other}, alpha=2)",
                f"{name}.copy_({name}.flip(0))",
            ]
            out += [f"{name}.cumsum_(0)" if size < 4 else f"{name}.abs_()"]
        return self.rng.choice(out)

    def operand(self, x: Tensor) -> str:
        """A tensor that can be copied to another one: of the pool if one fits and shares no memory, or a new one."""
        fits = [
            (n, t)
            for n, t in self.pool()
            if _broadcasts(t, x)
            and (t.dtype is x.dtype or not (t.is_complex() and not x.is_complex()))
            # torch lets an integer tensor require a gradient, if a number that does is written to a part of it
            and not (t.dim() == 0 and t.requires_grad and x.dtype is torch.int64)
        ]
        if not fits or self.rng.random() < 0.2:
            layout = draw_layout(self.rng, x.dim(), self.axes)
            return (
                f"make({tuple(x.shape)}, {layout!r}, {_name_of(x.dtype)!r}, seed={self.rng.randrange(100)})"
            )
        n, t = self.rng.choice(fits)
        return n + ".clone()" if _same_storage(t, x) else n

    def assign(self, name: str, x: Tensor) -> str:
        index = "..." if not x.dim() else self.index(x)
        try:
            target = eval(f"x[{index}]", {"x": x.detach()})
        except (IndexError, RuntimeError):  # the latter of an inference tensor, in some versions of its views
            return f"{name}.zero_()"
        if target.dim() and self.rng.random() < 0.4:
            return f"{name}[{index}] = {self.operand(target) if not _shares_any(self.pool(), x) else self.number(x)}"
        return self.rng.choice(
            [f"{name}[{index}] = {self.number(x)}", f"{name}[{index}] += {self.number(x)}"]
        )

    def index(self, x: Tensor) -> str:
        rng = self.rng
        out = []
        for size in x.shape[: rng.randrange(1, x.dim() + 1)]:
            a, b = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
            out.append(
                rng.choice([":", f"{a}:{b}", f"{a}::2", *([f"{rng.randrange(size)}"] * 2 if size else [])])
            )
        return ", ".join(out)

    def foreach(self, name: str, x: Tensor) -> str:
        if x.is_neg() or x.is_conj():
            return f"{name}.zero_()"  # torch refuses lazy bits in lists
        others = [
            n
            for n, t in self.pool()
            if t.dtype is x.dtype
            and n != name
            and x.is_inference() == t.is_inference()
            and not (_overlaps_itself(t) or t.is_neg() or t.is_conj())
        ]
        names = [name, *self.rng.sample(others, min(len(others), self.rng.randrange(3)))]
        self.rng.shuffle(names)
        listed = f"[{', '.join(names)}]"
        out = [f"torch._foreach_add_({listed}, {self.number(x)})", f"torch._foreach_neg_({listed})"]
        out += [f"torch._foreach_zero_({listed})", f"torch._foreach_mul_({listed}, -1)"]
        copies = [n + ".clone()" for n in names]
        out.append(
            f"torch._foreach_copy_({listed}, [{', '.join(reversed(copies)) if len(names) == 1 else ', '.join(copies)}])"
        )
        out.append(f"torch._foreach_add_({listed}, [{', '.join(copies)}], alpha=2)")
        if x.dtype is torch.float64 and x.is_contiguous() and not x.requires_grad and not x.is_inference():
            layout = draw_layout(self.rng, x.dim(), self.axes)
            out.append(f"sgd({name}, make({tuple(x.shape)}, {layout!r}, seed=1))")
        return self.rng.choice(out)

    def other_memory(self, name: str, x: Tensor) -> str:
        """Write through another tensor that has the same memory."""
        if x.is_inference():
            return f"{name}.zero_()"  # torch allows it in some modes, and others not
        out = [f"{name}.data.add_({self.number(x)})", f"{name}.detach().mul_(-1)", f"{name}.data.zero_()"]
        if x.dim():
            out += [
                f"{name}.view_as({name}).add_(1)",
                f"{name}.data[0:1].add_(1)",
                f"{name}.detach()[-1:].neg_()",
            ]
        if name in self.roots and not x.is_neg() and not x.is_conj():  # of those, a block is a copy
            out += [f"local({name}).mul_(-1)", f"local({name}).mul_(2)", f"local({name}).zero_()"] * 2
        return self.rng.choice(out)

    def reshape(self, name: str, x: Tensor) -> str | None:
        """Change what a tensor is, which does not change the views that it has."""
        rng, n = self.rng, x.dim()
        if "[" in name:
            return None
        same = [m for m, t in self.pool() if t.dtype is x.dtype and m != name and "[" not in m]
        if x.requires_grad or any(t.requires_grad for _, t in self.pool() if _same_storage(t, x)):
            tensors = dict(self.pool())
            same = [m for m in same if tensors[m].shape == x.shape and not tensors[m].is_inference()]
            if rng.random() < 0.5 and not _is_leaf(x):
                self.roots.discard(name)
                dims = ["t_()", "transpose_(0, 1)"] if n == 2 else []
                # in inference mode torch runs it on a copy of a tensor with a lazy bit, and loses the change
                dims += ["swapdims_(-1, 0)"] if n == 2 and not (x.is_neg() or x.is_conj()) else []
                return f"{name}.{rng.choice([*dims, f'unsqueeze_({rng.randrange(n + 1)})', 'squeeze_()'])}"
            return (
                f"{name}.data = {rng.choice(same)}.detach()"
                if same and x.requires_grad and not x._is_view()
                else None
            )
        was_reshaped = name in self.reshaped
        self.roots.discard(name)
        self.reshaped.add(name)  # views of what it was would no longer get a gradient
        out = [
            f"{name}.unsqueeze_({rng.randrange(n + 1)})",
            f"{name}.squeeze_()",
            f"{name}.data = {name}.clone()",
        ]
        if n > 1:
            out += [f"{name}.t_()" if n == 2 else f"{name}.transpose_(0, 1)", f"{name}.transpose_(-1, 0)"]
        if n and x.is_contiguous() and x.numel():
            out += [
                f"{name}.resize_({rng.randrange(1, x.numel() + 1)})",
                f"{name}.resize_({math.prod(x.shape)})",
            ]
        if same:
            other = rng.choice(same)
            out.append(f"{name}.data = {other}")
            source = dict(self.pool())[other]
            lazy = any(t.is_neg() or t.is_conj() for t in (x, source))
            if x.is_inference() == source.is_inference() and not lazy:
                out.append(f"{name}.set_({other}.detach())")
            swapped = x, dict(self.pool())[other]
            # torch itself keeps a view of a view alive, if it is not a plain tensor; and views keep what was reshaped
            if (
                not swapped[1].requires_grad
                and not any(t._is_view() and _shares_any(self.pool(), t) for t in swapped)
                and not was_reshaped
                and not any(t is s for m, t in self.pool() for s in swapped if m in self.reshaped - {name})
            ):
                self.roots.discard(other)
                self.reshaped.add(other)
                out.append(f"torch.utils.swap_tensors({name}, {other})")
        return rng.choice(out)

    # others

    def copy(self) -> str | None:
        # torch does not save a storage in two dtypes
        _, first = self.pick() or ("", None)
        names = [n for n, t in self.pool() if first is not None and t.dtype is first.dtype]
        some = self.rng.sample(names, min(len(names), self.rng.randrange(1, 4)))
        return f"{self.name()} = {self.rng.choice(['deepcopy', 'saved'])}([{', '.join(some)}])"

    def backward(self) -> str | None:
        name, x = self.pick(lambda t: t.requires_grad) or ("", None)
        return None if x is None else f"({name} * {name}.detach().clone()).abs().sum().backward()"

    def requires_grad(self) -> str | None:
        names = [
            n
            for n, t in self.pool()
            if t.dtype.is_floating_point and not t._is_view() and n not in self.reshaped
        ]
        return f"{self.rng.choice(names)}.requires_grad_()" if names else None

    def forget(self) -> str | None:
        names = sorted({n.partition("[")[0] for n, _ in self.pool()})
        return f"del {self.rng.choice(names)}" if len(names) > 3 else None


def _is_leaf(x: Tensor) -> bool:
    try:
        return x.is_leaf
    except RuntimeError:  # a view that autograd does not allow to be used any more
        return True


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _shares_any(pool: Sequence[tuple[str, Tensor]], x: Tensor) -> bool:
    return any(t is not x and _same_storage(t, x) for _, t in pool)


def _overlaps_itself(x: Tensor) -> bool:
    """Whether several elements of a tensor are one element of its memory."""
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return len(places.unique()) < x.numel()


def _broadcasts(t: Tensor, to: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(t.shape, to.shape) == to.shape
    except RuntimeError:
        return False


def draw_program(seed: int, axes: int, steps: int) -> list[str]:
    """The program of a seed, for meshes with so many axes."""
    return Drawing(seed, axes).program(steps)


def shrink(lines: Sequence[str], mesh: Any) -> DifferenceError | None:
    """The shortest failing program that removing lines from a failing one leads to, as its difference."""

    def failure(some: Sequence[str]) -> DifferenceError | None:
        try:
            run_program(some, mesh)
        except DifferenceError as found:
            return found
        return None

    lines, found = list(lines), failure(lines)
    smaller = found is not None
    while smaller:
        smaller = False
        for i in reversed(range(len(lines))):
            if (other := failure([*lines[:i], *lines[i + 1 :]])) is not None:
                del lines[i]
                found, smaller = other, True
    return found
