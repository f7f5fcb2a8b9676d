"""Whatever is wrong with settings, kinds or database is told at start, with an id and a way out."""

import os
import re
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from django.core import checks as registry
from django.core import management
from django.core.checks import Tags
from django.core.checks.registry import registry as every_check
from django.db import connection
from django.db.backends.base import base
from django.test import override_settings

from durable_jobs import checks, kinds, transports
from durable_jobs.kinds import Done, Kind
from durable_jobs.testing import register_for_test
from durable_jobs.testing.transports import Gated
from tests.postgres import ROOT

CHECKS_PAGE = ROOT / "docs" / "checks.md"
CHECKS = Path(checks.__file__).read_text()
TASKS_BACKEND = (ROOT / "durable_jobs" / "tasks" / "backend.py").read_text()
SQLITE = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "jobs.sqlite3"}}
GOOD_OPTIONS = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL;",
}
PROJECT = """
SECRET_KEY = "x"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "durable_jobs"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
RUN_CHECKS = """
import json, sys
databases = json.loads(sys.argv[1])
import django
django.setup()
from django.core import checks as registry
from durable_jobs import checks
checks.register()
for message in registry.run_checks(tags=[checks.TAG], databases=databases):
    print(message.id, message.msg, message.hint, sep="\\n", end="\\n--\\n")
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The checks, and no kinds but a test's own: W005 would name the short leases of the others'."""
    checks.register()
    monkeypatch.setattr(kinds, "_kinds", {})


def told(*ids, databases=None):
    """The messages of these ids; without ids, every message of the package."""
    messages = registry.run_checks(tags=[checks.TAG], databases=databases)
    return [message for message in messages if not ids or message.id in ids]


def told_ids(databases=None):
    return {message.id for message in told(databases=databases)}


class Project:
    """A project of its own in a folder, checked by a process of its own."""

    def __init__(self, folder):
        self.folder = folder

    def check(self, settings, *, databases=(), files=None):
        """The messages of the package's checks by id."""
        for name, text in {"project_settings.py": PROJECT + settings, **(files or {})}.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        run = subprocess.run(
            [sys.executable, "-c", RUN_CHECKS, repr(list(databases)).replace("'", '"')],
            cwd=self.folder,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("DURABLE_JOBS")},
                "DJANGO_SETTINGS_MODULE": "project_settings",
                "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 0, run.stderr
        return {text.split("\n")[0]: text for text in run.stdout.split("\n--\n") if text}


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture
def options(monkeypatch):
    """Changes options of the jobs' database for this test; None takes one away."""

    def change(**values):
        changed = {**connection.settings_dict["OPTIONS"], **values}
        changed = {name: value for name, value in changed.items() if value is not None}
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", changed)

    return change


@pytest.fixture
def registered_kind():
    made = []

    def register(kind_class):
        kinds.register(kind_class)
        made.append(kind_class.name)
        return kind_class

    yield register
    for name in made:
        kinds.unregister(name)


class TestRegistration:
    def test_a_healthy_project_is_told_nothing(self):
        assert told() == []

    @pytest.mark.django_db
    def test_a_healthy_database_is_told_nothing(self):
        assert told(databases=["default"]) == []

    def test_registering_twice_tells_nothing_twice(self):
        checks.register()
        with override_settings(USE_TZ=False):
            assert len(told("durable_jobs.E006")) == 1

    def test_what_asks_the_database_has_djangos_tag(self):
        tagged = [check for check in every_check.get_checks() if checks.TAG in check.tags]
        assert len(tagged) == 9
        assert [check for check in tagged if Tags.database in check.tags] == [checks.check_running_database]

    @pytest.mark.parametrize("databases", [None, [], ["another"]])
    def test_without_leave_no_database_is_asked(self, databases):
        """No mark for the database: a query would fail this test."""
        assert checks.check_running_database(None, databases=databases) == []
        assert told_ids(databases) == set()


