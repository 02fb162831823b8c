"""The watcher of calls behind `sanitize`: it logs each op, and the fingerprints of the replicated values that it reads."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.arguments import tensors_in
from shardwise.call.trace import CallSite
from shardwise.comm import PerRank, is_simulated
from shardwise.comm.recording import recorders
from shardwise.debug.agreement_log import AgreementLog, code_of
from shardwise.debug.call_facts import CallFacts, Held, facts_of, held
from shardwise.debug.divergence import Item
from shardwise.debug.fingerprint import fingerprint
from shardwise.debug.marks import (
    Origin,
    any_unset,
    describe_origin,
    mark_of,
    mark_result,
    mark_written,
)
from shardwise.faults.source_line import Place, line_of_place, place_of_stack
from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor

__all__ = ["CallWatcher"]

_KEPT_BYTES = 1024
_PLAIN = Held((), True, None, {}, None, "a plain tensor", 0)
_OUR_FRAMES = 3  # from the op to here: the router, the wrapper of routes that are watched, and the watcher
_Operand = tuple[int, CallFacts] | str


class CallWatcher:
    """Logs what the ranks of each mesh must agree on.

    Attributes:
        is_active: whether it does so; if not, calls just run.
        logs: one for each mesh.
    """

    def __init__(self) -> None:
        self.is_active = True
        self.logs: dict[int, AgreementLog] = {}
        self._inside = False
        self._step = 0
        self._written: list[tuple[Any, Spec, Origin]] = []

    def __call__(self, site: CallSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call; an op that it consists of is not logged by itself."""
        run = site.route.run
        if self._inside or recorders:
            return run(args, kwargs)
        facts: CallFacts | None = site.kept
        if facts is None:
            facts = site.kept = facts_of(site.op, args, kwargs)
        if facts.mesh is None:
            return run(args, kwargs)
        self._inside = True
        try:
            place = place_of_stack(_OUR_FRAMES)
            tensors = facts.tensors(args, kwargs)
            if not facts.is_local:
                self._log_call(facts, args, kwargs, tensors, place)
            if is_simulated():
                return run(args, kwargs)
            is_unset = facts.leaves_unset or any_unset(tensors)
            result = run(args, kwargs)
            if is_unset and facts.overwrites:
                is_unset = any_unset([tensors[i] for i, *_ in facts.reads])
            self._mark(facts, tensors, result, place, is_unset)
        finally:
            self._inside = False
        return result

    def _log_call(
        self, facts: CallFacts, args: Any, kwargs: Any, tensors: list[Tensor], place: Place
    ) -> None:
        log = self.logs.get(id(facts.mesh)) or self.log_of(facts.mesh)
        code, numbers = facts.code_of(args, kwargs)
        simulated = is_simulated()
        if not simulated:
            log.add((code, 0, (), _order_item, (facts, numbers, place)))
        for i, how, mesh in facts.reads:
            t = tensors[i]
            if how is None:
                if t.numel():
                    self._log_value(log, t, _PLAIN, code, "plain", (i, facts), place)
                continue
            block = t._local_tensor  # type: ignore[attr-defined]
            if not (simulated or how.is_replicated) and _fits(block, how):
                continue
            where = log if mesh is facts.mesh else self.log_of(mesh)
            self._log_value(where, block, how, code, "values", (i, facts), place)

    def _log_value(
        self,
        log: AgreementLog,
        block: Tensor,
        how: Held,
        code: int,
        kind: str,
        operand: _Operand,
        place: Place,
    ) -> None:
        """Log the fingerprint of a value that is replicated, and whether the block is what its layout says."""
        if block.is_meta:
            return
        if is_simulated():
            wrong = bool(how.shapes) and not _fits(block, how)
            if wrong or (how.is_replicated and isinstance(block, PerRank)):
                self._compare_simulated(log, block, how, kind, operand, place, wrong)
            return
        if how.shapes and not _fits(block, how):
            log.add_problem((code, 1, how.split, _layout_item, (operand, how, _found(block), place)))
            return
        if not how.is_replicated:
            return
        mark = mark_of(block)
        value = mark.value
        if value is None:
            value = mark.value = _fingerprint(block, how) or 1
        # small blocks are kept, so that they can be shown
        ref = block.detach if block.nbytes <= _KEPT_BYTES else weakref.ref(block)
        details = (kind, operand, how, place, mark.origin, mark.is_changed, ref, value)
        log.add((code, value, how.split, _item, details))

    def _compare_simulated(
        self,
        log: AgreementLog,
        block: Tensor,
        how: Held,
        kind: str,
        operand: _Operand,
        place: Place,
        wrong: bool,
    ) -> None:
        item = _item(kind, operand, how, place, None, False, lambda: None if wrong else block)
        blocks = block._blocks if isinstance(block, PerRank) else {}
        if wrong:
            bad = next(r for r, b in blocks.items() if not _has_shape(b, how.shapes.get(r), how.dtype))
            log.raise_layout(item, bad, _found(blocks[bad]))
        log.add_simulated({r: int(_fingerprint(b, how)) for r, b in blocks.items()}, how.split, item)

    def _mark(
        self, facts: CallFacts, tensors: list[Tensor], result: Any, place: Place, is_unset: bool
    ) -> None:
        """Remember which op wrote each block; its fingerprint is computed when an op reads it."""
        if facts.writes:
            for i in facts.writes:
                t = tensors[i]
                if isinstance(t, DTensor) and mark_written(
                    t._local_tensor, (facts, place), self._step, is_unset
                ):
                    self._written.append((weakref.ref(t), t._spec, (facts, place)))
        elif facts.is_local and not is_unset:
            pass  # a view: its values come from elsewhere
        elif type(result) is DTensor:
            mark_result(result._local_tensor, facts, place, is_unset)
        elif isinstance(result, list | tuple | DTensor):
            for r in tensors_in((result,)):
                if isinstance(r, DTensor):
                    mark_result(r._local_tensor, facts, place, is_unset)

    # the claims of the program

    def claim(self, block: Tensor, spec: Spec, what: str) -> None:
        """Log a block for which the program claims a layout."""
        if self.is_active and not self._inside and not recorders:
            kind = "gradient" if "gradient" in what else "claim"
            how = held(spec)
            text = f"{what}, {how.text}"
            self._log_value(self.log_of(spec.mesh), block, how, how.code, kind, text, place_of_stack(0))

    def claim_equal(self, plain: Tensor, mesh: DeviceMesh, what: str) -> None:
        """Log a plain tensor that the program says is the same on all ranks."""
        if self.is_active and not self._inside and not recorders and plain.numel():
            code = code_of(what, tuple(plain.shape), str(plain.dtype))
            text = f"the tensor of {what}"
            self._log_value(self.log_of(mesh), plain, _PLAIN, code, "plain", text, place_of_stack(0))

    def draw(self, mesh: DeviceMesh, seed: int, position: int) -> None:
        """Log from which position of which stream an op draws."""
        if self.is_active and not recorders and not is_simulated():
            text = f"a draw of random numbers with seed {seed} at position {position}"
            details = ("random", text, place_of_stack(0))
            self.log_of(mesh).add((code_of("draw"), code_of(seed, position) or 1, (), _plain_item, details))

    # comparisons

    def log_of(self, mesh: DeviceMesh) -> AgreementLog:
        """The log of a mesh that this rank is on."""
        log = self.logs.get(id(mesh))
        if log is None:
            log = self.logs[id(mesh)] = AgreementLog(mesh)
        return log

    def end_step(self) -> None:
        """Log what was written in place since the last step, as parameters are, and compare everything."""
        self._step += 1
        if not is_simulated():
            for ref, spec, origin in self._written:
                self._log_written(ref(), spec, origin)
        self._written.clear()
        # in an order that is the same on all ranks, so that no two wait for each other in different groups
        for log in sorted(self.logs.values(), key=lambda log: log.order):
            log.compare()

    def _log_written(self, t: DTensor | None, spec: Spec, origin: Origin) -> None:
        how = held(spec)
        if not how.is_replicated:
            return
        log, (facts, place) = self.log_of(spec.mesh), origin
        text = f"{how.text}, written by {facts.text}"
        # on other ranks it may still exist, and they log it; `squeeze_` has changed it on all of them
        if t is None or t._spec is not spec:
            log.add((how.code, 0, (), _plain_item, ("values", text, place)))
        else:
            self._log_value(log, t._local_tensor, how, how.code, "values", text, place)


