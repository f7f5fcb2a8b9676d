"""pgqueuer with its fastest driver (asyncpg) and loop (uvloop): handlers are coroutines of one process."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Coroutine
from typing import Any

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, Job, Queries, QueueManager
from pgqueuer.types import QueueExecutionMode

from benchmarks.peers import clock, tables


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def connect() -> asyncpg.Connection:
    return await asyncpg.connect(os.environ["DATABASE_URL"])


def install() -> None:
    async def made() -> None:
        connection = await connect()
        queries = Queries(AsyncpgDriver(connection))
        if not await queries.schema_is_installed():
            await queries.install()
        await connection.close()

    run(made())


def drain(*, jobs: int, batch: int) -> dict[str, Any]:
    """All in one process; `batch` is how many it fetches and acknowledges at a time."""
    begun: list[float] = []

    async def fill() -> None:
        connection = await connect()
        await connection.execute("TRUNCATE pgqueuer, pgqueuer_log")
        queries = Queries(AsyncpgDriver(connection))
        for first in range(0, jobs, 1000):
            size = min(1000, jobs - first)
            await queries.enqueue(["noop"] * size, [None] * size, [0] * size)
        await connection.close()

    async def work() -> None:
        connection = await connect()
        manager = QueueManager(Queries(AsyncpgDriver(connection)))

        @manager.entrypoint("noop")
        async def noop(job: Job) -> None:
            begun.append(time.perf_counter())

        await manager.run(batch_size=batch, mode=QueueExecutionMode.drain)

    run(fill())
    tables.settle("pgqueuer", "pgqueuer_log")
    run(work())
    assert len(begun) == jobs, len(begun)
    return {"value": jobs / (begun[-1] - begun[0]), "jobs": jobs}


def pickup(*, jobs: int) -> dict[str, Any]:
    serving = [sys.executable, "-m", "benchmarks.harness", __name__, "serve", "{}"]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        connection = runner.run(connect())
        runner.run(connection.execute("TRUNCATE pgqueuer, pgqueuer_log"))
        queries = Queries(AsyncpgDriver(connection))
        return clock.pickup(
            serving, lambda number: runner.run(queries.enqueue("clock", str(number).encode())), jobs
        )


def serve() -> None:
    async def work() -> None:
        manager = QueueManager(Queries(AsyncpgDriver(await connect())))

        @manager.entrypoint("clock")
        async def note(job: Job) -> None:
            assert job.payload is not None
            clock.note(int(job.payload))

        await manager.run()

    run(work())