class TestSettings:
    @pytest.mark.parametrize("value", [None, [], "GRACE=5"])
    def test_e001_no_dictionary(self, value):
        with override_settings(DURABLE_JOBS=value):
            [error] = told()
        assert error.id == "durable_jobs.E001"
        assert error.is_serious()

    def test_e002_an_unknown_name(self):
        """C126."""
        with override_settings(DURABLE_JOBS={"GRASE": 5}):
            [error] = told()
        assert (error.id, error.hint) == ("durable_jobs.E002", "Did you mean 'GRACE'?")
        assert "'GRASE'" in error.msg
        assert error.is_serious()

    @pytest.mark.parametrize("value", [10**10, -1, 0, "20", True, float("nan"), float("inf"), None])
    def test_e003_a_wrong_value(self, value):
        """C029."""
        with override_settings(DURABLE_JOBS={"GRACE": value}):
            [error] = told()
        assert error.id == "durable_jobs.E003"
        assert "DURABLE_JOBS['GRACE']" in error.msg and "from 0.2 to 3,600" in error.msg
        assert repr(value) in error.msg
        assert error.is_serious()

    def test_e004_a_contradiction_names_both(self):
        """C126."""
        with override_settings(DURABLE_JOBS={"GRACE": 60, "UNKNOWN_KIND_GRACE": 30}):
            [error] = told()
        assert error.id == "durable_jobs.E004"
        assert "['UNKNOWN_KIND_GRACE'] = 30" in error.msg and "['GRACE'] = 60" in error.msg
        assert error.is_serious()

    @pytest.mark.parametrize("values", [{"TICK": 100}, {"NOTIFY_DEBOUNCE": 5}])
    def test_w002_a_doubtful_relation(self, values):
        with override_settings(DURABLE_JOBS=values):
            [warning] = told()
        assert warning.id == "durable_jobs.W002"
        assert not warning.is_serious()

    def test_a_command_does_not_start_with_a_wrong_setting(self):
        with (
            override_settings(DURABLE_JOBS={"TICK": "soon"}),
            pytest.raises(management.CommandError, match=r"durable_jobs\.E003"),
        ):
            management.call_command("check")

    def test_e006_naive_times(self):
        with override_settings(USE_TZ=False):
            [error] = told()
        assert error.id == "durable_jobs.E006"
        assert error.is_serious()


class TestKinds:
    def test_w005_a_lease_shorter_than_grace_names_both(self, registered_kind):
        """C126: grace > lease."""

        @registered_kind
        class Short(Kind):
            name = "tests.short_lease"
            lease_seconds = 5

            def step(self, ctx):
                return Done()

        [warning] = told("durable_jobs.W005")
        assert "kind tests.short_lease: lease_seconds = 5" in warning.msg
        assert "DURABLE_JOBS['GRACE'] = 20" in warning.msg
        with override_settings(DURABLE_JOBS={"GRACE": 5}):
            assert told("durable_jobs.W005") == []
        with override_settings(DURABLE_JOBS={"GRACE": "x"}):
            assert told_ids() == {"durable_jobs.E003"}


class TestSqliteOptions:
    pytestmark = pytest.mark.sqlite_only

    @pytest.mark.parametrize(
        ("missing", "line"),
        [
            ({"transaction_mode": None}, '"transaction_mode": "IMMEDIATE",'),
            ({"transaction_mode": "DEFERRED"}, '"transaction_mode": "IMMEDIATE",'),
            ({"timeout": None}, '"timeout": 20,'),
            ({"timeout": 19}, '"timeout": 20,'),
            ({"timeout": "20"}, '"timeout": 20,'),
            ({"init_command": None}, '"init_command": "PRAGMA journal_mode=WAL;",'),
            (
                {"init_command": "PRAGMA synchronous=FULL;"},
                '"init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",',
            ),
            (
                {"init_command": "PRAGMA journal_mode=DELETE"},
                '"init_command": "PRAGMA journal_mode=WAL; PRAGMA journal_mode=DELETE;",',
            ),
        ],
    )
    def test_w001_each_missing_option_gets_its_line(self, options, missing, line):
        options(**missing)
        [warning] = told()
        assert warning.id == "durable_jobs.W001"
        assert warning.hint.splitlines() == [
            'Put these lines into DATABASES["default"]["OPTIONS"]:',
            f"    {line}",
        ]

    @pytest.mark.parametrize(
        "right",
        [
            {"transaction_mode": "immediate"},
            {"transaction_mode": "EXCLUSIVE"},
            {"timeout": 60.0},
            {"init_command": "pragma journal_mode = 'wal'"},
        ],
    )
    def test_other_spellings_are_right(self, options, right):
        options(**right)
        assert told() == []


