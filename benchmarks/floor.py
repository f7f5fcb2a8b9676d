"""The floor: bare loops over the jobs' own table, with the driver alone and the statements that the work needs.

Claim and completion write the columns that a claim and a completion must write (the table's CHECKs demand most
of them), fenced by owner and epoch, and fetch what a step needs. Nothing renews a lease, listens, repairs or logs.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any

OWNER = "floor"
LONGEST = 10.0
"""Seconds after which a floor is measured well enough, however slow the disk is."""
KIND, MIRRORED, HOOKED = "bench.noop", "bench.mirrored", "bench.hooked"
KIND_OF = {"mirrored": MIRRORED, "hooked": HOOKED, "updated": HOOKED}

TAKE = """status = 'running', lease_owner = 'floor', lease_epoch = lease_epoch + 1, attempts = attempts + 1,
    heartbeat_at = {now}, claimed_at = {now}, lease_expires_at = {later}, processed_at_claim = processed_count,
    started_at = coalesce(started_at, {now}), pending_since = NULL, next_run_at = NULL, updated_at = {now}"""
END = """status = 'completed', lease_owner = NULL, lease_expires_at = {now}, finished_at = {now},
    updated_at = {now}, domain_mirrored_at = {now}, error_class = NULL, error_code = NULL, error_type = NULL,
    error_message = NULL, result = NULL"""
FENCE = "status = 'running' AND lease_owner = 'floor' AND verdict IS NULL"

PG = {"now": "clock_timestamp()", "later": "clock_timestamp() + interval '60 seconds'"}
LITE = {
    "now": "strftime('%Y-%m-%d %H:%M:%f','now')||'000'",
    "later": "strftime('%Y-%m-%d %H:%M:%f','now','+60 seconds')||'000'",
}
READ = "id, kind, lease_epoch, input, checkpoint, meta, priority, continuation_seq, attempts"


def pg_claim(size: int, kind: str = KIND) -> str:
    return f"""UPDATE durable_jobs_job SET {TAKE.format(**PG)} WHERE id = ANY(ARRAY(
        SELECT id FROM durable_jobs_job WHERE queue_name = 'bench' AND kind = '{kind}' AND priority = 0
            AND next_run_at IS NOT NULL AND next_run_at <= statement_timestamp()
        ORDER BY next_run_at LIMIT {size} FOR NO KEY UPDATE SKIP LOCKED)) RETURNING {READ}"""


PG_COMPLETE = f"""UPDATE durable_jobs_job SET {END.format(**PG)}
    WHERE id = %s::uuid AND lease_epoch = %s::bigint AND {FENCE} RETURNING id"""
PG_COMPLETE_MANY = f"""UPDATE durable_jobs_job j SET {END.format(**PG)}
    FROM unnest(%s::uuid[], %s::bigint[]) AS m(mine, epoch)
    WHERE j.id = m.mine AND j.lease_epoch = m.epoch AND {FENCE} RETURNING j.id"""
PG_MIRROR = "UPDATE benchmarks_thing SET status = 'done' WHERE id = %s::uuid AND status = 'open'"


def lite_claim(size: int, kind: str = KIND) -> str:
    return f"""UPDATE durable_jobs_job SET {TAKE.format(**LITE)} WHERE id IN (
        SELECT id FROM durable_jobs_job WHERE queue_name = 'bench' AND kind = '{kind}' AND priority = 0
            AND next_run_at IS NOT NULL AND next_run_at <= {LITE["now"]} ORDER BY next_run_at LIMIT {size})
        RETURNING {READ}"""


LITE_COMPLETE = f"""UPDATE durable_jobs_job SET {END.format(**LITE)}
    WHERE id = ? AND lease_epoch = ? AND {FENCE} RETURNING id"""
LITE_MIRROR = "UPDATE benchmarks_thing SET status = 'done' WHERE id = ? AND status = 'open'"


def parameters() -> dict[str, Any]:
    from django.db import connection

    return connection.get_connection_params()


def connect(autocommit: bool = True) -> Any:
    import psycopg

    given = {**parameters(), "autocommit": autocommit}
    given.pop("cursor_factory", None)
    connection = psycopg.connect(**given)
    connection.prepare_threshold = 0
    return connection


def postgresql(*, threads: int, batch: int, end: str) -> dict[str, float]:
    """Drain with `threads`, each claiming `batch` at a time and ending them `one`, `many` or with a hook.

    `updated`: the hook is what a project writes, a `QuerySet.update` in `atomic()`.
    """

    until = time.perf_counter() + LONGEST

    def drain(connection: Any, done: list[int]) -> None:
        claim = pg_claim(batch, KIND_OF.get(end, KIND))
        while True:
            claimed = connection.execute(claim).fetchall()
            if not claimed or time.perf_counter() > until:
                return
            if end == "many":
                ids, epochs = [row[0] for row in claimed], [row[2] for row in claimed]
                assert len(connection.execute(PG_COMPLETE_MANY, [ids, epochs]).fetchall()) == len(claimed)
            elif end == "updated":
                for row in claimed:
                    complete_by_django(row)
            elif end in KIND_OF:
                for row in claimed:
                    with connection.transaction():
                        assert connection.execute(PG_COMPLETE, [row[0], row[2]]).fetchall()
                        assert connection.execute(PG_MIRROR, [row[0]]).rowcount == 1
            else:
                for row in claimed:
                    assert connection.execute(PG_COMPLETE, [row[0], row[2]]).fetchall()
            done.append(len(claimed))

    return timed(drain, connect, threads)


def complete_by_django(row: Any) -> None:
    from django.db import connection, transaction

    from benchmarks.models import Thing

    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(PG_COMPLETE, [row[0], row[2]])
            assert cursor.fetchall()
        assert Thing.objects.filter(pk=row[0], status="open").update(status="done") == 1


def postgresql_crowd(*, processes: int, **arguments: Any) -> dict[str, Any]:
    """The same in several processes."""
    from benchmarks import harness

    with harness.Busy() as busy:
        parts = harness.crowd("benchmarks.floor", "postgresql", arguments, processes)
    jobs, took = sum(part["jobs"] for part in parts), max(part["took"] for part in parts)
    used = sum(part["cpu_us_per_job"] * part["jobs"] for part in parts) / jobs
    return {"value": jobs / took, "jobs": jobs, "cpu_us_per_job": used, "busy": busy.share()}


def postgresql_in_one(*, batch: int = 1) -> dict[str, float]:
    """One thread: complete what was claimed and claim the next in one transaction."""

    until = time.perf_counter() + LONGEST

    def drain(connection: Any, done: list[int]) -> None:
        claim, held = pg_claim(batch), []
        while True:
            with connection.transaction():
                for row in held:
                    assert connection.execute(PG_COMPLETE, [row[0], row[2]]).fetchall()
                done.append(len(held))
                held = connection.execute(claim).fetchall()
            if not held or time.perf_counter() > until:
                return

    return timed(drain, connect, 1)


def lite_connect() -> Any:
    from django.db import connection

    made = sqlite3.connect(
        connection.settings_dict["NAME"], timeout=20, isolation_level=None, check_same_thread=False
    )
    made.execute("PRAGMA journal_mode=WAL")
    made.execute("PRAGMA synchronous=FULL")
    return made


def sqlite(*, batch: int, end: str) -> dict[str, float]:
    """One thread: claim `batch`, end them `one` by one, `many` in the transaction of the next claim,
    or with a hook."""

    until = time.perf_counter() + LONGEST

    def drain(connection: Any, done: list[int]) -> None:
        claim, held = lite_claim(batch, KIND_OF.get(end, KIND)), []
        while True:
            if end == "many":
                connection.execute("BEGIN IMMEDIATE")
                for row in held:
                    assert connection.execute(LITE_COMPLETE, [row[0], row[2]]).fetchall()
            done.append(len(held))
            held = connection.execute(claim).fetchall()
            if end == "many":
                connection.execute("COMMIT")
            if not held or time.perf_counter() > until:
                return
            if end == "one":
                for row in held:
                    assert connection.execute(LITE_COMPLETE, [row[0], row[2]]).fetchall()
            elif end in KIND_OF:
                for row in held:
                    connection.execute("BEGIN IMMEDIATE")
                    assert connection.execute(LITE_COMPLETE, [row[0], row[2]]).fetchall()
                    assert connection.execute(LITE_MIRROR, [row[0]]).rowcount == 1
                    connection.execute("COMMIT")

    return timed(drain, lite_connect, 1)


def sqlite_with_writer(*, threads: int, batch: int = 50) -> dict[str, Any]:
    """`threads` take jobs in hand; one more writes: the ends of what they are done with, and the next claim."""
    connection = lite_connect()
    claim, until = lite_claim(batch), time.perf_counter() + LONGEST
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        while (row := todo.get()) is not None:
            done.put((row[0], row[2]))

    def write() -> int:
        jobs = out = 0
        more = True
        while True:
            # Two batches are out: the threads have one while the other is written.
            ends = [done.get() for _ in range(min(batch, out - batch if more else out))]
            connection.execute("BEGIN IMMEDIATE")
            for end in ends:
                assert connection.execute(LITE_COMPLETE, end).fetchall()
            claimed = connection.execute(claim).fetchall() if time.perf_counter() < until else []
            connection.execute("COMMIT")
            for row in claimed:
                todo.put(row)
            out += len(claimed) - len(ends)
            jobs += len(ends)
            more = bool(claimed)
            if not out:
                return jobs

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    begun, processor = time.perf_counter(), time.process_time()
    jobs = write()
    took, used = time.perf_counter() - begun, time.process_time() - processor
    for _ in running:
        todo.put(None)
    for thread in running:
        thread.join()
    return {"value": jobs / took, "jobs": jobs, "took": took, "cpu_us_per_job": used / jobs * 1e6}


def timed(drain: Callable[[Any, list[int]], None], connect: Callable[[], Any], threads: int) -> Any:
    done: list[int] = []
    connections = [connect() for _ in range(threads)]
    running = [threading.Thread(target=drain, args=(one, done)) for one in connections]
    begun, processor = time.perf_counter(), time.process_time()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    took, used = time.perf_counter() - begun, time.process_time() - processor
    jobs = sum(done)
    return {"value": jobs / took, "jobs": jobs, "took": took, "cpu_us_per_job": used / jobs * 1e6}
