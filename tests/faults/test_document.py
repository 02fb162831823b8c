"""docs/faults.md has every example, with its code and an error of its kind; SHARDWISE_DEEP=1 runs them again."""

from __future__ import annotations

import os
import re

import pytest
from tests.faults.document import PAGE, code_of, render
from tests.faults.examples import GUARD, SANITIZE

from shardwise.debug.divergence import REASONS

TEXTS = dict(
    re.findall(r"^### ([^\n]*)\n\n```\n.*?\n```\n\n```text\n(.*?)\n```", PAGE.read_text(), re.M | re.S)
)
FIRST = {
    "raised": "rank 2 of 4 failed: ",
    "died": "rank 2 of 4 died",
    "timeout": "rank 2 of 4 is ",
    "ended": "rank 2 of 4 has returned",
    "diverged": "call different collectives",
    "lost": "lost the connection",
}


@pytest.mark.parametrize("example", [*GUARD, *SANITIZE], ids=lambda e: e.program.__name__)
def test_the_page_shows_the_example_and_its_error(example):
    assert code_of(example) in PAGE.read_text()
    first, *others = TEXTS[example.title].splitlines()
    assert FIRST.get(example.kind) or first.endswith(f"{REASONS[example.kind][0]}.")
    assert FIRST.get(example.kind, "") in first
    assert [line[:7] for line in others[-2:]] == ["  why: ", "  fix: "]
    assert re.search(r"train\.py:\d+ in ", TEXTS[example.title])


def test_every_kind_of_divergence_is_shown():
    assert {example.kind for example in SANITIZE} == set(REASONS)


@pytest.mark.skipif(os.environ.get("SHARDWISE_DEEP") != "1", reason="takes half a minute")
def test_the_errors_are_those_of_a_run():
    def numbers(text: str) -> str:
        return re.sub(r"rank[s \d,and]*|\d+", "", text.partition("\n")[0])

    shown = {title: numbers(text) for title, text in TEXTS.items()}
    again = dict(re.findall(r"^### ([^\n]*)\n\n```\n.*?\n```\n\n```text\n(.*?)\n```", render(), re.M | re.S))
    assert {title: numbers(text) for title, text in again.items()} == shown
