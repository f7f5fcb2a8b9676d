"""`make bench-admin`: the operator's screens over a million jobs on PostgreSQL.

Prints the time at the server and the number of queries of each page, then redrives 20,000 failed jobs, once
undisturbed and once with the process that does it killed half-way.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any

import django

from benchmarks import harness

JOBS, LARGE, FAILED, EVENTS = 1_000_000, 100, 20_000, 200_000
LIMIT_MS = 300.0
KIND = "bench.sync"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--failed", type=int, default=FAILED)
    parser.add_argument("--pages", action="store_true", help="only the pages, no bulk")
    parser.add_argument("--act", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    register()
    if options.act:
        return act(options.act)
    from django.db import connection
    from django.test.utils import setup_databases, teardown_databases

    if connection.vendor != "postgresql":
        print("This measures PostgreSQL; give DATABASE_URL, or use `make bench-admin`.")
        return 2
    old = setup_databases(verbosity=0, interactive=False)
    try:
        return measure(options.jobs, options.failed, bulks=not options.pages)
    finally:
        teardown_databases(old, verbosity=0)


def register() -> None:
    from durable_jobs import kinds

    class Sync(kinds.Kind):
        name = KIND

        def step(self, ctx: Any) -> Any:
            return kinds.Done()

    kinds.register(Sync)


def measure(jobs: int, failed: int, *, bulks: bool) -> int:
    begun = time.perf_counter()
    fill(jobs, failed)
    print(
        f"{jobs:,} jobs made in {time.perf_counter() - begun:.0f} s, {LARGE} with 1 MiB each in input and result\n"
    )
    pages: list[list[Any]] = []
    acts: list[list[Any]] = []
    slow = look(pages)
    wrong = [*bulk(failed, acts, kill=False), *bulk(failed, acts, kill=True)] if bulks else []
    harness.keep(
        "admin",
        [
            {"title": "screens", "jobs": jobs, "columns": [f"a page over {jobs:,} jobs", "median ms", "slowest ms", "queries", "KiB"],
             "rows": pages},
            {"title": "bulk", "jobs": jobs, "columns": [f"redrive {failed:,} failed jobs from the list", "s", "preview, ms"],
             "rows": acts},
        ],
    )  # fmt: skip
    print(
        "\n"
        + ("All as it should be." if not slow + wrong else "NOT as it should be: " + "; ".join(slow + wrong))
    )
    return 1 if slow + wrong else 0


# --- the table ------------------------------------------------------------------------------------------


def fill(jobs: int, failed: int) -> None:
    """Mostly completed, `failed` failed in the last day, and some of every other sort, over thirty days."""
    from django.db import connection

    large_from = jobs - LARGE * 50
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO durable_jobs_job (id, kind, status, tenant_id, created_at, updated_at, input, input_sha256, result,
                queue_name, attempts, lease_epoch, started_at, finished_at, error_class, error_type, error_message,
                pending_since, next_run_at, lease_owner, lease_expires_at, heartbeat_at, claimed_at, last_committed_at,
                subject_type, subject_id, lock_key, processed_count, total_count)
            SELECT
                (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || lpad(to_hex(n %% 4096), 3, '0') || '8'
                    || lpad(to_hex(n), 15, '0'))::uuid,
                kind, status, CASE WHEN n %% 1000 = 0 THEN 'small' ELSE 'default' END, at, at,
                CASE WHEN large THEN '"' || repeat(md5(n::text), 32768) || '"' ELSE '{"customer":' || n || '}' END, repeat('0', 64),
                CASE WHEN large THEN '"' || repeat(md5(n::text), 32768) || '"' END,
                'queue' || n %% 5, CASE WHEN status = 'pending' THEN 0 ELSE 3 END, CASE WHEN status = 'pending' THEN 0 ELSE 3 END,
                CASE WHEN status <> 'pending' THEN at + interval '3 s' END,
                CASE WHEN status IN ('completed', 'failed') THEN least(at + interval '90 s', now()) END,
                CASE WHEN status = 'failed' THEN 'transient' END,
                CASE WHEN status = 'failed' THEN 'requests.exceptions.' || CASE n %% 3 WHEN 0 THEN 'Timeout' ELSE 'ConnectionError' END END,
                CASE WHEN status = 'failed' THEN 'no answer' END,
                CASE WHEN status = 'pending' THEN at END, CASE WHEN status = 'pending' THEN at END,
                CASE WHEN status = 'running' THEN 'web' || n %% 20 || ':1' END,
                CASE WHEN status = 'running' THEN now() + CASE WHEN n %% 7 = 0 THEN interval '-5 min' ELSE interval '1 h' END END,
                CASE WHEN status = 'running' THEN now() END, CASE WHEN status = 'running' THEN at END,
                CASE WHEN status = 'running' THEN now() END,
                'demo.importrun', n::text, CASE WHEN status = 'failed' THEN 'lock ' || n END, 500, 1000
            FROM (SELECT n, at, n > %(large_from)s AND n %% 50 = 0 AS large,
                    CASE WHEN n > %(jobs)s - 2 * %(failed)s AND n %% 2 = 0 THEN 'failed' WHEN n %% 5000 = 1 THEN 'running'
                         WHEN n %% 500 = 3 THEN 'pending' ELSE 'completed' END AS status,
                    CASE WHEN n %% 100000 = 7 THEN 'bench.rare' ELSE %(kind)s END AS kind
                  FROM (SELECT n, now() - (%(jobs)s - n) * interval '30 days' / %(jobs)s AS at
                        FROM generate_series(1, %(jobs)s) n) numbers) rows
            """,
            {"jobs": jobs, "failed": failed, "large_from": large_from, "kind": KIND},
        )
        cursor.execute(
            """
            INSERT INTO durable_jobs_event (job_id, created_at, event, kind, actor, operation_id)
            SELECT (SELECT id FROM durable_jobs_job LIMIT 1), now() - n * interval '10 s', 'redriven', 'bench', 'user:1 anna', 'old'
            FROM generate_series(1, %s) n
            """,
            [EVENTS],
        )
        for table in ("job", "event"):
            cursor.execute(f"VACUUM (ANALYZE) durable_jobs_{table}")


