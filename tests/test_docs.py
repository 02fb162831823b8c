"""The code in README and docs runs and prints the output shown below it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from shardwise.plan.settings import forget_decisions
from shardwise.rules.table import REGISTERED

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", re.S)
SHOWN = [(page, m) for page in PAGES for m in BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize(
    ("code", "printed"),
    [pytest.param(m[1], m[2], id=f"{page.name}:{i}") for i, (page, m) in enumerate(SHOWN)],
)
def test_code_prints_the_output_on_the_page(code: str, printed: str | None) -> None:
    out, rules = io.StringIO(), dict(REGISTERED)
    with contextlib.redirect_stdout(out):
        exec(compile(code, "page", "exec"), {"__name__": "page"})
    if rules != REGISTERED:  # rules that a page registers are for that page only
        REGISTERED.clear()
        REGISTERED.update(rules)
        forget_decisions()
    assert printed is not None
    assert out.getvalue() == printed


def test_readme_starts_with_make_demo_and_make_test() -> None:
    first = (ROOT / "README.md").read_text().splitlines()[:40]
    assert any(line.strip().startswith("make demo") for line in first)
    assert any(line.strip().startswith("make test") for line in first)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_point_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
