"""Projects as a stranger begins them, with the wheel of this tree: what must work, and what goes wrong on the first day.

Oldest and newest Python and Django that the machine has, on SQLite and PostgreSQL. Part of `make test-wheel`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.postgres import Server
from tests.tasks.__main__ import DJANGO_6, newer_python

ROOT = Path(__file__).resolve().parent.parent
DJANGO_5 = "django~=5.2.0"
EXTRAS = {
    "rest": "rest_framework, django_filters",
    "postgres": "psycopg",
    "prometheus": "prometheus_client",
    "otel": "opentelemetry.trace",
    "celery": "celery",
    "tasks": "django_tasks",
    "all": "durable_jobs",
}
ASSURED = {("oldest", "postgresql"), ("newest", "sqlite")}
"""Where the first day is left out: each Python and each database has had one."""
AUTO_FIELDS = ("AutoField", "BigAutoField", "SmallAutoField", "shop.fields.Serial")

SETTINGS = """
import os

INSTALLED_APPS += ["durable_jobs", "rest_framework", "django_filters", "shop"]
DATABASES["default"] = {database!r}
DEFAULT_AUTO_FIELD = os.environ.get("AUTO_FIELD", "django.db.models.BigAutoField")
ALLOWED_HOSTS = ["testserver"]
"""
URLS = """
from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls), path("api/", include("durable_jobs.rest.urls"))]
"""
FIELDS = """
from django.db import models


class Serial(models.BigAutoField):
    pass
"""
MODELS = """
from django.db import models


class Order(models.Model):
    state = models.CharField(max_length=10, default="new")
"""
JOBS = """
from durable_jobs.kinds import Done, Kind, StatusMirror, register
from shop.models import Order


@register
class Greet(Kind):
    name = "shop.greet"

    def step(self, ctx):
        return Done({"greeting": f"Hello {ctx.input['name']}"})


@register
class Ship(Kind):
    name = "shop.ship"
    mirror = StatusMirror(
        "shop.Order", field="state", open=("new",), redriven="new",
        completed="shipped", failed="failed", cancelled="cancelled",
    )

    def step(self, ctx):
        return Done()
"""
START = """
from durable_jobs import service
from shop.models import Order

service.start("shop.greet", {"name": "wheel"})
service.start("shop.ship", subject=Order.objects.create())
"""
LOOK = """
from django.contrib.auth.models import User
from django.test import Client
from durable_jobs.models import Job
from shop.models import Order

job = Job.objects.get(kind="shop.greet")
assert (job.status, job.result) == ("completed", {"greeting": "Hello wheel"}), (job.status, job.error_message)
assert Order.objects.get().state == "shipped"
client = Client()
client.force_login(User.objects.create_superuser("anna"))
for page in ("", "overview/", f"{job.pk}/change/", "start/"):
    answer = client.get(f"/admin/durable_jobs/job/{page}")
    assert answer.status_code == 200, (page, answer.status_code)
assert b"shop.greet" in client.get("/admin/durable_jobs/job/").content
for page in ("jobs/", f"jobs/{job.pk}/", f"jobs/{job.pk}/events/", "kinds/", "health/"):
    answer = client.get(f"/api/{page}")
    assert answer.status_code == 200, (page, answer.status_code)
