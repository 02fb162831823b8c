"""What the training example shows: a progress bar, a plot of two loss curves, and a table of figures, in 80 columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

__all__ = ["LossBar", "console", "plot", "size"]


def console() -> Console:
    """A console that writes plain text of 80 columns where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 80, highlight=False, soft_wrap=True)


def size(nbytes: float) -> str:
    """A number of bytes in the unit that fits it."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.{0 if unit == 'B' else 1}f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


class LossBar:
    """A progress bar with loss, tokens per second and bytes sent; single lines where output is piped."""

    def __init__(self, title: str, steps: int, show: bool) -> None:
        self.title, self.steps, self.show, self.console = title, steps, show, console()
        self.bar: Progress | None = None
        if show and self.console.is_terminal:
            columns: list[Any] = [TextColumn("{task.description}"), BarColumn(bar_width=16)]
            columns += [TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[figures]}")]
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task(title, total=steps, figures="")

    def __enter__(self) -> LossBar:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: int, loss: float, tokens_per_second: float, sent: float) -> None:
        """Show the figures after a step."""
        figures = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
        figures += f"  {size(sent)} sent" if sent else ""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, figures=figures)
        elif self.show and (done == 1 or done % max(1, self.steps // 4) == 0):
            self.console.print(f"{self.title} {done:4}/{self.steps}  {figures}")


def plot(curves: dict[str, Sequence[float]], width: int = 64, height: int = 10) -> str:
    """Curves of one length as text, with a mark for each; `=` where they coincide.

    >>> print(plot({"a": [3.0, 2.0, 1.0], "b": [3.0, 1.0, 1.0]}, width=9, height=3))
          3.00 |=
          2.00 |    *
          1.00 |    o   =
               +---------
                1       3
                * a   o b   = both
    """
    marks = dict(zip(curves, "*o+x", strict=False))
    values = [v for curve in curves.values() for v in curve]
    low, high, steps = min(values), max(values), max(map(len, curves.values()))
    cells = [[" "] * width for _ in range(height)]
    for name, curve in curves.items():
        columns = min(width, steps)
        for column in range(columns):
            position = column / max(1, columns - 1)
            value = curve[round(position * (steps - 1))]
            row = cells[round((high - value) / max(high - low, 1e-12) * (height - 1))]
            x = round(position * (width - 1))
            row[x] = marks[name] if row[x] in (" ", marks[name]) else "="
    scale = [high - (high - low) * y / (height - 1) for y in range(height)]
    lines = [f"{value:10.2f} |{''.join(row)}".rstrip() for value, row in zip(scale, cells, strict=True)]
    legend = "   ".join(f"{mark} {name}" for name, mark in marks.items())
    margin = " " * 11
    return "\n".join(
        [*lines, f"{margin}+{'-' * width}", f"{margin} 1{steps:>{width - 1}}", f"{margin} {legend}   = both"]
    )