def _fits(block: Tensor, how: Held) -> bool:
    if isinstance(block, PerRank):
        return all(_has_shape(b, how.shapes.get(r), how.dtype) for r, b in block._blocks.items())
    return _has_shape(block, how.shapes.get(None), how.dtype)


def _has_shape(block: Tensor, shape: tuple[int, ...] | None, dtype: Any) -> bool:
    """Whether a block has this shape and dtype; one without elements may be empty along another dim."""
    if shape is None:
        return True
    if block.dtype is not dtype:
        return False
    return block.shape == shape or (block.numel() == 0 and 0 in shape)


def _fingerprint(block: Tensor, how: Held) -> Any:
    return fingerprint(block, how.order)


def _found(block: Tensor) -> str:
    return f"which is a block of {str(block.dtype).removeprefix('torch.')}{list(block.shape)}"


def _operand_text(operand: _Operand, how: Held) -> str:
    return operand if isinstance(operand, str) else f"tensor {operand[0]}, {how.text}, of {operand[1].text}"


def _plain_item(kind: str, text: str, place: Place) -> Item:
    return Item(kind, text, line_of_place(place))


def _order_item(facts: CallFacts, numbers: str, place: Place) -> Item:
    return _plain_item("order", facts.text + numbers, place)


def _layout_item(operand: _Operand, how: Held, found: str, place: Place) -> Item:
    return _plain_item("layout", f"{_operand_text(operand, how)}, {found}", place)


def _item(
    kind: str,
    operand: _Operand,
    how: Held,
    place: Place,
    origin: Origin | None,
    is_changed: bool,
    ref: Callable[[], Any],
    value: Any = None,
) -> Item:
    """What to say of a value; `value` is its fingerprint."""
    shown = "" if value is None else f" (fingerprint {int(value) & 0xFFFFFFFF:08x})"
    text = _operand_text(operand, how) + shown
    return Item(kind, text, line_of_place(place), describe_origin(origin, is_changed), ref)
