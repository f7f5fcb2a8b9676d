"""Every block of code in README, CONTRIBUTING and docs is run or held to what there is; a new one must find its place."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml
from django.contrib import admin
from django.core.management import BaseCommand, CommandError, get_commands, load_command_class
from django.db import connection
from django.db.backends.sqlite3.base import DatabaseWrapper
from django.test import override_settings
from django.urls import URLResolver
from django.urls.resolvers import RegexPattern

from durable_jobs import checks, conf, kinds, service
from durable_jobs.models import Job
from durable_jobs.rest import urls as rest_urls
from durable_jobs.service import Scope
from durable_jobs.testing import finish
from tests.pages.conftest import Page
from tests.pages.shop.models import Export, Product
from tests.postgres import ROOT
from tests.slices import own_registry
from tests.test_architecture import LAYERS

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESSES = URLResolver(RegexPattern(r"^"), rest_urls.urlpatterns)


class Block(NamedTuple):
    page: str
    language: str
    number: int
    text: str


def blocks() -> Iterator[Block]:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, (language, text) in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")), 1):
            yield Block(path.stem, language, number, text)


ALL = list(blocks())


def of(language: str, *pages: str) -> list[Any]:
    """The blocks of a language as parameters of a test, the tutorial's left out: `make test-tutorial` types them."""
    found = [
        one
        for one in ALL
        if one.language == language and one.page != "tutorial" and (not pages or one.page in pages)
    ]
    return [pytest.param(one.text, id=f"{one.page}-{one.number}") for one in found]


CHECKED = {
    # Language, and the pages on which the tests below (or those that are named) look at all of its blocks.
    "console": None,
    "http": None,
    "ini": {"hosts", "workers", "pgbouncer"},
    "crontab": {"pruning"},
    "yaml": {"monitoring"},  # and tests/test_monitoring.py compares the metrics
    "mermaid": {"CONTRIBUTING", "state_machine"},
    "text": {"README", "testing"},
    "python": None,  # test_code.test_every_page_with_code_is_run
}


@pytest.mark.parametrize("block", ALL, ids=lambda block: f"{block.page}-{block.number}")
def test_every_block_is_of_a_sort_that_a_test_looks_at(block: Block) -> None:
    assert block.language, f"{block.page}.md, block {block.number}: say its language after the backticks"
    assert block.language in CHECKED, f"no test looks at {block.language!r}: add one, and put it into CHECKED"
    pages = CHECKED[block.language]
    assert pages is None or block.page in pages, (
        f"no test looks at the {block.language} blocks of {block.page}.md: add one, and put the page into CHECKED"
    )


# --- Python of the pages whose code needs something of its own ---------------------------------------------------


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


def test_the_kind_of_the_readme_reprices(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "catalog", module("catalog"))
    monkeypatch.setitem(sys.modules, "catalog.models", module("catalog.models", Product=Product))
    Product.objects.bulk_create([Product(supplier=7, cost=number) for number in range(3)])
    other = Product.objects.create(supplier=8, cost=5)
    page("README", request=SimpleNamespace(user=None))
    assert finish(Job.objects.get(kind="catalog.reprice")).status == "completed"
    assert [one.price for one in Product.objects.filter(supplier=7).order_by("cost")] == [0, 2, 4]
    other.refresh_from_db()
    assert other.price == 0