@pytest.mark.any_database
class TestProjects:
    """Each in a process of its own, with a database of its own."""

    def test_w001_its_lines_can_be_pasted(self, project):
        found = project.check(f"DATABASES = {SQLITE!r}")
        assert set(found) == {"durable_jobs.W001"}
        lines = [line for line in found["durable_jobs.W001"].splitlines() if line.startswith("    ")]
        assert len(lines) == 3
        pasted = (
            f"DATABASES = {SQLITE!r}\nDATABASES['default']['OPTIONS'] = {{\n" + "\n".join(lines) + "\n}\n"
        )
        assert set(project.check(pasted, databases=["default"])) == {"durable_jobs.W009"}

    def test_w009_a_database_that_was_not_migrated(self, project):
        """A `migrate` that is about to mend it is not told so; tests/test_newcomers.py has an older table."""
        settings = f"DATABASES = {SQLITE!r}\nDATABASES['default']['OPTIONS'] = {GOOD_OPTIONS!r}"
        found = project.check(settings, databases=["default"])
        assert set(found) == {"durable_jobs.W009"}
        assert "no table durable_jobs_" in found["durable_jobs.W009"]
        assert "Run manage.py migrate." in found["durable_jobs.W009"]
        about_to = f"{settings}\nimport sys\nsys.argv = ['manage.py', 'migrate']"
        assert project.check(about_to, databases=["default"]) == {}

    def test_a_database_in_memory_is_left_alone(self, project):
        memory = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
        assert project.check(f"DATABASES = {memory!r}", databases=["default"]) == {}

    def test_e011_a_zone_of_the_file_itself(self, project):
        settings = f"DATABASES = {SQLITE!r}\nDATABASES['default']['OPTIONS'] = {GOOD_OPTIONS!r}"
        found = project.check(f"{settings}\nDATABASES['default']['TIME_ZONE'] = 'Asia/Kathmandu'")
        assert set(found) == {"durable_jobs.E011"} and "Asia/Kathmandu" in found["durable_jobs.E011"]
        assert project.check(f"{settings}\nDATABASES['default']['TIME_ZONE'] = 'UTC'") == {}

    def test_w006_a_journal_mode_that_is_set_and_set_back(self, project):
        options = {**GOOD_OPTIONS, "init_command": "PRAGMA journal_mode=WAL; PRAGMA journal_mode=DELETE;"}
        settings = f"DATABASES = {SQLITE!r}\nDATABASES['default']['OPTIONS'] = {options!r}"
        assert project.check(settings) == {}
        found = project.check(settings, databases=["default"])
        assert set(found) == {"durable_jobs.W006", "durable_jobs.W009"}
        assert "'delete'" in found["durable_jobs.W006"]

    def test_e014_a_database_that_does_not_answer(self, project):
        nowhere = {
            "default": {**SQLITE["default"], "NAME": "/no/such/folder/db.sqlite3", "OPTIONS": GOOD_OPTIONS}
        }
        found = project.check(f"DATABASES = {nowhere!r}", databases=["default"])
        assert set(found) == {"durable_jobs.E014"}
        assert "unable to open database file" in found["durable_jobs.E014"]
        assert "NAME, HOST, PORT" in found["durable_jobs.E014"]

    def test_e005_users_in_another_database(self, project):
        found = project.check(
            f"""
DATABASES = {{
    alias: {{"ENGINE": "django.db.backends.sqlite3", "NAME": alias, "OPTIONS": {GOOD_OPTIONS!r}}}
    for alias in ("default", "people")
}}
DATABASE_ROUTERS = ["routers.People"]
""",
            files={
                "routers.py": """
                class People:
                    def db_for_write(self, model, **hints):
                        return "people" if model._meta.app_label == "auth" else None
                """
            },
        )
        assert set(found) == {"durable_jobs.E005"}
        assert "'default'" in found["durable_jobs.E005"] and "'people'" in found["durable_jobs.E005"]

    def test_users_and_jobs_in_another_database_together(self, project):
        found = project.check(
            f"""
DATABASES = {{
    "default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "default"}},
    "people": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "people", "OPTIONS": {GOOD_OPTIONS!r}}},
}}
DATABASE_ROUTERS = ["routers.People"]
""",
            databases=["default", "people"],
            files={
                "routers.py": """
                class People:
                    def db_for_write(self, model, **hints):
                        return "people"
                """
            },
        )
        assert set(found) == {"durable_jobs.W009"} and "'people'" in found["durable_jobs.W009"]

    def test_e007_a_database_of_another_vendor(self, project):
        """A backend that is SQLite in all but its name stands for MySQL, whose driver is not here."""
        found = project.check(
            "DATABASES = {'default': {'ENGINE': 'other_vendor', 'NAME': 'jobs.sqlite3'}}",
            databases=["default"],
            files={
                "other_vendor/__init__.py": "",
                "other_vendor/base.py": """
                from django.db.backends.sqlite3.base import DatabaseWrapper as Sqlite

                class DatabaseWrapper(Sqlite):
                    vendor = "mysql"
                    display_name = "MySQL"
                """,
            },
        )
        assert set(found) == {"durable_jobs.E007"}
        assert "MySQL" in found["durable_jobs.E007"]

    def test_e010_a_kind_that_was_registered_before_the_models_were_loaded(self, project):
        good = {"default": {**SQLITE["default"], "OPTIONS": GOOD_OPTIONS}}
        found = project.check(
            f"DATABASES = {good!r}\nINSTALLED_APPS += ['early']",
            files={
                "early/__init__.py": "",
                "early/models.py": """
                from durable_jobs.kinds import Done, Kind, StatusMirror, register

                @register
                class Import(Kind):
                    name = "early.import"
                    mirror = StatusMirror(
                        "early.NoSuchRun", open=("open",), redriven="open", completed="done", failed="failed",
                        cancelled="cancelled",
                    )

                    def step(self, ctx):
                        return Done()
                """,
            },
        )
        assert set(found) == {"durable_jobs.E010"}
        assert "kind early.import" in found["durable_jobs.E010"]
        assert "early.NoSuchRun" in found["durable_jobs.E010"]

    @pytest.mark.parametrize("name", ["runworker", "reconcile", "prune_jobs"])
    def test_w004_a_command_of_another_app(self, project, name):
        """F20."""
        good = {"default": {**SQLITE["default"], "OPTIONS": GOOD_OPTIONS}}
        found = project.check(
            f"DATABASES = {good!r}\nINSTALLED_APPS = ['channels_like', *INSTALLED_APPS]",
            files={
                "channels_like/__init__.py": "",
                "channels_like/management/__init__.py": "",
                "channels_like/management/commands/__init__.py": "",
                f"channels_like/management/commands/{name}.py": "",
            },
        )
        assert set(found) == {"durable_jobs.W004"}
        long_name = {"runworker": "worker", "reconcile": "reconcile", "prune_jobs": "prune"}[name]
        assert f"manage.py {name} is a command of 'channels_like'" in found["durable_jobs.W004"]
        assert f"manage.py durable_jobs {long_name} " in found["durable_jobs.W004"]