assert client.get("/api/jobs/").json()["results"][0]["kind"].startswith("shop.")
"""


def main(wheel: Path, folder: Path) -> None:
    """Go through all of them; SystemExit names what failed."""
    interpreters = {"oldest": (sys.executable, DJANGO_5)}
    newest = newer_python()
    if newest is None:
        print("Wheel on Django 6: left out, because no Python 3.12 or later was found (PATH, pyenv).")
    else:
        interpreters["newest"] = (newest, DJANGO_6)
    server = Server.create()
    try:
        for name, (interpreter, django) in interpreters.items():
            python = environment(interpreter, folder / name, wheel, django)
            for vendor in ("sqlite", "postgresql"):
                database = on_sqlite(folder / name) if vendor == "sqlite" else on_postgresql(server, name)
                project = Project.begin(python, folder / f"{name}-{vendor}", database)
                if newest is None or (name, vendor) not in ASSURED:
                    first_day(project)
                project.manage("migrate", "--verbosity", "0")
                use(project)
                print(f"Wheel in a fresh project on {version(python)}, {vendor}: passed", flush=True)
    finally:
        server.remove()


def environment(interpreter: str, target: Path, wheel: Path, django: str) -> Path:
    """An environment in which the package and, one after the other, each extra were installed."""
    call([interpreter, "-m", "venv", str(target)])
    python = target / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    call([*pip, django, str(wheel), "psycopg[binary]"])
    refused = tell([str(python), "-c", "import durable_jobs.rest"])
    assert "pip install 'durable-jobs[rest]'" in refused, refused
    for extra, modules in EXTRAS.items():
        if extra == "tasks" and django == DJANGO_6:
            continue
        call([*pip, f"{wheel}[{extra}]"])
        call([str(python), "-c", f"import {modules}"])
    call([str(python), "-m", "pip", "check", "--disable-pip-version-check"])
    return python


def version(python: Path) -> str:
    return tell(
        [
            str(python),
            "-c",
            "import django, sys; print(f'Python {sys.version.split()[0]}, Django {django.__version__}')",
        ]
    )


def on_sqlite(folder: Path) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": f"{folder}.sqlite3",
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL;",
        },
    }


def on_postgresql(server: Server, name: str) -> dict[str, Any]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        info = connection.info
        where = {"HOST": info.host, "PORT": str(info.port), "USER": info.user, "PASSWORD": info.password}
    return {"ENGINE": "django.db.backends.postgresql", "NAME": name, **where}


@dataclass
class Project:
    python: Path
    folder: Path
    database: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begin(cls, python: Path, folder: Path, database: dict[str, Any]) -> Project:
        """As `startproject` and `startapp` make it, with what README and docs/rest.md say."""
        project = cls(python, folder, database)
        folder.mkdir()
        call([str(python), "-m", "django", "startproject", "mysite", "."], folder)
        project.manage("startapp", "shop")
        for name, text in {"models": MODELS, "jobs": JOBS, "fields": FIELDS}.items():
            (folder / "shop" / f"{name}.py").write_text(text)
        (folder / "mysite" / "urls.py").write_text(URLS)
        with (folder / "mysite" / "settings.py").open("a") as settings:
            settings.write(SETTINGS.format(database=database))
        project.manage("makemigrations", "shop", "--verbosity", "0")
        return project

    def settings(self, name: str, text: str) -> dict[str, str]:
        """Other settings for a command: those of the project and `text`."""
        (self.folder / "mysite" / f"{name}.py").write_text(f"from mysite.settings import *\n{text}\n")
        return {"DJANGO_SETTINGS_MODULE": f"mysite.{name}"}

    def manage(self, *arguments: str, code: int = 0, **variables: str) -> str:
        return call([str(self.python), "manage.py", *arguments], self.folder, code, variables)

    def shell(self, text: str, code: int = 0, **variables: str) -> str:
        return self.manage("shell", "--command", text, code=code, **variables)


def use(project: Project) -> None:
    """What the README promises to a new project, from `migrate` to the screens, and the schema undone."""
    project.manage("check", "--fail-level", "WARNING", "--database", "default")
    for name in AUTO_FIELDS:
        path = name if "." in name else f"django.db.models.{name}"
        project.manage("makemigrations", "durable_jobs", "--check", "--dry-run", AUTO_FIELD=path)
    project.shell(START)
    project.manage("runworker", "--until-idle")
    project.shell(LOOK)
    project.manage("migrate", "durable_jobs", "zero", "--verbosity", "0")
    project.manage("migrate", "--verbosity", "0")
    project.manage("durable_jobs", "list")


def first_day(project: Project) -> None:
    """What goes wrong, in the order in which it does; each time it is told what to do."""
    for said, wanted in mishaps(project):
        assert all(text in said for text in wanted), f"{wanted} is not told by:\n{said}"


def mishaps(project: Project) -> Iterator[tuple[str, list[str]]]:
    # Other apps are migrated, this one was added today.
    for app in ("admin", "auth", "sessions", "shop"):
        project.manage("migrate", app, "--verbosity", "0")
    yield project.manage("runworker", code=3), ["no table durable_jobs_", "run manage.py migrate first"]
    yield project.manage("durable_jobs", "health", code=1), ["PROBLEM  database", "manage.py migrate"]
    yield project.manage("reconcile", code=1), ["no tables for jobs: run manage.py migrate first"]
    yield project.shell(START, code=1), ["no tables for jobs: run manage.py migrate first"]
    yield (
        project.shell(LOOK_WITHOUT_TABLES),
        ["admin says migrate", "API says migrate", "health says migrate"],
    )

    away = project.settings("away", nowhere(project.database))
    yield project.manage("runworker", code=4, **away), ["The database 'default' "]
    yield project.manage("durable_jobs", "health", code=1, **away), ["PROBLEM  database", "Is it running"]
    yield (
        project.manage("durable_jobs", "list", code=1, **away),
        ["CommandError: The database 'default' fails"],
    )

    project.manage("migrate", "--verbosity", "0")
    typo = project.settings("typo", 'DURABLE_JOBS = {"GRACES": 5}')
    yield (
        project.manage("runworker", code=1, **typo),
        ["E002", "has no setting 'GRACES'", "Did you mean 'GRACE'?"],
    )
    wrong = project.settings("wrong", 'DURABLE_JOBS = {"GRACE": "5"}')
    yield project.manage("check", code=1, **wrong), ["E003", "GRACE", "'5'"]
    if project.database["ENGINE"].endswith("sqlite3"):
        bare = project.settings("bare", 'DATABASES["default"]["OPTIONS"] = {}')
        yield project.manage("check", **bare), ["W001", '"transaction_mode": "IMMEDIATE"', "journal_mode=WAL"]

    jobs, kinds = project.folder / "shop" / "jobs.py", project.folder / "shop" / "kinds.py"
    jobs.rename(kinds)
    where = "@register in jobs.py (DURABLE_JOBS['DISCOVER']) of an app in INSTALLED_APPS"
    yield project.shell(START, code=1), ["'shop.greet' is not registered", "No kind is known here", where]
    yield project.manage("durable_jobs", "kinds"), ["No kind is registered here", where]
    yield project.manage("runworker", "--until-idle"), ["no_kinds", where]
    kinds.rename(jobs)
    yield project.manage("durable_jobs", "start", "shop.gret", code=1), ["Did you mean 'shop.greet'?"]
    yield (
        project.shell('from durable_jobs import service; service.start("shop.ship")', code=1),
        ["Pass subject=<a saved shop.Order>"],
    )

    yield (
        project.shell(LONELY),
        ["explain: Start one: manage.py runworker", "another database than", "overview says it"],
    )
    yield (
        project.manage("durable_jobs", "health", "--without-worker", "0", code=1),
        ["Due work that no live worker takes: default (shop.greet)", "manage.py runworker"],
    )
    yield project.shell(ROW_GONE), ["row_gone"]

    celery = project.settings("broker", BROKER)
    yield project.shell('from durable_jobs import service; service.start("shop.greet", {"name": "x"})', **celery), [
        "publish_failed", "amqp://", "127.0.0.1:1", "the reconciler announces the job",
    ]  # fmt: skip
    unset = project.settings("brokerless", 'DURABLE_JOBS = {"TRANSPORT": "celery"}')
    yield project.manage("check", **unset), ["W007", "broker_url"]
    project.shell(
        "from durable_jobs.models import Job; from durable_jobs import service\n"
        "for job in Job.objects.filter(finished_at=None): service.cancel(job.id)"
    )
    project.manage("durable_jobs", "prune", "--older-than", "0s", "--no-archive", "--yes")


LOOK_WITHOUT_TABLES = """
from django.contrib.auth.models import User
from django.test import Client
from django.test.utils import override_settings

