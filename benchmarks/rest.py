"""`python -m benchmarks.rest`: what the REST API takes over a million jobs on PostgreSQL, at the server.

The database that DATABASE_URL names must be empty. Each request goes through Django's whole stack in this process,
session and rights included, without a socket. Ends with 1 when a list or a detail misses its 50 ms, or when the number
of queries is not the same for every request of a line.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import django

from benchmarks import harness

LIMIT = 50.0
"""Milliseconds for the 95th of a hundred requests."""

FILL = """
INSERT INTO durable_jobs_job (id, kind, status, tenant_id, created_at, updated_at, input, input_sha256, result,
    attempts, lease_epoch, started_at, claimed_at, finished_at, error_class, error_code, error_type, error_message,
    cancel_requested_at, next_run_at, pending_since, lease_owner, lease_expires_at, heartbeat_at, lock_key,
    processed_count, total_count, parked_at)
SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1, 3)
        || '8' || substr(md5(n::text), 4, 15))::uuid,
    CASE WHEN n %% 5000 = 0 THEN 'rest.letter' ELSE 'rest.echo' END, status,
    CASE WHEN n %% 5 < 3 THEN 'default' ELSE 'tenant' || n %% 97 END, at, at,
    '{"text": "' || repeat('x', 300) || '"}', repeat('0', 64), CASE WHEN status = 'completed' THEN '{}' END,
    CASE WHEN status = 'pending' THEN 0 ELSE 1 END, CASE WHEN status = 'pending' THEN 0 ELSE 1 END,
    CASE WHEN status <> 'pending' THEN at END, CASE WHEN status <> 'pending' THEN at END,
    CASE WHEN ended THEN at END, CASE WHEN status = 'failed' THEN 'terminal' END,
    CASE WHEN status = 'failed' THEN 'bad_row' END, CASE WHEN status = 'failed' THEN 'builtins.ValueError' END,
    CASE WHEN status = 'failed' THEN repeat('e', 200) END, CASE WHEN status = 'cancelled' THEN at END,
    CASE WHEN status = 'pending' THEN at END, CASE WHEN status = 'pending' THEN at END,
    CASE WHEN status = 'running' THEN 'worker' END, CASE WHEN status <> 'pending' THEN now() + interval '1 hour' END,
    CASE WHEN status <> 'pending' THEN at END, CASE WHEN n %% 100 = 0 THEN 'key ' || n END, n %% 1000, 1000,
    CASE WHEN status = 'failed' AND n %% 2 = 0 THEN at END
FROM (SELECT n, status, status IN ('completed', 'failed', 'cancelled') AS ended,
        now() - (%(jobs)s - n) * interval '0.1 second' AS at
    FROM (SELECT n, CASE WHEN n %% 1000 < 940 THEN 'completed' WHEN n %% 1000 < 980 THEN 'failed'
            WHEN n %% 1000 < 990 THEN 'cancelled' WHEN n %% 1000 < 995 THEN 'running' ELSE 'pending' END AS status
        FROM generate_series(1, %(jobs)s) n) numbered) dated"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=100)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    os.environ.setdefault("DURABLE_JOBS_TEST_SETTINGS", '{"DISCOVER": ["rest.kinds"]}')
    django.setup()
    began = time.monotonic()
    fill(options.jobs)
    print(f"{options.jobs:,} jobs made in {time.monotonic() - began:.0f} s\n")
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(
        f"Load of each processor when it begins: {load:.1f}. Above 1 the times are mostly waiting for a processor;"
    )
    print("the two columns of CPU are what this process and its database connection took of one.")
    print(f"{'request':32}{'p50 ms':>8}{'p95 ms':>8}{'CPU':>8}{'DB CPU':>8}{'queries':>9}")
    rows: list[list[Any]] = []
    missed = [line for line in lines(options.requests, rows) if not line]
    columns = [
        f"a request over {options.jobs:,} jobs",
        "p50 ms",
        "p95 ms",
        "processor, ms",
        "its server's, ms",
        "queries",
    ]
    harness.keep("rest", [{"title": "requests", "jobs": options.jobs, "columns": columns, "rows": rows}])
    print(f"\nREST over {options.jobs:,} jobs: {'MISSED' if missed else 'passed'}")
    return 1 if missed else 0


