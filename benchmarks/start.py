"""`make bench-start`: jobs started a second, one by one, 10,000 at once, and by eight clients, against a bare insert."""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from benchmarks import floor, harness
from benchmarks.drain import INPUT, fill
from benchmarks.harness import Contestant

COLUMNS = """id, kind, status, tenant_id, queue_name, input, input_sha256, priority, created_at, updated_at,
    next_run_at, pending_since"""


def bare(*, jobs: int, clients: int = 1, many: bool = False) -> dict[str, Any]:
    """Insert the same rows with the driver alone."""
    from django.db import connection

    from durable_jobs.jsontext import sha256

    digest, lite = sha256(INPUT), connection.vendor == "sqlite"
    now = floor.LITE["now"] if lite else "clock_timestamp()"
    mark = "?" if lite else "%s"
    one = f"""INSERT INTO durable_jobs_job ({COLUMNS}) VALUES ({mark}, 'bench.noop', 'pending', 'default', 'bench',
        {mark}, '{digest}', 0, {now}, {now}, {now}, {now}) ON CONFLICT DO NOTHING RETURNING id"""

    def work(share: int) -> None:
        raw = floor.lite_connect() if lite else floor.connect()
        if not many:
            for _ in range(share):
                raw.execute(one, [uuid.uuid4().hex, INPUT]).fetchall()
            return
        rows = [(uuid.uuid4().hex, INPUT) for _ in range(share)]
        if lite:
            raw.execute("BEGIN IMMEDIATE")
            raw.executemany(one.replace("RETURNING id", ""), rows)
            raw.execute("COMMIT")
            return
        for begin in range(0, share, 500):
            part = json.dumps([{"id": row[0], "input": row[1]} for row in rows[begin : begin + 500]])
            raw.execute(
                f"""INSERT INTO durable_jobs_job ({COLUMNS}) SELECT r.id, 'bench.noop', 'pending', 'default',
                    'bench', r.input, '{digest}', 0, {now}, {now}, {now}, {now}
                FROM json_to_recordset(%s) AS r(id uuid, input text)
                ON CONFLICT DO NOTHING RETURNING id""",
                [part],
            ).fetchall()

    return timed(work, jobs, clients)


def durable(*, jobs: int, clients: int = 1, many: bool = False, told: bool = True) -> dict[str, Any]:
    """`start` in a loop, or `start_many`; with `told=False` no worker is notified."""
    from django.db import connections

    from durable_jobs import service, transports

    if not told:
        transports.current().publish = lambda job: None  # type: ignore[method-assign]
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

    return timed(work, jobs, clients)


def timed(work: Callable[[int], None], jobs: int, clients: int) -> dict[str, Any]:
    work(20)
    threads = [threading.Thread(target=work, args=(jobs // clients,)) for _ in range(clients)]
    begun, processor = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = time.process_time() - processor
    return {"value": jobs / (time.perf_counter() - begun), "cpu_us_per_job": used / jobs * 1e6}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=1_000, help="one by one; at once ten times as many")
    options = parser.parse_args()
    harness.setup()
    from django.db import connection

    one, all_ = {"jobs": options.jobs}, {"jobs": options.jobs * 10, "many": True}
    eight = {"jobs": options.jobs * 2, "clients": 8}
    sets = [
        ("starts a second, one by one", [
            Contestant("floor: bare insert", "bare", one),
            Contestant("durable_jobs, start", "durable", one, floor="floor: bare insert"),
        ]),
        ("starts a second, all at once", [
            Contestant("floor: bare inserts", "bare", all_),
            Contestant("durable_jobs, start_many", "durable", all_, floor="floor: bare inserts"),
        ]),
    ]  # fmt: skip
    if connection.vendor == "postgresql":
        sets.append(("starts a second, eight clients", [
            Contestant("nobody notified", "durable", {**eight, "told": False}),
            Contestant("workers notified", "durable", eight, floor="nobody notified"),
        ]))  # fmt: skip
    with harness.databases():
        results = [
            harness.compare(title, "benchmarks.start", those, rounds=options.rounds, prepare=lambda: fill(0))
            for title, those in sets
        ]
        harness.keep("start", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
