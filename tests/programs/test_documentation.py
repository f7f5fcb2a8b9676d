"""docs/programs.md shows the code that these tests run, all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_database

PROGRAMS = Path(__file__).parent
PAGE = PROGRAMS.parents[1] / "docs" / "programs.md"

FILE = re.compile(r"^`(\S+\.py)`\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = dict(FILE.findall(PAGE.read_text()))
RUN = {
    str(path.relative_to(PROGRAMS)): path.read_text()
    for path in PROGRAMS.glob("*/**/*.py")
    if path.stat().st_size
}


@pytest.mark.parametrize("name", sorted(SHOWN | RUN))
def test_the_page_shows_what_runs(name: str) -> None:
    assert SHOWN.get(name) == RUN.get(name)


def test_the_page_shows_no_code_that_does_not_run() -> None:
    assert PAGE.read_text().count("```python") == len(SHOWN)


def test_every_contents_entry_leads_to_a_section() -> None:
    text = PAGE.read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^## (.+)$", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#(.+?)\)", text)) == headings