class TestVersions:
    @pytest.mark.sqlite_only
    def test_e008_an_old_sqlite(self, monkeypatch):
        monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
        [error] = told()
        assert error.id == "durable_jobs.E008"
        assert "3.34.1" in error.msg and "3.35 or later" in error.msg
        monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 35, 0))
        assert told() == []

    @pytest.mark.postgres_only
    @pytest.mark.django_db(transaction=True)
    def test_e009_a_server_older_than_jobs_need(self, monkeypatch):
        monkeypatch.setattr(checks, "OLDEST_POSTGRESQL", 99)
        [error] = told(databases=["default"])
        assert error.id == "durable_jobs.E009"
        assert "PostgreSQL 99 or later" in error.msg

    @pytest.mark.postgres_only
    @pytest.mark.django_db(transaction=True)
    def test_e009_a_server_older_than_django_accepts(self, monkeypatch):
        connection.close()
        monkeypatch.setattr(connection.features, "minimum_database_version", (99,))
        monkeypatch.setattr(base, "RAN_DB_VERSION_CHECK", set())  # Django asks once per process
        try:
            messages = told(databases=["default"])
        finally:
            connection.close()
        [error] = messages
        assert error.id == "durable_jobs.E009"
        assert "PostgreSQL 99 or later is required" in error.msg


