"""`make bench-peers`: other queues, the floor and durable_jobs drain no-op jobs and pick up single ones, in turns."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import drain, harness
from benchmarks.harness import Contestant, Goal

JOBS, PICKUPS = 20_000, 100
FLOOR, OURS = "floor: 8 threads, completions batched", "durable_jobs, concurrency 8"


def drains(vendor: str, peer: Any, *, redis: bool) -> list[Contestant]:
    """Sizes are such that each takes some seconds."""
    ours = "benchmarks.drain"
    django_tasks = [
        peer("django-tasks-db", "django_tasks_db_worker", "drain", 0.06, processes=1),
        peer("django-tasks-db, 8 processes", "django_tasks_db_worker", "drain", 0.06, processes=8),
        peer("django-tasks-db, CONN_MAX_AGE = 0", "django_tasks_db_worker", "drain", 0.03,
             {"BENCH_CONN_MAX_AGE": "0"}, processes=1),
    ]  # fmt: skip
    if vendor == "sqlite":
        return [
            Contestant("durable_jobs, concurrency 1", "durable", {"concurrency": 1}, module=ours),
            Contestant(OURS, "durable", {"concurrency": 8}, module=ours),
            django_tasks[0],
        ]
    celery = [
        peer("Celery on Redis, concurrency 1", "celery_redis", "drain", 0.25, concurrency=1, prefetch=128),
        peer("Celery on Redis, concurrency 8", "celery_redis", "drain", 0.25, concurrency=8, prefetch=128),
        peer("Celery, acks_late, Redis AOF always, concurrency 8", "celery_redis", "drain", 0.15,
             concurrency=8, prefetch=4, durable=True),
    ]  # fmt: skip
    return [
        Contestant(FLOOR, "bare", {"threads": 8, "batch": 50, "end": "many"}, module=ours),
        Contestant("durable_jobs, concurrency 1", "durable", {"concurrency": 1}, module=ours, floor=FLOOR),
        Contestant(OURS, "durable", {"concurrency": 8}, module=ours, floor=FLOOR),
        peer("Procrastinate, concurrency 1", "procrastinate_django", "drain", 0.1, concurrency=1),
        peer("Procrastinate, concurrency 8", "procrastinate_django", "drain", 0.15, concurrency=8),
        peer("pgqueuer, one at a time", "pgqueuer_asyncpg", "drain", 0.1, batch=1),
        peer("pgqueuer, 10 at a time (its default)", "pgqueuer_asyncpg", "drain", 0.5, batch=10),
        peer("pgqueuer, 100 at a time", "pgqueuer_asyncpg", "drain", 1, batch=100),
        *django_tasks,
        *(celery if redis else []),
    ]


def pickups(vendor: str, peer: Any, jobs: int, *, redis: bool) -> list[Contestant]:
    given = {"jobs": jobs}
    celery = [peer("Celery on Redis", "celery_redis", "pickup", jobs=jobs)] if redis else []
    listening = [
        Contestant("floor: LISTEN", "bare", given, module="benchmarks.pickup"),
        Contestant("durable_jobs", "durable", given, module="benchmarks.pickup", floor="floor: LISTEN"),
        peer("Procrastinate", "procrastinate_django", "pickup", jobs=jobs),
        peer("pgqueuer", "pgqueuer_asyncpg", "pickup", jobs=jobs),
        *celery,
    ]
    polling = peer("django-tasks-db (looks each second)", "django_tasks_db_worker", "pickup", jobs=jobs)
    if vendor == "sqlite":
        return [Contestant("durable_jobs", "durable", given, module="benchmarks.pickup"), polling]
    return [*listening, polling]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--python", required=True, help="the interpreter with the peers installed")
    parser.add_argument("--jobs", type=int, default=JOBS, help="of the fastest; others get their share")
    parser.add_argument("--pickups", type=int, default=PICKUPS, help="0: only the drain")
    options = parser.parse_args()
    if shutil.which(options.python) is None:
        print(f"{options.python} is missing; `make bench-peers` makes it.")
        return 2
    harness.setup()
    from django.db import connection

    redis = shutil.which("redis-server") is not None
    if not redis and connection.vendor == "postgresql":
        print("Celery is left out: redis-server is missing (Debian: apt-get install redis-server).")
    with harness.databases(), tempfile.TemporaryDirectory() as folder:
        environment = {"DJANGO_SETTINGS_MODULE": "benchmarks.peers.settings", **database(folder)}

        def peer(name: str, module: str, function: str, size: float = 1.0,
                 extra: dict[str, str] | None = None, **given: Any) -> Contestant:  # fmt: skip
            if function == "drain":
                given["jobs"] = max(int(options.jobs * size), 100)
            return Contestant(
                name, function, given, module=f"benchmarks.peers.{module}", python=options.python,
                environment={**environment, **(extra or {})},
            )  # fmt: skip

        tables = Contestant("the peers' tables", "make", module="benchmarks.peers.tables",
                            python=options.python, environment=environment)  # fmt: skip
        versions = harness.once("", tables)

        def prepare(one: Contestant) -> None:
            if one.module in ("benchmarks.drain", "benchmarks.pickup"):
                drain.fill(options.jobs if one.module == "benchmarks.drain" else 0)

        try:
            vendor, rounds = connection.vendor, options.rounds
            some = harness.chosen(drains(vendor, peer, redis=redis), options.only)
            results = [harness.compare("no-op jobs a second", "", some, rounds=rounds, prepare=prepare)]
            ahead(results[0])
            if options.pickups:
                some = harness.chosen(pickups(vendor, peer, options.pickups, redis=redis), options.only)
                title = "commit to handler, ms (median of p50)"
                results.append(harness.compare(title, "", some, rounds=rounds, prepare=prepare))
                for one in some:
                    print(f"  p99 of {one.name}: {harness.median_of(results[1], one.name, 'p99'):.1f}")
            print("\n" + ", ".join(f"{name} {version}" for name, version in versions.items()))
            if not options.only:
                harness.keep("peers", [{"versions": versions}, *results])
        finally:
            remove()
    return 0


def ahead(result: dict[str, Any]) -> None:
    """The goal: faster than each of them in the same run."""
    medians = {name: line["median"] for name, line in result["contestants"].items()}
    peers = {name: value for name, value in medians.items() if not name.startswith(("floor", "durable_jobs"))}
    if OURS in medians and peers:
        best = max(peers, key=lambda name: peers[name])
        harness.judge(
            result, f"{OURS}, × the fastest peer ({best})", medians[OURS] / peers[best], Goal(least=1)
        )


def database(folder: str) -> dict[str, str]:
    """A database of the peers' own, on the same server, or a file beside ours."""
    from django.db import connection

    from tests.processes import database_url

    if connection.vendor == "sqlite":
        return {"DATABASE_URL": f"sqlite:///{Path(folder) / 'peers.sqlite3'}"}
    remove()
    with connection.creation._nodb_cursor() as cursor:
        cursor.execute("CREATE DATABASE bench_peers")
    return {"DATABASE_URL": database_url().replace(f"/{connection.settings_dict['NAME']}", "/bench_peers")}


def remove() -> None:
    from django.db import connection

    if connection.vendor == "postgresql":
        with connection.creation._nodb_cursor() as cursor:
            cursor.execute("DROP DATABASE IF EXISTS bench_peers WITH (FORCE)")


if __name__ == "__main__":
    sys.exit(main())