def test_the_admins_of_the_page_can_be_registered(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    site = admin.AdminSite()
    site.register(Job, admin.site._registry[Job].__class__)
    monkeypatch.setattr(admin, "site", site)
    monkeypatch.setattr(admin, "register", lambda *models: _registering(site, models))
    monkeypatch.setitem(sys.modules, "unfold", module("unfold"))
    monkeypatch.setitem(sys.modules, "unfold.admin", module("unfold.admin", ModelAdmin=admin.ModelAdmin))
    names = page("admin")
    assert isinstance(site.get_model_admin(Job), names["JobAdmin"])
    assert isinstance(site.get_model_admin(Export), names["ExportAdmin"])
    assert finish(service.start("shop.import", {"supplier": 3}).job).result == {"supplier": 3}


def _registering(site: admin.AdminSite, models: tuple[Any, ...]) -> Callable[[Any], Any]:
    def decorate(admin_class: Any) -> Any:
        site.register(models, admin_class)
        return admin_class

    return decorate


def test_the_options_of_the_checks_page_leave_nothing_to_warn_of(page: Page, tmp_path: Path) -> None:
    given = {**connection.settings_dict, **page("checks", BASE_DIR=tmp_path)["DATABASES"]["default"]}
    assert list(checks._sqlite_options(DatabaseWrapper(given))) == []
    assert len(list(checks._sqlite_options(DatabaseWrapper({**given, "OPTIONS": {}})))) == 1


def test_the_settings_behind_a_pooler_are_accepted(page: Page) -> None:
    names = page("pgbouncer")
    assert names["DATABASES"]["default"]["DISABLE_SERVER_SIDE_CURSORS"] is True
    for given in (names["DURABLE_JOBS"], {"LISTEN": False}):
        with override_settings(DURABLE_JOBS=given):
            assert list(conf.problems()) == []


def test_the_settings_of_the_settings_page_are_accepted(page: Page) -> None:
    names = page("settings")
    with override_settings(DURABLE_JOBS={"GRACE": 20, "RELEASE": "", **names["DURABLE_JOBS"]}):
        assert list(conf.problems()) == []
    member = SimpleNamespace(membership=SimpleNamespace(tenant_id=3))
    assert names["scope"](SimpleNamespace(user=member)) == Scope("3")
    assert names["scope"](SimpleNamespace(user=SimpleNamespace(membership=None))) is None


def test_the_addresses_and_the_kind_of_the_rest_page_are_there(page: Page) -> None:
    names = page("rest")
    assert {pattern.name for pattern in names["router"].urls} >= {"work-list", "work-detail"}
    assert names["urlpatterns"][0].resolve("api/schema/").func
    assert kinds.get("reports.export").public_result
    assert finish(service.start("reports.export", {"year": 2026}).job).result == {"year": 2026}


# --- what is typed ---------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command: what comes after `$ `, parted at `&&`, without variables before and comments behind."""
    lines = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    assert lines, f"no command in {text!r}: they begin with '$ '"
    for line in lines:
        for part in line.split(" && "):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            yield words


TARGETS = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = (ROOT / "pyproject.toml").read_text()
EXTRAS = set(
    re.findall(
        r"^(\w+) = \[",
        PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0],
        re.MULTILINE,
    )
)
PINNED = {line.partition("==")[0] for line in (ROOT / "requirements.txt").read_text().splitlines()}


def check(words: list[str]) -> None:
    match words:
        case ["make", target, *rest]:
            assert target in TARGETS, target
            for word in rest:
                assert re.fullmatch(r"(ARGS|PYTHON|DATABASE_URL|MINUTES|DB)=.+", word), word
        case ["pip", "install", *packages]:
            for name in packages:
                found = re.fullmatch(r"([\w-]+)(?:\[(.+)\])?", name)
                assert found, name
                if found[1] == "durable-jobs":
                    assert set((found[2] or "").split(",")) <= {"", *EXTRAS}, name
                else:
                    assert name in PINNED, f"{name} is not what the tests use"
        case ["python", "manage.py", name, *rest] | ["manage.py", name, *rest]:
            check_command(name, rest)
        case ["celery", "-A", _, "worker", *rest]:
            check_celery(rest)
        case [path] if (ROOT / path).is_file():
            pass
        case _:
            raise AssertionError(f"nobody knows whether this can be typed: {words}")


def check_command(name: str, given: list[str]) -> None:
    """Parse it as `manage.py` would."""
    assert name in get_commands(), name
    app = get_commands()[name]
    command: BaseCommand = app if isinstance(app, BaseCommand) else load_command_class(app, name)
    try:
        command.create_parser("manage.py", name).parse_args(given)
    except (SystemExit, CommandError) as error:
        raise AssertionError(f"manage.py {name} {' '.join(given)}: {error}") from error


def check_celery(given: list[str]) -> None:
    from celery.bin.worker import worker

    known = {option for parameter in worker.params for option in parameter.opts}
    assert {word for word in given if word.startswith("-")} <= known


@pytest.mark.parametrize("text", of("console"))
def test_commands_can_be_typed(text: str) -> None:
    for words in commands(text):
        check(words)


@pytest.mark.parametrize(
    "wrong",
    ["make tests", "pip install durable-jobs[redis]", "manage.py durable_jobs prune --aged 90d", "manage.py runworkers", "poetry add x"],
)  # fmt: skip
def test_a_command_that_cannot_be_typed_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong.split())


@pytest.mark.parametrize("text", of("crontab"))
def test_cron_lines_run_commands(text: str) -> None:
    for line in text.splitlines():
        assert re.match(r"(\S+ +){5}", line) and not re.search(
            r"(?<!\\)%", line
        )  # cron ends a line at a bare %
        check(shlex.split(re.sub(r"\$\(.*?\)", "now", line))[5:])


@pytest.mark.parametrize("text", of("ini", "hosts", "workers"))
def test_units_start_workers_that_may_drain(text: str) -> None:
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    python, manage, *rest = shlex.split(parser["Service"]["ExecStart"])
    assert python.endswith("/bin/python") and manage.endswith("/manage.py")
    check(["manage.py", *rest])
    assert float(parser["Service"]["TimeoutStopSec"]) > conf.config.DRAIN_TIMEOUT