# --- the pages ------------------------------------------------------------------------------------------


def look(rows: list[list[Any]]) -> list[str]:
    """Time each page, into `rows`; what is too slow."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext
    from django.urls import reverse
    from django.utils import timezone

    from durable_jobs.models import Job

    client = logged_in()
    list_ = reverse("admin:durable_jobs_job_changelist")
    failed = Job.objects.filter(status="failed").order_by("-id").first()
    large = (
        Job.objects.filter(
            id__in=Job.objects.order_by("-id").values("id")[:20_000], result_text__isnull=False
        )
        .defer("input_text", "result_text")
        .first()
    )
    assert failed and large
    week = (timezone.now() - timedelta(days=7)).strftime("%Y-%m-%dT%H:%M")
    pages = {
        "overview": reverse("admin:durable_jobs_job_overview"),
        "list": list_,
        "list, needs a human": f"{list_}?phase=human",
        "list, one error type": f"{list_}?error_type=requests.exceptions.Timeout",
        "list, failed in a week": f"{list_}?phase=human&finished_from={week}",
        "list, stuck": f"{list_}?phase=stuck",
        "list, running": f"{list_}?phase=running",
        "list, waiting": f"{list_}?phase=waiting",
        "list, completed": f"{list_}?phase=completed",
        "list, cancelled (none)": f"{list_}?phase=cancelled",
        "list, held (none)": f"{list_}?phase=held",
        "list, a rare kind": f"{list_}?kind=bench.rare",
        "list, a kind that is not": f"{list_}?kind=bench.none",
        "list, a small tenant": f"{list_}?scope=small",
        "list, search an id": f"{list_}?q={failed.pk}",
        "list, search a subject": f"{list_}?q=demo.importrun:{failed.subject_id}",
        "list, search nothing": f"{list_}?q=nothing-like-it",
        "job": reverse("admin:durable_jobs_job_change", args=[failed.pk]),
        "job with 2 MiB": reverse("admin:durable_jobs_job_change", args=[large.pk]),
        "job, its live part": reverse("admin:durable_jobs_job_live", args=[large.pk]),
        "confirmation": reverse("admin:durable_jobs_job_act", args=[failed.pk, "redrive"]),
        "history": "/admin/durable_jobs/jobevent/",
        "history, an actor": "/admin/durable_jobs/jobevent/?actor=nobody",
        "start": reverse("admin:durable_jobs_job_start"),
        "pause": reverse("admin:durable_jobs_job_pause"),
    }
    page = client.get(list_).content.decode()
    following = re.search(r'rel="next"[^>]*href="\?([^"]+)"', page)
    assert following
    pages["list, second page"] = f"{list_}?{following[1].replace('&amp;', '&')}"
    many = reverse("admin:durable_jobs_job_many")
    previews = {
        "preview, redrive what failed": (f"{many}?phase=human", {"act": "redrive", "all": "1"}),
        "preview, cancel a kind": (f"{many}?kind={KIND}", {"act": "cancel", "all": "1"}),
    }
    slow = []
    print(f"{'page':30} {'median':>9} {'slowest':>9} {'queries':>8} {'KiB':>6}")
    for name, asked_for in {**{name: (address, None) for name, address in pages.items()}, **previews}.items():
        address, posted = asked_for
        ask = partial(client.post, address, posted) if posted else partial(client.get, address)
        times = []
        for _ in range(6):
            begun = time.perf_counter()
            answer = ask()
            times.append((time.perf_counter() - begun) * 1000)
            assert answer.status_code == 200, (name, answer.status_code)
        times = times[1:]
        with CaptureQueriesContext(connection) as asked:
            ask()
        print(
            f"{name:30} {statistics.median(times):6.0f} ms {max(times):6.0f} ms {len(asked):8} {len(answer.content) // 1024:6}"
        )
        rows.append([name, statistics.median(times), max(times), len(asked), len(answer.content) // 1024])
        if statistics.median(times) > LIMIT_MS:
            slow.append(f"{name} took {statistics.median(times):.0f} ms")
            worst = sorted(asked.captured_queries, key=lambda one: -float(one["time"]))[:2]
            for one in worst:
                print(f"    {one['time']} s  {one['sql'][:100]} … {one['sql'][-600:]}")
    return slow


def logged_in() -> Any:
    from django.contrib.auth.models import User
    from django.test import Client

    user, _ = User.objects.get_or_create(username="anna", is_staff=True, is_superuser=True)
    client = Client()
    client.force_login(user)
    return client


# --- many jobs ------------------------------------------------------------------------------------------


def bulk(failed: int, rows: list[list[Any]], *, kill: bool) -> list[str]:
    """Redrive what failed, in a process of its own; with `kill`, end it half-way and press again."""
    from django.db import connection
    from django.urls import reverse

    from durable_jobs.models import Job, JobEvent

    # Everything has failed again, a while ago.
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM durable_jobs_event WHERE operation_id <> 'old'")
        cursor.execute(
            "UPDATE durable_jobs_job SET status = 'failed', pending_since = NULL, next_run_at = NULL, error_class = 'transient',"
            " finished_at = now() - interval '1 min' WHERE status = 'failed' OR (status = 'pending' AND redrives > 0)"
        )
    client = logged_in()
    begun = time.perf_counter()
    many = reverse("admin:durable_jobs_job_many")
    asked = client.post(f"{many}?phase=human", {"act": "redrive", "all": "1"})
    preview = (time.perf_counter() - begun) * 1000
    token = re.search(r'name="token" value="([^"]+)"', asked.content.decode())
    assert token
    wrong = [] if preview <= 10 * LIMIT_MS else [f"the preview took {preview:.0f} ms"]
    begun = time.perf_counter()
    runs = 1
    run = start(token[1])
    if kill:
        while JobEvent.objects.exclude(operation_id="old").count() < failed // 2:
            assert run.poll() is None, "it ended too early"
            time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
        run.wait()
        half = JobEvent.objects.exclude(operation_id="old").count()
        run, runs = start(token[1]), 2
    said, _ = run.communicate(timeout=1800)
    seconds = time.perf_counter() - begun
    if run.returncode:
        wrong.append(f"the bulk ended with {run.returncode}")
    rows.append([f"killed at {half:,}, pressed again" if kill else "undisturbed", seconds, preview])
    pending = Job.objects.filter(status="pending", redrives__gt=0)
    events = JobEvent.objects.filter(event="redriven").exclude(operation_id="old")
    jobs, twice = events.values("job_id").distinct().count(), events.count()
    print(
        f"\nbulk redrive of {failed:,} failed jobs{', killed at ' + format(half, ',') if kill else ''}: {seconds:.0f} s in {runs} process(es),"
    )
    print(f"  preview {preview:.0f} ms; {said.strip()}")
    print(f"  {jobs:,} jobs redriven, {twice - jobs} twice, {pending.count():,} wait for a worker")
    if (jobs, twice, pending.count()) != (failed, failed, failed):
        wrong.append("the bulk did not redrive each job once")
    return wrong


def start(token: str) -> subprocess.Popen[str]:
    from tests.processes import process_environment

    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.admin", "--act", token],
        env={**process_environment(), "DJANGO_SETTINGS_MODULE": "tests.settings"},
        text=True,
        stdout=subprocess.PIPE,
    )


def act(token: str) -> int:
    """What the browser does: post the confirmation, then each form that comes back."""
    from django.urls import reverse

    client = logged_in()
    address = reverse("admin:durable_jobs_job_bulk")
    said = {"token": token, "reason": "the outage is over"}
    posts, longest, memory = 0, 0.0, []
    while True:
        begun = time.perf_counter()
        answer = client.post(address, said)
        longest, posts = max(longest, time.perf_counter() - begun), posts + 1
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        if answer.status_code == 302:
            break
        found = re.search(r'name="token" value="([^"]+)"', answer.content.decode())
        assert found, answer.content
        said = {"token": found[1]}
    print(
        f"{posts} POSTs, the longest {longest:.1f} s; memory {memory[0]} MiB after the first, {memory[-1]} MiB after the last"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
