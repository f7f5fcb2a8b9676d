"""What somebody meets on the first day: each error says what to do. `make test-wheel` meets them in empty projects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.core.management import BaseCommand, CommandError, call_command
from django.db import DatabaseError, OperationalError, connection, transaction

from durable_jobs import database, explain, kinds, overview
from durable_jobs.database import Statement
from durable_jobs.exceptions import UnknownKind
from durable_jobs.models import Job
from durable_jobs.testing import make_job
from durable_jobs.worker import EXIT_NO_DATABASE, EXIT_NOT_MIGRATED, Worker
from tests.admin.conftest import ALL, logged_in, make_user, url
from tests.processes import Processes


def test_a_misspelt_kind_is_told_the_right_name_and_where_kinds_are_looked_for() -> None:
    said = str(UnknownKind("shop.gret", ["shop.greet", "shop.ship"], ["jobs", "work.kinds"]))
    assert "kind 'shop.gret' is not registered in this process" in said
    assert "Did you mean 'shop.greet'? Known here: shop.greet, shop.ship." in said
    assert (
        "@register in jobs.py or work/kinds.py (DURABLE_JOBS['DISCOVER']) of an app in INSTALLED_APPS" in said
    )


def test_a_kind_that_nothing_resembles_gets_no_guess() -> None:
    said = str(UnknownKind("shop.greet", ["billing.charge"]))
    assert "Did you mean" not in said and "Known here: billing.charge." in said
    assert "No kind is known here." in str(UnknownKind("shop.greet"))


@pytest.mark.django_db
def test_a_statement_without_its_tables_says_migrate() -> None:
    statement = Statement("SELECT 1 FROM durable_jobs_of_tomorrow", types={})
    with pytest.raises(DatabaseError) as caught, transaction.atomic():
        statement.run(connection)
    assert caught.value.__notes__ == [
        "The database 'default' has no tables for jobs: run manage.py migrate first."
    ]


@pytest.mark.django_db
def test_the_projects_own_missing_table_is_not_ours_to_explain() -> None:
    with pytest.raises(DatabaseError) as caught, transaction.atomic():
        Statement("SELECT 1 FROM shop_order_of_tomorrow", types={}).run(connection)
    assert not hasattr(caught.value, "__notes__")


LACKS = "The tables for jobs in the database 'default' lack a column: run manage.py migrate first."


@pytest.fixture
def older_tables(db: None) -> None:
    """The tables of a release that had not yet one of the columns, until the test's transaction is undone."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE durable_jobs_job RENAME COLUMN progress_message TO of_tomorrow")


@pytest.mark.usefixtures("older_tables")
@pytest.mark.parametrize(
    "act",
    [
        lambda: Statement("SELECT of_yesterday FROM durable_jobs_job", types={}).run(connection),
        lambda: list(Job.objects.all()),
        lambda: Statement("UPDATE durable_jobs_job SET of_yesterday = 1", types={}).count(connection),
    ],
)
def test_an_upgrade_without_its_migration_says_migrate(act: Callable[[], object]) -> None:
    with pytest.raises(DatabaseError) as caught, transaction.atomic():
        act()
    assert caught.value.__notes__ == [LACKS]


@pytest.mark.usefixtures("older_tables")
def test_commands_and_workers_say_migrate_after_an_upgrade_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (
        pytest.raises(CommandError, match="lack a column: run manage"),
        transaction.atomic(),
    ):
        call_command("durable_jobs", "list")
    assert Worker()._examine_database() == EXIT_NOT_MIGRATED
    column = "no column durable_jobs_job.progress_message"
    assert f"{column}: run manage.py migrate first" in capsys.readouterr().err


@pytest.mark.usefixtures("older_tables")
def test_the_screens_and_the_health_check_say_migrate_after_an_upgrade_without_it() -> None:
    user = make_user("anna", *ALL)
    for page in ("changelist", "overview"):
        with pytest.raises(DatabaseError) as caught, transaction.atomic():
            logged_in(user).get(url(page))
        assert caught.value.__notes__ == [LACKS]
    with transaction.atomic():
        (problem,) = [check for check in overview.health().checks if not check.ok]
        transaction.set_rollback(True)
    assert problem.way_out == LACKS


@pytest.mark.django_db
def test_the_projects_own_missing_column_is_not_ours_to_explain() -> None:
    assert database.not_migrated(DatabaseError("no such column: shop_order.state")) == ""
    assert database.lacking(connection) == ""


@pytest.mark.django_db
def test_a_job_that_no_worker_sees_names_the_database_to_compare() -> None:
    (reason,) = explain.explain(make_job(kind=kinds.names()[0]))
    assert reason.code == "no_worker" and "manage.py runworker --queues" in reason.way_out
    name = str(connection.settings_dict["NAME"]).rpartition("/")[2]
    assert f"another database than {name}" in reason.way_out


@pytest.mark.django_db
def test_a_job_of_a_kind_that_is_not_found_says_so_without_a_worker_too() -> None:
    assert [reason.code for reason in explain.explain(make_job(kind="shop.gone"))] == [
        "no_worker",
        "unknown_kind",
    ]


@pytest.mark.django_db
def test_a_worker_says_who_waits_for_a_kind_that_it_lacks(processes: Processes) -> None:
    make_job(kind="worker.quick")
    worker = processes.manage("runworker", "--until-idle", settings={"DISCOVER": []})
    assert worker.wait(60) == 0, worker.output
    assert "unknown_kind kind=worker.quick: kind 'worker.quick' is not registered" in worker.output
    assert f"database={database.place(connection)}" in worker.output


@pytest.mark.django_db
def test_a_worker_without_kinds_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kinds, "_kinds", {})
    Worker()._tell_of_missing_kinds()
    assert "no_kinds: Kinds are classes with @register in jobs.py" in caplog.text


def test_checks_that_cannot_ask_the_database_end_a_worker_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Django 6.1 asks SQLite in a check, before the worker can."""

    def away(*args: object, **options: object) -> None:
        raise OperationalError("unable to open database file")

    monkeypatch.setattr(BaseCommand, "check", away)
    with pytest.raises(CommandError, match="The database 'default' fails: unable to open") as caught:
        call_command("runworker", skip_checks=False)
    assert caught.value.returncode == EXIT_NO_DATABASE