def fill(jobs: int) -> None:
    from django.core.management import call_command
    from django.db import connection

    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute(FILL, {"jobs": jobs})
        cursor.execute("VACUUM ANALYZE durable_jobs_job")


def lines(requests: int, rows: list[list[Any]]) -> Iterator[bool]:
    """Whether each line is as it should be; its numbers go into `rows`."""
    from django.contrib.auth.models import Permission, User
    from rest_framework.test import APIClient

    from durable_jobs.models import Job

    def signed_in(name: str, *rights: str) -> Any:
        user = User.objects.create(username=name)
        user.user_permissions.set(Permission.objects.filter(codename__in=rights))
        made = APIClient()
        made.force_login(user)
        return made

    own = signed_in("own", "view_job", "view_job_payload")
    every = signed_in("every", "view_job", "view_job_payload", "view_all_scopes")
    few = [str(job.id) for job in Job.objects.filter(tenant_id="default").order_by("id").only("id")[:100]]
    addresses: dict[str, tuple[Any, Callable[[int], str], bool]] = {
        "list, first page": (own, lambda n: "/api/jobs/", True),
        "list, pages of 200": (own, lambda n: "/api/jobs/?page_size=200", False),
        "list, walked": (own, walked(own), True),
        "list of all scopes, walked": (every, walked(every), True),
        "list of a small tenant": (every, lambda n: f"/api/jobs/?tenant=tenant{n % 97}", True),
        "list, status=failed": (own, lambda n: "/api/jobs/?status=failed", True),
        "list, status=running": (own, lambda n: "/api/jobs/?status=running", True),
        "list, phase=parked": (own, lambda n: "/api/jobs/?phase=parked", True),
        "list, phase=waiting": (own, lambda n: "/api/jobs/?phase=waiting", False),
        "list, a rare kind": (own, lambda n: "/api/jobs/?kind=rest.letter", True),
        "list, a kind that is not there": (own, lambda n: "/api/jobs/?kind=none", True),
        "list, a lock key": (own, lambda n: f"/api/jobs/?lock_key=key+{100 * n}", False),
        "detail": (own, lambda n: f"/api/jobs/{few[n % 100]}/", True),
        "events": (own, lambda n: f"/api/jobs/{few[n % 100]}/events/", False),
        "counts": (own, lambda n: "/api/jobs/counts/", False),
    }
    for name, (client, address, limited) in addresses.items():
        yield timed(rows, name, client, address, requests if limited else max(5, requests // 10), limited)


def walked(client: Any) -> Callable[[int], str]:
    """Each time the next page, from somewhere in the middle on."""
    from durable_jobs.models import Job
    from durable_jobs.rest.paging import Place

    jobs = Job.objects.order_by("-id").only("id", "created_at")
    middle = jobs[jobs.count() // 2]
    pages = itertools.count()
    at = [f"/api/jobs/?cursor={Place.of(middle)}"]

    def next_page(number: int) -> str:
        if next(pages):
            at[0] = client.get(at[0]).json()["next"]
        return at[0]

    return next_page


def timed(
    rows: list[list[Any]],
    name: str,
    client: Any,
    address: Callable[[int], str],
    requests: int,
    limited: bool,
) -> bool:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    numbers = set()
    for number in range(5):
        asked = address(number)
        with CaptureQueriesContext(connection) as queries:
            assert client.get(asked).status_code == 200
        numbers.add(len(queries))
    took, busy, before = [], [], database_seconds()
    for number in range(requests):
        asked = address(number)
        began, begun = time.perf_counter(), time.process_time()
        client.get(asked)
        took.append(1000 * (time.perf_counter() - began))
        busy.append(1000 * (time.process_time() - begun))
    database = 1000 * (database_seconds() - before) / requests
    p95 = statistics.quantiles(took, n=20)[-1]
    good = not limited or (p95 <= LIMIT and len(numbers) == 1)
    shown = "/".join(map(str, sorted(numbers)))
    rows.append([name, statistics.median(took), p95, statistics.median(busy), database, shown])
    print(
        f"{name:32}{statistics.median(took):8.1f}{p95:8.1f}{statistics.median(busy):8.1f}{database:8.1f}{shown:>9}"
        f"{'' if good else '  MISSED'}",
        flush=True,
    )
    return good


def database_seconds() -> float:
    """What the connection's own server process has had of the processors; 0 where it runs elsewhere."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