client = Client(raise_request_exception=False)
client.force_login(User.objects.create_superuser("early"))
wanted = b"run manage.py migrate first"
for name, address in {"admin": "/admin/durable_jobs/job/", "overview": "/admin/durable_jobs/job/overview/", "API": "/api/jobs/"}.items():
    answer = client.get(address)
    assert answer.status_code == 500
    print(name, "says migrate" if wanted in answer.content else answer.content.decode()[:3000])
answer = client.get("/api/health/").json()
print("health", "says migrate" if not answer["healthy"] and "migrate" in str(answer) else answer)
"""
LONELY = """
from django.contrib.auth.models import User
from django.test import Client
from durable_jobs import explain, service

job = service.start("shop.greet", {"name": "nobody"}).job
for reason in explain.explain(job):
    print("explain:", reason.way_out)
client = Client()
client.force_login(User.objects.get(username="early"))
page = client.get("/admin/durable_jobs/job/overview/").content.decode()
print("overview says it" if "manage.py runworker" in page else page)
"""
ROW_GONE = """
from durable_jobs import service
from durable_jobs.models import Job, JobEvent
from durable_jobs.testing import finish
from shop.models import Order

order = Order.objects.create()
job = service.start("shop.ship", subject=order).job
Order.objects.all().delete()
finish(job)
print([event.event for event in JobEvent.objects.filter(job_id=job.id)])
"""
BROKER = """
from celery import Celery

DURABLE_JOBS = {"TRANSPORT": "celery"}
app = Celery("mysite", broker="amqp://guest:secret@127.0.0.1:1//")
app.set_default()
"""


def nowhere(database: dict[str, Any]) -> str:
    if database["ENGINE"].endswith("sqlite3"):
        return 'DATABASES["default"]["NAME"] = "/no/such/folder/db.sqlite3"'
    return 'DATABASES["default"].update(HOST="127.0.0.1", PORT="1")'


def call(
    command: list[str], folder: Path | None = None, code: int = 0, variables: dict[str, str] | None = None
) -> str:
    """What the command says; SystemExit when it ends otherwise than with `code`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "DJANGO_SETTINGS_MODULE", "DATABASE_URL"}
    }
    print("+", Path(command[0]).name, *(word.strip().partition("\n")[0] for word in command[1:]), flush=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if done.returncode != code:
        sys.exit(
            f"{done.stdout}\nWheel: FAILED ({' '.join(command)} ended with {done.returncode}, not {code})"
        )
    return done.stdout


def tell(command: list[str]) -> str:
    """What the command says, however it ends."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.stdout.strip()