class TestIsolation:
    pytestmark = pytest.mark.postgres_only

    @pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
    def test_w003_a_stricter_level_in_the_options(self, options, level):
        from psycopg import IsolationLevel

        options(isolation_level=IsolationLevel[level])
        [warning] = told()
        assert warning.id == "durable_jobs.W003"
        assert level in warning.msg

    def test_read_committed_in_the_options(self, options):
        from psycopg import IsolationLevel

        options(isolation_level=IsolationLevel.READ_COMMITTED)
        assert told() == []

    @pytest.mark.django_db(transaction=True)
    def test_w003_a_stricter_level_on_the_server(self):
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_isolation TO 'repeatable read'")
            try:
                [warning] = told(databases=["default"])
            finally:
                cursor.execute("RESET default_transaction_isolation")
        assert warning.id == "durable_jobs.W003"
        assert "repeatable read" in warning.msg


class TestScopes:
    @pytest.mark.parametrize("name", ["SCOPE_FROM_REQUEST", "ADMIN_SCOPES"])
    @pytest.mark.parametrize(
        ("path", "problem"),
        [
            ("gone.scope", "cannot be imported"),
            ("tests.models.gone", "cannot be imported"),
            ("tests.test_checks.SQLITE", "cannot be called"),
        ],
    )
    def test_e012_a_function_that_is_not_there(self, name, path, problem):
        with override_settings(DURABLE_JOBS={name: path}):
            [error] = told("durable_jobs.E012")
        assert f"DURABLE_JOBS['{name}'] is '{path}', which {problem}" in error.msg

    @pytest.mark.parametrize("function", [None, len, "durable_jobs.access.scope_of"])
    def test_a_function_that_is_there(self, function):
        with override_settings(DURABLE_JOBS={"SCOPE_FROM_REQUEST": function}):
            assert told("durable_jobs.E012") == []


class TestTransport:
    @pytest.fixture
    def celery(self):
        from tests.brokers.app import app

        before = dict(broker_url=app.conf.broker_url, broker_transport_options={})
        app.set_default()
        with override_settings(DURABLE_JOBS={"TRANSPORT": "celery"}):
            yield app
        app.conf.update(before)

    @pytest.mark.parametrize(
        ("name", "path"), [("memory", None), ("celery", "durable_jobs.transports.gone.Transport")]
    )
    def test_e013_a_transport_that_cannot_be_used(self, name, path, monkeypatch):
        monkeypatch.setattr(transports, "_made", {})
        if path:
            monkeypatch.setitem(transports.PATHS, name, path)
        with override_settings(DURABLE_JOBS={"TRANSPORT": name}, DEBUG=False):
            [error] = told("durable_jobs.E013")
        assert error.is_serious() and repr(name) in error.msg

    def test_one_for_tests_is_fine_with_debug(self):
        with override_settings(DURABLE_JOBS={"TRANSPORT": "memory"}, DEBUG=True):
            assert checks.check_transport() == []

    def test_w007_no_app_has_a_broker(self, celery):
        celery.conf.broker_url = "redis://127.0.0.1:1/0"
        assert checks.check_transport() == []
        celery.conf.broker_url = None
        [warning] = told("durable_jobs.W007")
        assert "broker_url" in warning.msg

    def test_w008_a_visibility_timeout_shorter_than_two_slices(self, celery):
        celery.conf.update(
            broker_url="redis://127.0.0.1:1/0", broker_transport_options={"visibility_timeout": 5}
        )
        with register_for_test(Gated):
            [warning] = told("durable_jobs.W008")
        assert "5 s" in warning.msg and "visibility_timeout" in warning.hint


class TestPage:
    def test_every_id_is_explained_and_every_explained_id_exists(self):
        code = set(re.findall(r"durable_jobs\.[EW]\d{3}", CHECKS + TASKS_BACKEND))
        page = set(re.findall(r"^### durable_jobs\.([EW]\d{3})\b", CHECKS_PAGE.read_text(), re.MULTILINE))
        assert {id.removeprefix("durable_jobs.") for id in code} == page

    def test_every_id_is_triggered_by_a_test(self):
        code = set(re.findall(r"durable_jobs\.([EW]\d{3})", CHECKS))
        tests = set(re.findall(r"def test_([ew]\d{3})_", Path(__file__).read_text()))
        assert {id.lower() for id in code} == tests
