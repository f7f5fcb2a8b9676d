"""How the statements find their rows in a table of 65,000, with and without the planner's statistics."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import ProgrammingError, connection, transaction

from durable_jobs import database, store
from durable_jobs.models import Scope, uuid7
from durable_jobs.store import Lease, Probe
from tests.store.rows import CLAIMER, GRACE, execute, make

pytestmark = pytest.mark.django_db

SCHEDULED, FINISHED, FLOOD = 50_000, 10_000, 5_000
SCOPE = Scope("acme")

ROUTES = [("main", f"k{number}", priority) for number in range(4) for priority in (-10, 0, 10)]
PROBES = [Probe(queue, kind, priority, None, 30.0) for queue, kind, priority in ROUTES]


class Block(transaction.Atomic):
    """A transaction that counts as a test's own, so that the store opens its own within."""

    def __init__(self) -> None:
        super().__init__(database.alias(), savepoint=True, durable=False)
        self._from_testcase = True

    def __exit__(self, *error: Any) -> None:
        transaction.set_rollback(True, using=self.using)
        super().__exit__(*error)


@pytest.fixture(scope="module", autouse=True, params=["without statistics", "with statistics"])
def crowd(request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """50,000 scheduled for tomorrow, 10,000 ended, 5,000 due of a kind that nobody here knows, few others."""
    with django_db_blocker.unblock():
        with Block():
            forget_statistics()
            fill()
            if request.param == "with statistics":
                execute("ANALYZE")
            yield
        # A table's size as ANALYZE noted it outlives the rollback there.
        if connection.vendor == "postgresql":
            execute("ANALYZE")


def forget_statistics() -> None:
    """As on a new table; what earlier tests left there would decide the plans. SQLite has none by itself."""
    if connection.vendor == "postgresql":
        execute("TRUNCATE durable_jobs_job")
        with contextlib.suppress(ProgrammingError), transaction.atomic():  # a superuser may
            execute("DELETE FROM pg_statistic WHERE starelid = 'durable_jobs_job'::regclass")


def fill() -> None:
    """The crowd: rows with the required columns only, made by the database itself."""
    if connection.vendor == "postgresql":
        series, key, now, day = (
            "generate_series(1, {}) AS s(n)",
            "gen_random_uuid()",
            "now()",
            "interval '1 day'",
        )
        later, earlier = f"{now} + {day} + n * interval '1 s'", f"{now} - {day} - n * interval '1 s'"
        pick = "(ARRAY['k0','k1','k2','k3'])[1 + n % 4]"
    else:
        series = (
            "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {}) SELECT n FROM s)"
        )
        key = "lower(hex(randomblob(16)))"
        now = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
        later = "strftime('%Y-%m-%d %H:%M:%f', 'now', '+1 day', '+' || n || ' seconds')"
        earlier = "strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 day', '-' || n || ' seconds')"
        pick = "'k' || (n % 4)"

    def rows(count: int, **columns: str) -> None:
        names, values = ", ".join(columns), ", ".join(columns.values())
        insert(
            f"INSERT INTO durable_jobs_job (id, {names}) SELECT {key}, {values} FROM {series.format(count)}"
        )

    waiting = {
        "status": "'pending'",
        "pending_since": now,
        "priority": "n % 3 * 10 - 10",
        "tenant_id": "'acme'",
    }
    ended = {"status": "'completed'", "finished_at": earlier, "tenant_id": "'acme'", "queue_name": "'main'"}
    running = {
        "kind": "'k1'", "status": "'running'", "queue_name": "'main'", "tenant_id": "'acme'",
        "attempts": "1", "lease_epoch": "1", "started_at": earlier, "lease_owner": "'w' || (n % 5)",
    }  # fmt: skip
    rows(SCHEDULED, kind=pick, queue_name="'main'", next_run_at=later, **waiting)
    rows(FINISHED, kind=pick, attempts="1", lease_epoch="1", **ended)
    rows(FLOOD, kind="'unknown'", queue_name="'main'", next_run_at=earlier, **waiting)
    rows(24, kind="'k1'", queue_name="'main'", next_run_at=earlier, **waiting)
    rows(40, lease_expires_at=later, **running)
    rows(5, lease_expires_at=earlier, **running)
    rows(6, cancel_requested_at=earlier, kind=pick, queue_name="'main'", next_run_at=later, **waiting)


def insert(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


# --- what a statement does --------------------------------------------------------------------------------


class Work:
    """What one run of a statement cost: index names, rows looked at (PostgreSQL), steps (SQLite)."""

    def __init__(self) -> None:
        self.indexes: set[str] = set()
        self.scans: set[str] = set()
        self.looked_at = 0
        self.sorts = 0

    def read(self, node: dict[str, Any]) -> None:
        if "Index Name" in node:
            self.indexes.add(node["Index Name"])
        if node["Node Type"] == "Seq Scan":
            self.scans.add(node["Relation Name"])
        if "Scan" in node["Node Type"]:
            rows = sum(
                node.get(name, 0)
                for name in ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
            )
            self.looked_at += int(rows * node["Actual Loops"])
        for child in node.get("Plans", []):
            self.read(child)


def work_of(act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Work:
    """Run the act with every statement explained first (PostgreSQL: explained and analysed in its place)."""
    work = Work()

    def explain(self: database.Statement, connection: Any, **values: Any) -> list[Any]:
        sql, names = self._build(connection.vendor)
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                arguments = {name: database._adapt_postgresql(values[name]) for name in names}
                cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", arguments)
                ((plan,),) = cursor.fetchall()
                work.read((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"])
                return []
            arguments = {name: database._adapt_sqlite(values[name]) for name in names}
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}", arguments)
            for *_, detail in cursor.fetchall():
                words = detail.split()
                if "INDEX" in words:
                    work.indexes.add(words[words.index("INDEX") + 1])
                elif words[0] == "SCAN" and words[1] in ("durable_jobs_job", "c", "a"):
                    work.scans.add("durable_jobs_job")
                work.sorts += "TEMP B-TREE" in detail

            def step() -> None:
                work.looked_at += 1

            connection.connection.set_progress_handler(step, 100)
            try:
                cursor.execute(sql, arguments)
                return cursor.fetchall()
            finally:
                connection.connection.set_progress_handler(None, 0)

    with monkeypatch.context() as patch:
        patch.setattr(database.Statement, "run", explain)
        act()
    return work


KEY = "durable_jobs_job_pkey"


STATEMENTS: dict[str, tuple[Callable[[], Any], str, int]] = {
    # the call, an index that it must use, and how many rows (SQLite: hundreds of steps) it may look at
    "claim_next(1)": (lambda: store.claim_next(CLAIMER, 1, PROBES), "durable_jobs_ready", 200),
    "claim_next(1) of one place": (
        lambda: store.claim_next(CLAIMER, 1, [probe for probe in PROBES if probe[:3] == ("main", "k1", 0)]),
        "durable_jobs_ready",
        200,
    ),
    "claim_next(8)": (lambda: store.claim_next(CLAIMER, 8, PROBES), "durable_jobs_ready", 300),
    "claim_next, nothing due": (
        lambda: store.claim_next(CLAIMER, 8, [probe for probe in PROBES if probe.kind != "k1"]),
        "durable_jobs_ready", 200,
    ),
    "is_due": (lambda: store.is_due(PROBES), "durable_jobs_ready", 200),
    "is_due, nothing due": (
        lambda: store.is_due([probe for probe in PROBES if probe.kind != "k1"]), "durable_jobs_ready", 200,
    ),
    "routes": (lambda: store.routes(), "durable_jobs_ready", 200),
    "orphans": (lambda: store.orphans(GRACE), "durable_jobs_running", 300),
    "strangers": (lambda: store.strangers("w1", [uuid7()]), "durable_jobs_running", 300),
    "asked_to_stop": (lambda: store.asked_to_stop("w1"), "durable_jobs_cancelling", 300),
    "dead_leases": (lambda: store.dead_leases("w1"), "durable_jobs_running", 300),
    "leased": (lambda: store._LEASED.run(connection, queue="", kind="", tenant=""), "durable_jobs_running", 300),
    "cancelling": (lambda: store.cancelling(), "durable_jobs_cancelling", 200),
    "unfinished": (lambda: store.unfinished(["main"], ["k0"]), "", SCHEDULED),
    "unfinished in any queue": (lambda: store.unfinished(None, ["k0", "k2"]), "", SCHEDULED),
    "by_lock_key": (lambda: store.by_lock_key("l", SCOPE), "durable_jobs_one_live", 20),
    "by_idempotency_key": (
        lambda: store.by_idempotency_key("k1", "k", SCOPE), "durable_jobs_idempotency", 20,
    ),
    "beat_many": (lambda: store.beat_many("w1", [Lease(uuid7(), "w1", 1, 9.0) for _ in range(9)]), "", 200),
    "claim": (lambda: store.claim(uuid7(), 0, 0, "w1", 9), "", 20),
    "announce": (
        lambda: store.announce(store.Route("main", "k1", 0, 0.0), reach=60, ttl=900, limit=100),
        "durable_jobs_ready", 200,
    ),
    "write_checkpoint": (lambda: store.write_checkpoint(Lease(uuid7(), "w1", 1, 9)), "", 20),
    "mailed": (lambda: store.mailed(), "", 60),
}  # fmt: skip


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_walks_only_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P-E, C107: scheduled rows, ended rows and due rows of unknown kinds cost nothing."""
    act, index, limit = STATEMENTS[name]
    work = work_of(act, monkeypatch)
    assert "durable_jobs_job" not in work.scans, f"{name} reads the whole table ({work.looked_at})"
    if index:
        assert index in work.indexes, f"{name} uses {work.indexes}"
    assert work.looked_at <= limit, f"{name} looked at {work.looked_at}"


def test_the_crowd_is_where_the_tests_think() -> None:
    assert {route[:3] for route in store.routes()} >= {*ROUTES, ("main", "unknown", 10)}
    assert len(store.orphans(GRACE)) == 5
    claimed = store.claim_next(CLAIMER, 32, PROBES)
    assert [one.job.priority for one in claimed] == [10] * 8 + [0] * 8 + [-10] * 8


@pytest.mark.parametrize("target", [{"kind": "unknown"}, {"queue_name": "main"}, {}], ids=str)
def test_a_paused_backlog_costs_nothing(target: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of a whole queue or kind is seen before its rows are walked."""
    names = {"queue_name": "queue"}
    store.pause(**{names.get(name, name): value for name, value in target.items()}, reason="r", actor="a")
    flood = [Probe("main", "unknown", priority, None, 30.0) for priority in (-10, 0, 10)]
    for act in (lambda: store.claim_next(CLAIMER, 8, flood), lambda: store.is_due(flood)):
        work = work_of(act, monkeypatch)
        assert work.looked_at <= 200, work.looked_at
    assert store.claim_next(CLAIMER, 8, flood) == []
    assert not store.is_due(flood)


def test_one_due_row_behind_the_crowd_is_found() -> None:
    """Nobody waits unseen: behind 50,000 scheduled and 5,000 due of an unknown kind."""
    job_id = make("pending", queue_name="zebra", kind="k3", priority=-100)
    route = next(route for route in store.routes() if route.queue == "zebra")
    claimed = store.claim_next(CLAIMER, 8, [Probe(*route[:3], None, 30.0)])
    assert [one.job.id for one in claimed] == [job_id]
