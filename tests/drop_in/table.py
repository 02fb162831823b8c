"""Writes the tables of `docs/clients.md`: each client on shardwise and on torch's DTensor, in one interleaved run.

python -m tests.drop_in.table
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

from tests.drop_in.client import ROOT, Run, prepared

PAGE = ROOT / "docs" / "clients.md"
HUGGING_FACE = ("tests.drop_in.installed_transformers", "tests.drop_in.torch_transformers")
TORCHTITAN = ("tests.drop_in.installed_torchtitan", "tests.drop_in.torch_torchtitan")
KINDS = ("norm", "loss", "parameters", "saved", "merged", "merged loss")
ROUNDS = 2
"""How often each step time is measured, alternating; the best counts."""


class Case(NamedTuple):
    """A row of the table."""

    client: str
    what: str
    world: int
    function: str
    how: dict[str, Any]
    timed: dict[str, Any] | None = None
    """Arguments with which `function`, or the one named, gives the time of a step."""
    optional: tuple[str, ...] = ()
    """Arguments that are set to False where it fails with them."""


def _transformers(name: str, mode: str, world: int, timed: bool = False, **changes: Any) -> Case:
    runs = "tests.drop_in.transformers_runs"
    how = {"name": name, "mode": mode}
    shown = f"{name}, {mode}" + (", uneven" if changes else "")
    times = {"function": f"{runs}:step_time", **how, "steps": 11} if timed else None
    return Case("transformers", shown, world, f"{runs}:train", {**how, **changes}, times, ("clip",))


def _accelerate(mode: str, world: int) -> Case:
    return Case(
        "accelerate",
        f"Llama, {mode}",
        world,
        "tests.drop_in.accelerate_runs:train",
        {"mode": mode},
        {"mode": mode, "steps": 7},
    )


def _peft(targets: list[str]) -> Case:
    how = {"targets": targets}
    what = "LoRA of Llama under tp, " + ", ".join(targets)
    function = "tests.drop_in.peft_runs:train"
    timed = {**how, "steps": 7, "clip": False, "merge": False}
    return Case("peft", what, 2, function, how, timed, ("clip", "merge"))


def _torchtitan(backend: str, world: int, tp: int) -> Case:
    how = {"backend": backend, "tp": tp}
    what = f"Llama 3 debug model, {backend}, fsdp {world // tp} x tp {tp}"
    return Case("torchtitan", what, world, "tests.drop_in.torchtitan_runs:train", how, {**how, "steps": 5})


CASES = [
    _transformers("Llama", "tp", 2, timed=True),
    *(
        _transformers(name, "tp", 2)
        for name in ("Qwen3", "Gemma 3", "Phi-3", "Mixtral", "Qwen3-MoE", "DeepSeek-V3")
    ),
    _transformers("Phi-3", "tp", 2, intermediate_size=33, vocab_size=65),
    _transformers("Llama", "fsdp", 2, timed=True),
    _transformers("Llama", "fsdp x tp", 4, timed=True),
    _transformers("Mixtral", "fsdp x tp", 4),
    _transformers("Mixtral", "ep", 2, timed=True),
    _transformers("Mixtral", "fsdp x ep", 4),
    _transformers("Mixtral", "fsdp x ep, dispatched", 2),
    _accelerate("fsdp", 2),
    _accelerate("hsdp", 4),
    _accelerate("tp", 2),
    _accelerate("fsdp x tp", 4),
    _peft(["q_proj", "up_proj"]),
    _peft(["o_proj", "down_proj"]),
    _torchtitan("partial_dtensor", 4, 2),
    _torchtitan("full_dtensor", 4, 2),
]


def _reason(error: str) -> str:
    """The type and the first words of the error of the rank that failed by itself."""
    found = re.findall(r"\n(?:\w+\.)*(\w+Error): (?:aten\.\S+ )?([^\n|]{,48})", error)
    own = [(kind, text) for kind, text in found if "gloo" not in text]
    return f"{own[0][0]}, {own[0][1].strip()}…" if own else "an error"


def _outcome(run: Run, case: Case) -> str:
    """Right, or what is wrong, or the error; then also what happens without the parts that fail."""
    told = []
    for without in ((), *(case.optional[: i + 1] for i in range(len(case.optional)))):
        try:
            results = run(case.function, world=case.world, **case.how, **dict.fromkeys(without, False))
        except AssertionError as error:
            told.append(f"{'without ' + ', '.join(without) + ': ' if without else ''}{_reason(str(error))}")
            continue
        wrong = {kind for r in results for kind in KINDS if r.get(kind, 0.0) > 1e-9}
        wrong |= {"gradients" for r in results if r.get("gradients")}
        wrong |= {"generated tokens" for r in results if not r.get("generates alike", True)}
        outcome = "wrong: " + ", ".join(sorted(wrong)) if wrong else "right"
        told.append(f"without {', '.join(without)} {outcome}" if without else outcome)
        break
    return "; ".join(told)


def _times(runs: list[Run], case: Case) -> Iterator[str]:
    """Milliseconds of a step, and its collectives where they were counted, ours and torch's."""
    if case.timed is None:
        yield from ("", "")
        return
    how = dict(case.timed)
    function = how.pop("function", case.function)
    best: list[dict[str, Any]] = [{"ms": float("inf")}, {"ms": float("inf")}]
    for i in range(ROUNDS * 2):
        try:
            results = runs[i % 2](function, world=case.world, **how)
        except AssertionError:
            continue
        slowest = max(results, key=lambda r: r["ms"])
        best[i % 2] = min(best[i % 2], slowest, key=lambda r: r["ms"])
    for found in best:
        counted = f", {found['collectives']}" if "collectives" in found else ""
        yield "-" if found["ms"] == float("inf") else f"{found['ms']:.0f} ms{counted}"


def _rows(servers: tuple[str, str], cases: list[Case]) -> Iterator[str]:
    with prepared(servers[0]) as ours, prepared(servers[1]) as torchs:
        for case in cases:
            outcomes = [_outcome(run, case) for run in (ours, torchs)]
            times = list(_times([ours, torchs], case))
            cells = (case.client, version(case.client), f"{case.what}; {case.world} ranks", *outcomes, *times)
            row = "| " + " | ".join(cells) + " |"
            sys.stdout.write(row + "\n")
            sys.stdout.flush()
            yield row


def main() -> None:
    """Run everything and replace the table."""
    rows = [
        "| client | version | what | on shardwise | on torch's DTensor | step, collectives: ours | torch's |",
        "|---|---|---|---|---|---|---|",
    ]
    titan = [case for case in CASES if case.client == "torchtitan"]
    rows += _rows(HUGGING_FACE, [case for case in CASES if case not in titan])
    if find_spec("torchtitan"):
        rows += _rows(TORCHTITAN, titan)
    text = PAGE.read_text()
    table = f"<!-- table -->\ntorch {version('torch')}\n\n" + "\n".join(rows) + "\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- table -->.*<!-- end -->", lambda _: table, text, flags=re.S))


if __name__ == "__main__":
    main()
