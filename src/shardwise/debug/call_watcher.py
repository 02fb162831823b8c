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
from shardwise.faults.source_line import line_of_stack
from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor

__all__ = ["CallWatcher"]

_MARK = "_shardwise_fingerprint"
_KEPT_BYTES = 1024
_PLAIN = Held((), True, None, {}, None, "a plain tensor", 0)
_Place = tuple[str, int, str]
_Origin = tuple[str, _Place]
"""What wrote a block: the op, and the line that called it."""


class _Mark:
    """What is known of a block: its version, the fingerprint of that version if it was needed, and what wrote it.

    The fingerprint is 0 if the values depend on memory that nothing was written to, as where torch traces with `torch.empty`: they
    may differ, as long as the program does not use them.
    """

    __slots__ = ("listed", "origin", "value", "version")

    def __init__(
        self, version: int, origin: _Origin | None, listed: int = -1, is_unset: bool = False
    ) -> None:
        self.version, self.origin, self.listed = version, origin, listed
        self.value: Any = 0 if is_unset else None


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
        self._written: list[tuple[Any, Spec, _Origin]] = []

    def __call__(self, site: CallSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call; an op that it consists of is not logged by itself."""
        if self._inside or recorders:
            return site.route.run(args, kwargs)
        facts: CallFacts | None = site.kept
        if facts is None:
            facts = site.kept = facts_of(site.op, args, kwargs)
        if facts.mesh is None:
            return site.route.run(args, kwargs)
        self._inside = True
        try:
            place = line_of_stack()
            tensors = facts.tensors(args, kwargs)
            if not facts.is_local:
                self._log_call(facts, args, kwargs, tensors, place)
            is_unset = facts.leaves_unset or _any_unset(tensors)
            result = site.route.run(args, kwargs)
            if is_unset and facts.overwrites:
                is_unset = _any_unset([tensors[i] for i, *_ in facts.reads])
            self._mark(facts, tensors, result, (facts.text, place), is_unset)
        finally:
            self._inside = False
        return result

    def _log_call(
        self, facts: CallFacts, args: Any, kwargs: Any, tensors: list[Tensor], place: _Place
    ) -> None:
        log = self.log_of(facts.mesh)
        code, numbers = facts.code_of(args, kwargs)
        if not is_simulated():
            log.add(code, 0, (), lambda: Item("order", facts.text + numbers, place))
        for i, how, mesh in facts.reads:
            t = tensors[i]
            if how is not None:
                where = log if mesh is facts.mesh else self.log_of(mesh)
                self._log_value(where, t._local_tensor, how, code, "values", (i, facts), place)  # type: ignore[attr-defined]
            elif t.numel():
                self._log_value(log, t, _PLAIN, code, "plain", (i, facts), place)

    def _log_value(
        self,
        log: AgreementLog,
        block: Tensor,
        how: Held,
        code: int,
        kind: str,
        operand: tuple[int, CallFacts] | str,
        place: _Place,
    ) -> None:
        """Log the fingerprint of a value that is replicated, and whether the block is what its layout says."""
        if block.is_meta:
            return
        wrong = bool(how.shapes) and not _fits(block, how)
        if not wrong and not how.is_replicated:
            return
        if is_simulated():
            if wrong or isinstance(block, PerRank):
                self._compare_simulated(log, block, how, kind, operand, place, wrong)
            return
        mark = _mark_of(block)
        value = mark.value
        if value is None and not wrong:
            value = mark.value = _fingerprint(block, how) or 1
        if wrong:
            found = f"{_operand_text(operand, how)}, {_found(block)}"
            log.add(code, 1, how.split, lambda: Item("layout", found, place), problem=True)
            return
        # small blocks are kept, so that they can be shown
        origin, ref = mark.origin, block.detach if block.nbytes <= _KEPT_BYTES else weakref.ref(block)
        log.add(code, value, how.split, lambda: _item(kind, operand, how, place, origin, ref, value))

    def _compare_simulated(
        self,
        log: AgreementLog,
        block: Tensor,
        how: Held,
        kind: str,
        operand: Any,
        place: _Place,
        wrong: bool,
    ) -> None:
        item = _item(kind, operand, how, place, None, lambda: None if wrong else block)
        blocks = block._blocks if isinstance(block, PerRank) else {}
        if wrong:
            bad = next(r for r, b in blocks.items() if not _has_shape(b, how.shapes.get(r), how.dtype))
            log.raise_layout(item, bad, _found(blocks[bad]))
        log.add_simulated({r: int(_fingerprint(b, how)) for r, b in blocks.items()}, how.split, item)

    def _mark(
        self, facts: CallFacts, tensors: list[Tensor], result: Any, origin: _Origin, is_unset: bool
    ) -> None:
        """Remember which op wrote each block; its fingerprint is computed when an op reads it."""
        if is_simulated():
            return
        if facts.writes:
            for i in facts.writes:
                t = tensors[i]
                if isinstance(t, DTensor):
                    block = t._local_tensor
                    old = getattr(block, _MARK, None)
                    listed = -1 if old is None else old.listed
                    if listed != self._step:
                        self._written.append((weakref.ref(t), t._spec, origin))
                    setattr(block, _MARK, _Mark(_version(block), origin, self._step, is_unset))
            return
        results = (
            [result]
            if isinstance(result, Tensor)
            else tensors_in(result)
            if isinstance(result, list | tuple)
            else ()
        )
        for r in results:
            if isinstance(r, DTensor):
                block = r._local_tensor
                setattr(block, _MARK, _Mark(_version(block), origin, is_unset=is_unset))

    # the claims of the program

    def claim(self, block: Tensor, spec: Spec, what: str) -> None:
        """Log a block for which the program claims a layout."""
        if self.is_active and not self._inside and not recorders:
            kind = "gradient" if "gradient" in what else "claim"
            how = held(spec)
            text = f"{what}, {how.text}"
            self._log_value(self.log_of(spec.mesh), block, how, how.code, kind, text, line_of_stack())

    def claim_equal(self, plain: Tensor, mesh: DeviceMesh, what: str) -> None:
        """Log a plain tensor that the program says is the same on all ranks."""
        if self.is_active and not self._inside and not recorders and plain.numel():
            code = code_of(what, tuple(plain.shape), str(plain.dtype))
            text = f"the tensor of {what}"
            self._log_value(self.log_of(mesh), plain, _PLAIN, code, "plain", text, line_of_stack())

    def draw(self, mesh: DeviceMesh, seed: int, position: int) -> None:
        """Log from which position of which stream an op draws."""
        if self.is_active and not recorders and not is_simulated():
            log = self.log_of(mesh)
            text = f"a draw of random numbers with seed {seed} at position {position}"
            place = line_of_stack()
            log.add(code_of("draw"), code_of(seed, position) or 1, (), lambda: Item("random", text, place))

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

    def _log_written(self, t: DTensor | None, spec: Spec, origin: _Origin) -> None:
        how, log = held(spec), self.log_of(spec.mesh)
        if not how.is_replicated:
            return
        text = f"{how.text}, written by {origin[0]}"
        # on other ranks it may still exist, and they log it; `squeeze_` has changed it on all of them
        if t is None or t._spec is not spec:
            log.add(how.code, 0, (), lambda: Item("values", text, origin[1]))
        else:
            self._log_value(log, t._local_tensor, how, how.code, "values", text, origin[1])


def _any_unset(tensors: list[Tensor]) -> bool:
    for t in tensors:
        if isinstance(t, DTensor):
            mark = getattr(t._local_tensor, _MARK, None)
            if mark is not None and type(mark.value) is int and mark.value == 0:
                return True
    return False


def _version(block: Tensor) -> int:
    return -1 if block.is_inference() else block._version


def _mark_of(block: Tensor) -> _Mark:
    """The mark of a block; one that was written to otherwise than by ops on DTensors has no fingerprint yet."""
    mark: _Mark | None = getattr(block, _MARK, None)
    if mark is None:
        mark = _Mark(_version(block), None)
        setattr(block, _MARK, mark)
    elif mark.version != (now := _version(block)) or now < 0:
        mark.version, mark.value = now, None
        mark.origin = mark.origin and (f"written to after {mark.origin[0]}", mark.origin[1])
    return mark


def _fits(block: Tensor, how: Held) -> bool:
    if isinstance(block, PerRank):
        return all(_has_shape(b, how.shapes.get(r), how.dtype) for r, b in block._blocks.items())
    return _has_shape(block, how.shapes.get(None), how.dtype)


def _has_shape(block: Tensor, shape: tuple[int, ...] | None, dtype: Any) -> bool:
    """Whether a block has this shape and dtype; one without elements may be empty along another dim."""
    if shape is None or block.dtype is not dtype:
        return shape is None
    return block.shape == shape or (block.numel() == 0 and 0 in shape)


def _fingerprint(block: Tensor, how: Held) -> Any:
    return fingerprint(block.detach() if block.requires_grad else block, how.order)


def _found(block: Tensor) -> str:
    return f"which is a block of {str(block.dtype).removeprefix('torch.')}{list(block.shape)}"


def _operand_text(operand: tuple[int, CallFacts] | str, how: Held) -> str:
    return operand if isinstance(operand, str) else f"tensor {operand[0]}, {how.text}, of {operand[1].text}"


def _item(
    kind: str,
    operand: tuple[int, CallFacts] | str,
    how: Held,
    place: _Place,
    origin: _Origin | None,
    ref: Callable[[], Any],
    value: Any = None,
) -> Item:
    """What to say of a value; `value` is its fingerprint."""
    source = ""
    if origin is not None:
        file, line, name = origin[1]
        start = "" if origin[0].startswith("written to") else "the result of "
        source = f"{start}{origin[0]} at {file}:{line} in {name}"
    shown = "" if value is None else f" (fingerprint {int(value) & 0xFFFFFFFF:08x})"
    return Item(kind, _operand_text(operand, how) + shown, place, source, ref)
