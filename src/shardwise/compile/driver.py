"""`whole_step`: train with captured steps; the state stays in the module and the optimizer."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.compile.capture import capture
from shardwise.compile.errors import CaptureError, StateCreatedError
from shardwise.compile.numbers import OpsChangedError
from shardwise.compile.passes import EXACT, Passes
from shardwise.compile.program import Program
from shardwise.compile.side_effects import values_read
from shardwise.compile.signature import Signature, keys_of, known_ids
from shardwise.torch_internals.pytree import tree_flatten

__all__ = ["WholeStep", "whole_step"]


_FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AssertionError,
    AttributeError,
    LookupError,
)
"""What code raises that does not expect tensors without values; an error of the program's own is raised again by the eager step."""
_MOST_PROGRAMS = 8
"""Programs to keep for arguments of one kind; the oldest is dropped first."""


class WholeStep:
    """A training step that runs as a captured program; see `whole_step`.

    Attributes:
        reason: why the last step ran eagerly; None if it was captured.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Tensor],
        accumulate: int,
        clip_norm: float | None,
        backend: str,
        passes: Passes,
    ) -> None:
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._accumulate, self._clip_norm, self._backend = accumulate, clip_norm, backend
        self._passes = passes
        self._takes_output = _is_loss_of_torch(loss_fn)
        self._count, self._has_stepped = 0, False
        self.reason: str | None = "no step was taken"
        self._captured: dict[Any, list[tuple[Signature, Program | CaptureError]]] = {}

    def __call__(self, *batch: Any) -> Tensor:
        """Take a step on a micro-batch; every `accumulate`-th call updates the parameters. Returns the loss."""
        self._count += 1
        is_last = self._count % self._accumulate == 0
        leaves, structure = tree_flatten(batch)
        known = known_ids(self._optimizer, [self._model]) if self._has_parameters(leaves) else ()
        key = (is_last, structure, *keys_of(leaves, known))
        for attempt in range(2):
            program = self._find(key, is_last, batch)
            if program is None:
                break
            try:
                return program.run_leaves(leaves)  # type: ignore[no-any-return]
            except OpsChangedError:
                self._forget(key, program, always=attempt > 0)
        return self._eager(is_last, *batch)

    @property
    def programs(self) -> list[Program]:
        """The programs that were captured."""
        return [p for some in self._captured.values() for _, p in some if isinstance(p, Program)]

    @staticmethod
    def _has_parameters(leaves: list[Any]) -> bool:
        return any(isinstance(x, Tensor) and x.requires_grad for x in leaves)

    def _params(self) -> list[Tensor]:
        return [p for g in self._optimizer.param_groups for p in g["params"]]

    def _find(self, key: Any, is_last: bool, batch: tuple[Any, ...]) -> Program | None:
        """The program for this step; None if it runs eagerly, for `reason`."""
        params = self._params()
        if is_last and not self._has_stepped and not any(map(self._optimizer.state.get, params)):
            self.reason = "the first step creates the state of the optimizer"
            return None
        now = Signature(self._model, params, values_read(self._loss_fn))
        try:
            some = self._captured.setdefault(key, [])
        except TypeError:
            self.reason = "an argument of the step is neither a tensor nor hashable"
            return None
        found = next((program for signature, program in some if signature == now), None)
        if found is None:
            try:
                found = self._capture(is_last, batch)
            except StateCreatedError as error:  # once, so nothing to warn of or to keep
                self.reason = error.reason
                return None
            except _FAILURES as failure:
                found = _as_capture_error(failure)
                warnings.warn(f"whole_step runs this step eagerly: {found}", stacklevel=4)
            some[:] = [(now, found), *some[: _MOST_PROGRAMS - 1]]
        if isinstance(found, CaptureError):
            self.reason = found.reason
            return None
        self.reason = None
        return found

    def _forget(self, key: Any, program: Program, always: bool) -> None:
        """Drop a program whose optimizer now runs other ops; for good, if one that was captured just now does not have them either."""
        some = self._captured[key]
        if always:
            error = CaptureError(
                "The optimizer runs other ops than a captured step.",
                why="the optimizer runs other ops in this step than when it is captured",
                fix="Capture the forward and backward pass only, and call optimizer.step() after each run.",
            )
            self._captured[key] = [(s, error if p is program else p) for s, p in some]
            self.reason = error.reason
        else:
            self._captured[key] = [pair for pair in some if pair[1] is not program]

    def _capture(self, is_last: bool, batch: tuple[Any, ...]) -> Program:
        def step(*batch: Any) -> Tensor:
            return self._step(is_last, *batch)

        step.__wrapped__ = self._loss_fn  # type: ignore[attr-defined]  # the code that may change objects
        program = capture(
            step,
            *batch,
            optimizer=self._optimizer,
            modules=[self._model],
        )
        program = program.optimize(self._passes)
        return program if self._backend == "fx" else program.compile(self._backend)

    def _eager(self, is_last: bool, *batch: Any) -> Tensor:
        loss = self._step(is_last, *batch)
        self._has_stepped |= is_last
        return loss

    def _loss_of(self, *batch: Any) -> Tensor:
        if not self._takes_output:
            return self._loss_fn(self._model, *batch)
        *inputs, target = batch
        return self._loss_fn(self._model(*inputs), target)

    def _step(self, is_last: bool, *batch: Any) -> Tensor:
        loss = self._loss_of(*batch)
        (loss if self._accumulate == 1 else loss / self._accumulate).backward()
        if is_last:
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._params(), self._clip_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _is_loss_of_torch(loss_fn: Callable[..., Tensor]) -> bool:
    """Whether a loss takes an output and a target, not a model: one of `torch.nn` or `torch.nn.functional`."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    owner = type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    return getattr(owner, "__module__", "").startswith("torch.nn.")