@pytest.mark.parametrize("text", of("ini", "pgbouncer"))
def test_the_pooler_is_in_transaction_mode(text: str) -> None:
    parser = configparser.ConfigParser(inline_comment_prefixes=";")
    parser.read_string(text)
    assert parser["pgbouncer"]["pool_mode"] == "transaction"


# --- what is sent, drawn and printed ----------------------------------------------------------------------------------

REQUEST = re.compile(r"^(GET|POST) (\S+)(?: +Idempotency-Key: \S+)?(?: +(\{.*?\}))?(?:  +[^{]*)?$")


@pytest.mark.parametrize("text", of("http"))
def test_requests_have_an_address_and_fields_that_are_known(text: str) -> None:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("{", " ")):
            continue
        found = REQUEST.match(line) or REQUEST.match(re.sub(r"(\}\})(?:  +.*)?$", r"\1", line))
        body = re.search(r"\{\"?.*\}(?=  |$)", line.partition("/ ")[2])
        assert found, line
        view = ADDRESSES.resolve(found[2].replace("{id}", "01a22961-0000-7000-8000-000000000000")).func
        assert found[1].lower() in view.actions, line  # type: ignore[attr-defined]
        if body:
            action = getattr(view.cls, view.actions["post"])  # type: ignore[attr-defined]
            assert set(json.loads(body[0])) <= fields_of(action), line
        if found[1] == "GET":
            answer = json.loads("\n".join(lines[number + 1 :]).replace(", …}", "}"))
            from durable_jobs.rest.serializers import JobStatusSerializer

            assert set(answer) <= set(JobStatusSerializer().fields)


def fields_of(action: Any) -> set[str]:
    """The fields of the body that an action of a viewset takes."""
    from durable_jobs.rest import serializers

    taken = {
        "create": serializers.StartBody,
        "cancel": serializers.CancelBody,
        "redrive": serializers.RedriveBody,
        "pause": serializers.PauseBody,
        "unpause": serializers.UnpauseBody,
    }[action.__name__]
    return set(taken().fields)


@pytest.mark.parametrize("text", of("yaml"))
def test_rules_have_what_prometheus_asks_for(text: str) -> None:
    for group in yaml.safe_load(text)["groups"]:
        assert group["name"] and group["rules"]
        for rule in group["rules"]:
            assert (
                set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
                and rule["alert"]
                and rule["expr"]
            )


@pytest.mark.parametrize("text", of("mermaid", "CONTRIBUTING"))
def test_the_layers_are_drawn_as_they_are(text: str) -> None:
    """Every box's modules stand in one layer, and arrows lead from lower lines of the table to higher ones."""
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    boxes = {key: re.split(r" · ", label) for key, label in re.findall(r'(\w+)\["(.+?)"\]', text)}
    drawn = {name for names in boxes.values() for name in names} | {"store", "supervisor", "transports"}
    assert drawn <= set(rank), drawn - set(rank)
    for line in text.splitlines()[1:]:
        chain = [re.sub(r"\[.*", "", part.strip()) for part in line.split("-->")]
        for above, below in pairwise(chain):
            lowest = min(rank[name] for name in boxes.get(above, [above]))
            assert lowest > max(rank[name] for name in boxes.get(below, [below])), (above, below)


@pytest.mark.parametrize("text", of("mermaid", "state_machine"))
def test_the_chart_has_every_status_and_no_other(text: str) -> None:
    states = set(re.findall(r"^ +(\w+) -->|--> (\w+)", text, re.MULTILINE))
    drawn = {name for pair in states for name in pair if name}
    assert drawn - {"retrying"} == {value for value, _ in Job._meta.get_field("status").choices}  # type: ignore[union-attr]


@pytest.mark.parametrize("text", of("text", "README"))
def test_the_demo_prints_what_the_readme_shows(text: str) -> None:
    code = "".join(path.read_text() for path in (ROOT / "project" / "demo").rglob("*.py"))
    labels = [re.split(r"  +", line.strip())[1] for line in text.splitlines() if line.startswith("  ok  ")]
    assert len(labels) == 9
    for label in labels:
        assert label.replace("airports", "") and f'"{label}' in code, label


@pytest.mark.parametrize("text", of("text", "testing"))
def test_the_crash_test_prints_what_the_page_shows(text: str) -> None:
    from durable_jobs.testing.crash import Difference

    line = next(line for line in text.splitlines() if "instead of" in line).strip()
    shown = str(
        Difference("before 'BEGIN IMMEDIATE' (place 13)", ("mail", "Order 7", "anna@example.com"), 1, 2)
    )
    assert line == shown


def test_nothing_of_the_pages_is_left_registered() -> None:
    with own_registry():
        assert kinds.find("reports.export") is None and kinds.find("catalog.reprice") is None
