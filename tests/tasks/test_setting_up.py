"""A project sets itself up in any order, and a wrong entry in TASKS is told by a system check (C122)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from django.core import checks
from django.core.checks import CheckMessage

from durable_jobs.tasks import DurableJobsBackend
from tests.postgres import ROOT
from tests.tasks.django_api import PACKAGE
from tests.tasks.settings import BACKEND

AROUND = ["django.contrib.contenttypes", "django.contrib.auth", *(["django_tasks"] if "_" in PACKAGE else [])]

SET_UP = """
import json, sys
from django.conf import settings
apps, tasks = json.loads(sys.argv[1])
settings.configure(
    INSTALLED_APPS=apps, TASKS=tasks, SECRET_KEY="x", USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
import django
django.setup()
from django.core import checks
from durable_jobs import kinds
print(json.dumps({"kinds": kinds.names(), "checks": [one.id for one in checks.run_checks()]}))
"""


def set_up(apps: list[str], tasks: Any) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", SET_UP, json.dumps([apps, tasks])],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[str]] = json.loads(done.stdout)
    return answer


TWO = {
    "default": {"BACKEND": BACKEND},
    "other": {"BACKEND": BACKEND, "QUEUES": ["other"]},
}


@pytest.mark.parametrize("place", ["first", "last"])
def test_an_app_may_decorate_its_tasks_before_the_models_are_loaded(place: str) -> None:
    early, ours = "tests.tasks.early", "durable_jobs"
    apps = [early, *AROUND, ours] if place == "first" else [ours, *AROUND, early]
    answer = set_up(apps, TWO)
    assert "durable_jobs.task" in answer["kinds"]
    assert not [id for id in answer["checks"] if id.startswith("durable_jobs.E")]


def test_without_the_app_a_check_tells_it() -> None:
    answer = set_up(["tests.tasks.early", *AROUND], TWO)
    assert answer["checks"].count("durable_jobs.E020") == 2


def test_without_our_backend_there_is_no_kind_of_tasks() -> None:
    answer = set_up(
        [*AROUND, "durable_jobs"], {"default": {"BACKEND": f"{PACKAGE}.backends.dummy.DummyBackend"}}
    )
    assert "durable_jobs.task" not in answer["kinds"]
    answer = set_up([*AROUND, "durable_jobs"], {})
    assert "durable_jobs.task" not in answer["kinds"]


WITHOUT = """
import sys
sys.modules["django.tasks"] = sys.modules["django_tasks"] = None
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "durable_jobs"], USE_TZ=True,
    TASKS={"default": {"BACKEND": "durable_jobs.tasks.DurableJobsBackend"}},
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
import django
django.setup()
import durable_jobs.tasks  # as Celery's autodiscovery does with every app
try:
    durable_jobs.tasks.DurableJobsBackend
except ImportError as error:
    print(error)
"""


def test_where_django_has_no_tasks_all_but_the_backend_works() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'durable-jobs[tasks]'" in done.stdout


def told(**parameters: Any) -> list[CheckMessage]:
    return list(DurableJobsBackend("main", {"BACKEND": BACKEND, **parameters}).check())


def test_checks_name_the_entry_the_value_and_the_way_out() -> None:
    assert told() == told(QUEUES=[], OPTIONS={"KIND": "tests.patient_task"}) == []

    [unknown] = told(OPTIONS={"RETRY": 3})
    assert unknown.id == "durable_jobs.E021" and "'RETRY'" in unknown.msg and "KIND" in str(unknown.hint)
    [missing] = told(OPTIONS={"KIND": "tests.gone"})
    assert missing.id == "durable_jobs.E021" and "tests.gone" in missing.msg
    [queue] = told(QUEUES=["default", "manual"])
    assert queue.id == "durable_jobs.E022" and "TASKS['main']" in queue.msg and "'manual'" in queue.msg
    assert [one.id for one in told(QUEUES=["a:b", 7])] == ["durable_jobs.E022"] * 2


def test_a_kind_that_is_none_of_tasks_is_told(registry: None) -> None:
    from tests.slices import made

    made(name="tests.no_tasks")
    [wrong] = told(OPTIONS={"KIND": "tests.no_tasks"})
    assert wrong.id == "durable_jobs.E021" and "tests.no_tasks" in wrong.msg


@pytest.mark.django_db
def test_django_asks_the_backends() -> None:
    assert not [one for one in checks.run_checks() if str(one.id).startswith("durable_jobs.E02")]