def _as_capture_error(failure: Exception) -> CaptureError:
    """What a capture failed with; what is not the capture's fault will be raised by the eager step."""
    if isinstance(failure, CaptureError):
        return failure
    return CaptureError(
        f"The capture failed with {type(failure).__name__}: {failure}",
        why=f"the capture failed with {type(failure).__name__}: {failure}",
        fix="Please report it, if the step works eagerly.",
    )


def whole_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Tensor],
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    backend: str = "fx",
    passes: Passes = EXACT,
) -> WholeStep:
    """A function that takes a training step as one captured program.

    Forward, loss, backward, clipping and the update run without the overhead of DTensors, with the same collectives and, with
    `backend="fx"`, the same bits as in eager mode. The state stays where it is: in the module's parameters, the optimizer's
    state, and `shardwise`'s random stream, so checkpoints and learning rate schedulers work as ever. Steps are captured again
    when shapes, layouts or `train()`/`eval()` change. The first update is eager, since it creates the optimizer's state; a step
    that cannot be captured runs eagerly with a warning, and `reason` says why.

    Args:
        model: the module.
        optimizer: its optimizer.
        loss_fn: `loss_fn(model, *batch)` returns the loss. One of torch's losses, such as `nn.CrossEntropyLoss()` or
            `functional.mse_loss`, is called with the output and the target: a batch is the inputs of the model, then the target.
        accumulate: the number of calls whose gradients are added up, each divided by this number, before an update.
        clip_norm: the norm that gradients are clipped to before an update.
        backend: "fx", or "inductor" to compile the programs.
        passes: what to do to the collectives; by default everything that keeps the bits.

    Communicates what eager training does.
    """
    if accumulate < 1:
        raise ValueError(
            f"whole_step got accumulate={accumulate}.\n"
            "  why: It is the number of micro-batches of an update.\n"
            "  fix: accumulate=1"
        )
    return WholeStep(model, optimizer, loss_fn, accumulate, clip_norm, backend, passes)
