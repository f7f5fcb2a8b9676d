"""docs/cases.md: each case has a test that carries its number, or a reason why it is not ours."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.postgres import ROOT

pytestmark = pytest.mark.any_database

PAGE = (ROOT / "docs" / "cases.md").read_text()
NUMBER = re.compile(r"\bC\d{3}\b")
TESTED, _, NOT_OURS = PAGE.partition("\n## Not ours\n")
HAPPENS = re.findall(r"^- (C\d{3}) \S.*\.$", TESTED, re.MULTILINE)
EXCUSED = re.findall(r"^\| (C\d{3}) \| [^|]{10,} \| [^|]{10,} \|$", NOT_OURS, re.MULTILINE)


@cache
def in_tests() -> set[str]:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "test_cases.py"]
    return {number for path in files for number in NUMBER.findall(path.read_text())}


def test_every_case_has_a_test_or_a_reason() -> None:
    assert [number for number in HAPPENS if number not in in_tests()] == []


def test_every_number_on_the_page_is_a_case_once() -> None:
    assert len(HAPPENS) + len(EXCUSED) == len({*HAPPENS, *EXCUSED}) > 70
    assert set(NUMBER.findall(PAGE)) == {*HAPPENS, *EXCUSED}


def test_no_test_carries_a_number_that_nobody_knows() -> None:
    assert in_tests() - {*HAPPENS, *EXCUSED} == set()
