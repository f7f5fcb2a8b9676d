"""Procrastinate as a Django app: async tasks, its worker's own pool of connections, LISTEN as it is by default."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from procrastinate.contrib.django import app

from benchmarks.peers import clock, tables


@app.task(queue="bench", name="noop")
async def noop(number: int) -> None:
    pass


@app.task(queue="bench", name="clock")
async def note(number: int) -> None:
    clock.note(number)


def work(concurrency: int, wait: bool) -> None:
    logging.getLogger("procrastinate").setLevel(logging.WARNING)
    with app.replace_connector(app.connector.get_worker_connector()) as working:

        async def run() -> None:
            async with working.open_async():
                await working.run_worker_async(queues=["bench"], concurrency=concurrency, wait=wait)

        asyncio.run(run())


def drain(*, jobs: int, concurrency: int) -> dict[str, Any]:
    from django.db import connection

    clean()
    noop.batch_defer(*({"number": number} for number in range(jobs)))
    tables.settle("procrastinate_jobs", "procrastinate_events")
    work(concurrency, wait=False)
    with connection.cursor() as cursor:
        cursor.execute(
            """SELECT count(*) FILTER (WHERE type = 'succeeded'), extract(epoch FROM
                max(at) FILTER (WHERE type = 'succeeded') - min(at) FILTER (WHERE type = 'started'))
            FROM procrastinate_events"""
        )
        done, seconds = cursor.fetchone()
    assert done == jobs, done
    return {"value": jobs / float(seconds), "jobs": jobs}


def pickup(*, jobs: int) -> dict[str, Any]:
    clean()
    serving = [sys.executable, "-m", "benchmarks.harness", __name__, "serve", "{}"]
    return clock.pickup(serving, lambda number: note.defer(number=number), jobs)


def serve() -> None:
    work(8, wait=True)


def clean() -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE procrastinate_jobs, procrastinate_events CASCADE")
