"""What the reference lists is what there is: nothing is missing, nothing is invented."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

import durable_jobs
from durable_jobs import exceptions, kinds, service, signals
from durable_jobs.batch import BatchKind
from durable_jobs.exceptions import DurableJobsError, LeaseLost, Refusal
from durable_jobs.kinds import Kind, Retry
from durable_jobs.runner import SliceContext
from tests.pages.conftest import text_of
from tests.postgres import ROOT

pytestmark = pytest.mark.any_database

PACKAGE = Path(durable_jobs.__file__).parent
RAISED_IN_STEPS = {"TransientError", "TerminalError", "UnrecoverableError", "RetryAfter", "Park"}


def section(page: str, title: str) -> str:
    return text_of(page).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables' rows whose first cell is code."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line] for line in lines]


def attributes(cls: type, base: type) -> dict[str, Any]:
    """Public attributes with their defaults that a class adds to its base."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("_") and not callable(value) and name not in vars(base)
    }


def methods(cls: type, base: type) -> set[str]:
    return {
        name
        for name, value in vars(cls).items()
        if not name.startswith("_") and inspect.isfunction(value) and name not in vars(base)
    }


def test_every_attribute_of_a_kind_is_told_with_its_default() -> None:
    told = {
        name: default
        for name, default, *_ in (row for row in rows(section("kinds", "`Kind`")) if len(row) == 3)
    }
    there = attributes(Kind, object)
    for derived in ("has_transition_hook", "all_names"):
        del there[derived]
    there["retry"], there["queue"] = "Retry()", "DEFAULT_QUEUE"
    assert told == {
        name: value if name in ("retry", "queue") else repr(value) for name, value in there.items()
    }


def test_every_attribute_of_a_batch_kind_is_told_with_its_default() -> None:
    told = [row for row in rows(section("kinds", "`BatchKind`")) if len(row) == 3]
    assert {name: default for name, default, _ in told} == {
        name: repr(value) for name, value in attributes(BatchKind, Kind).items()
    }


def test_every_method_that_a_kind_may_define_is_told() -> None:
    told = {row[0] for row in rows(section("kinds", "`Kind`")) if len(row) == 2}
    assert told == methods(Kind, object)
    told = {row[0] for row in rows(section("kinds", "`BatchKind`")) if len(row) == 2}
    assert told == methods(BatchKind, Kind)


def test_every_field_of_retry_is_told() -> None:
    there = {name: repr(getattr(Retry(), name)) for name in Retry.__dataclass_fields__}
    assert {name: default for name, default, _ in rows(section("kinds", "`Retry`"))} == there


def test_everything_that_ctx_gives_is_told() -> None:
    text = "".join(
        line.split(" | ")[0] for line in section("kinds", "`ctx`").splitlines() if line.startswith("| `")
    )
    told = set(re.findall(r"`(\w+)", text))
    ctx = SliceContext.__new__(SliceContext)
    source = inspect.getsource(SliceContext.__init__)
    given = set(re.findall(r"self\.([a-z]\w*)\b.*? = ", source))
    public = {name for name in dir(ctx) if not name.startswith("_")} | given
    public -= {"unwritten", "forget_unwritten"}  # the runner's
    assert told == public


def test_every_public_function_of_the_service_is_told_with_what_it_raises() -> None:
    there = {
        name: function
        for name, function in vars(service).items()
        if inspect.isfunction(function)
        and function.__module__ == service.__name__
        and not name.startswith("_")
    }
    told = {row[0]: row[-1] for row in rows(text_of("service"))}
    assert set(told) == set(there)
    for name, refusals in told.items():
        raised = set(re.findall(r"`(\w+)`", "`" + refusals + "`")) & set(vars(exceptions))
        documented = set(re.findall(r"`(\w+)`", (there[name].__doc__ or "").partition("Raises")[2])) & set(
            vars(exceptions)
        )
        assert raised == documented, name


def test_every_code_is_told() -> None:
    there = {
        (error.code, name)
        for name, error in vars(exceptions).items()
        if inspect.isclass(error)
        and (issubclass(error, DurableJobsError) or error is LeaseLost)
        and not name.startswith("_")
        and error not in (DurableJobsError, Refusal)
        and name not in RAISED_IN_STEPS
    }
    assert {(row[0], row[1]) for row in rows(text_of("errors"))} == there


def test_every_code_that_a_job_may_get_is_in_the_package() -> None:
    last = section("errors", "Codes on a job")
    code = "".join(path.read_text() for path in PACKAGE.glob("*.py"))
    for name in re.findall(r"`(\w+)`[ ,.(]", last.partition("one of these:")[2]):
        assert f'"{name}"' in code, name


def test_every_signal_is_told() -> None:
    there = {name for name, value in vars(signals).items() if isinstance(value, signals.JobSignal)}
    assert {row[0] for row in rows(section("events", "Signals"))} == there


def logged() -> set[str]:
    """The names of all events that the package logs: the first text that `log` and `tell` are given."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("log", "tell"):
                continue
            texts = [
                one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            if texts:
                found.add(texts[0])
    return found


NAMED_ELSEWHERE = {
    # Events whose names stand where they are decided, not where they are logged.
    "job_completed", "job_failed", "job_parked", "job_cancelled", "given_back", "suspect_given_back",
    "reconcile_orphan_failed", "reconcile_cancel_failed",
}  # fmt: skip


def test_every_log_event_is_told() -> None:
    told = {row[0] for row in rows(section("events", "Log events"))}
    assert logged() - told == set(), "put these into docs/events.md"
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert all(f'"{name}"' in code for name in told)
    assert told - logged() <= NAMED_ELSEWHERE


def test_every_page_is_in_the_index_and_every_link_leads_somewhere() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    linked = set(re.findall(r"\]\((\w+\.md)", text_of("index")))
    assert pages - linked == {"index.md"}
    for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *ROOT.glob("CONTRIBUTING.md")]:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("page", sorted(path.stem for path in (ROOT / "docs").glob("*.md")))
def test_links_within_the_pages_lead_to_a_heading(page: str) -> None:
    for target, anchor in re.findall(r"\]\((\w*?)(?:\.md)?#([^)]+)\)", text_of(page)):
        text = text_of(target or page)
        there = {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        }
        assert anchor in there, f"{page}.md: {target}#{anchor}"


def test_the_queue_of_a_kind_is_the_settings_word() -> None:
    with override_settings(DURABLE_JOBS={"DEFAULT_QUEUE": "other"}):
        assert Kind().queue == "other"
    assert kinds.Kind is Kind
