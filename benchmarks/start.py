"""`make bench-start`: jobs started a second, one by one, 10,000 at once, and by eight clients, against a bare insert."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks import floor, harness
from benchmarks.drain import INPUT, fill
from benchmarks.harness import Contestant, Goal

COLUMNS = """id, kind, status, tenant_id, queue_name, input, input_sha256, priority, created_at, updated_at,
    next_run_at, pending_since"""


NOW = "clock_timestamp()"


def bare(*, jobs: int, many: bool = False) -> dict[str, Any]:
    """Insert the same rows with the driver alone."""
    from django.db import connection

    from durable_jobs.jsontext import sha256
    from durable_jobs.models import uuid7

    digest, lite = sha256(INPUT), connection.vendor == "sqlite"
    now = floor.LITE["now"] if lite else NOW
    mark = "?" if lite else "%s"
    one = f"""INSERT INTO durable_jobs_job ({COLUMNS}) VALUES ({mark}, 'bench.noop', 'pending', 'default', 'bench',
        {mark}, '{digest}', 0, {now}, {now}, {now}, {now}) ON CONFLICT DO NOTHING RETURNING id"""

    def work(share: int) -> None:
        raw = floor.lite_connect() if lite else floor.connect()
        if not many:
            for _ in range(share):
                raw.execute(one, [uuid7().hex, INPUT]).fetchall()
            return
        rows = [(uuid7().hex, INPUT) for _ in range(share)]
        # As many rows in a transaction as `start_many` puts there.
        for begin in range(0, share, 500):
            if lite:
                raw.execute("BEGIN IMMEDIATE")
                raw.executemany(one.replace("RETURNING id", ""), rows[begin : begin + 500])
                raw.execute("COMMIT")
                continue
            part = json.dumps([{"id": row[0], "input": row[1]} for row in rows[begin : begin + 500]])
            raw.execute(
                f"""INSERT INTO durable_jobs_job ({COLUMNS}) SELECT r.id, 'bench.noop', 'pending', 'default',
                    'bench', r.input, '{digest}', 0, {now}, {now}, {now}, {now}
                FROM json_to_recordset(%s) AS r(id uuid, input text)
                ON CONFLICT DO NOTHING RETURNING id""",
                [part],
            ).fetchall()

    return timed(work, jobs)


def bare_crowd(*, jobs: int, clients: int, told: bool) -> dict[str, Any]:
    """Clients that are processes, each with a bare insert and, if `told`, a NOTIFY in its transaction."""
    return crowd("bare_client", {"jobs": jobs // clients, "told": told}, clients)


def bare_client(*, jobs: int, told: bool) -> float:
    from durable_jobs.jsontext import sha256
    from durable_jobs.models import uuid7

    raw = floor.connect(autocommit=False)
    one = f"""INSERT INTO durable_jobs_job ({COLUMNS}) VALUES (%s, 'bench.noop', 'pending', 'default', 'bench',
        %s, '{sha256(INPUT)}', 0, {NOW}, {NOW}, {NOW}, {NOW}) ON CONFLICT DO NOTHING RETURNING id"""
    begun = time.perf_counter()
    for _ in range(jobs):
        raw.execute(one, [uuid7().hex, INPUT]).fetchall()
        if told:
            raw.execute("SELECT pg_notify('durable_jobs', '[]')")
        raw.commit()
    return time.perf_counter() - begun


def durable_crowd(*, jobs: int, clients: int, told: bool) -> dict[str, Any]:
    """Clients that are processes; with `told=False` nobody is notified."""
    return crowd("durable_client", {"jobs": jobs // clients, "told": told}, clients)


def durable_client(*, jobs: int, told: bool) -> float:
    from durable_jobs import service, transports

    if not told:
        transports.current().publish = lambda job: None  # type: ignore[method-assign]
    given = json.loads(INPUT)
    service.start("bench.noop", given)
    begun = time.perf_counter()
    for _ in range(jobs):
        service.start("bench.noop", given)
    return time.perf_counter() - begun


def crowd(function: str, arguments: dict[str, Any], clients: int) -> dict[str, Any]:
    """All begin together, while somebody listens, as a worker does."""
    listening = floor.connect()
    listening.execute("LISTEN durable_jobs")
    stop = threading.Event()

    def listen() -> None:
        while not stop.is_set():
            for _ in listening.notifies(timeout=0.2):
                pass

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        took = harness.crowd("benchmarks.start", function, arguments, clients)
    finally:
        stop.set()
        listener.join()
    return {"value": arguments["jobs"] * clients / max(took)}


def durable(*, jobs: int, many: bool = False) -> dict[str, Any]:
    """`start` in a loop, or `start_many`."""
    from django.db import connections

    from durable_jobs import service

    given = json.loads(INPUT)

    def work(share: int) -> None:
        try:
            if many:
                service.start_many({"kind": "bench.noop", "input": given} for _ in range(share))
                return
            for _ in range(share):
                service.start("bench.noop", given)
        finally:
            connections.close_all()

    return timed(work, jobs)


def timed(work: Callable[[int], None], jobs: int) -> dict[str, Any]:
    work(20)
    begun, processor = time.perf_counter(), time.process_time()
    work(jobs)
    took, used = time.perf_counter() - begun, time.process_time() - processor
    return {"value": jobs / took, "cpu_us_per_job": used / jobs * 1e6}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=1_000, help="one by one; at once ten times as many")
    options = parser.parse_args()
    harness.setup()
    from django.db import connection

    one, all_ = {"jobs": options.jobs}, {"jobs": options.jobs * 10, "many": True}
    eight = {"jobs": options.jobs * 4, "clients": 8}
    sets = [
        ("starts a second, one by one", [
            Contestant("floor: bare insert", "bare", one),
            Contestant("durable_jobs, start", "durable", one, floor="floor: bare insert",
                       goal=Goal(least=0.6)),
        ]),
        ("starts a second, all at once", [
            Contestant("floor: bare inserts", "bare", all_),
            Contestant("durable_jobs, start_many", "durable", all_, floor="floor: bare inserts",
                       goal=Goal(least=0.6)),
        ]),
    ]  # fmt: skip
    if connection.vendor == "postgresql":
        quiet, told = {**eight, "told": False}, {**eight, "told": True}
        sets.append(("starts a second, eight clients, each a process", [
            Contestant("floor: 8 clients, bare insert", "bare_crowd", quiet),
            Contestant("floor: 8 clients, a NOTIFY with each", "bare_crowd", told,
                       floor="floor: 8 clients, bare insert"),
            Contestant("durable_jobs, nobody notified", "durable_crowd", quiet, floor="floor: 8 clients, bare insert"),
            Contestant("durable_jobs, workers notified", "durable_crowd", told, floor="durable_jobs, nobody notified",
                       goal=Goal(least=0.8)),
        ]))  # fmt: skip
    with harness.databases():
        results = [
            harness.compare(
                title, "benchmarks.start", those, rounds=options.rounds, prepare=lambda one: fill(0)
            )
            for title, those in sets
        ]
        harness.keep("start", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
