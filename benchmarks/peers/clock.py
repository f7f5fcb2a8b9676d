"""From the commit of an enqueue to the handler: handlers note the time in a file, the enqueuing process compares."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "BENCH_CLOCK"


def note(number: int) -> None:
    """Called by the handler, first thing."""
    now = time.time()
    with open(os.environ[VARIABLE], "a") as file:
        file.write(f"{number} {now!r}\n")


def pickup(
    worker: list[str], enqueue: Callable[[int], Any], jobs: int, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Milliseconds, p50 and p99, with a worker that has nothing else to do."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clock"
        file.touch()
        env = {**os.environ, **(environment or {}), VARIABLE: str(file)}
        server = subprocess.Popen(worker, env=env, stdout=subprocess.DEVNULL)
        try:
            enqueue(-1)
            wait(file, 1, 60)
            enqueued = {}
            for number in range(jobs):
                time.sleep(random.uniform(0.02, 0.06))
                enqueue(number)
                enqueued[number] = time.time()
            wait(file, jobs + 1, 60)
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        began = dict(line.split() for line in file.read_text().splitlines())
    waits = sorted((float(began[str(number)]) - at) * 1000 for number, at in enqueued.items())
    return {"value": waits[len(waits) // 2], "p99": waits[int(len(waits) * 0.99)], "jobs": jobs}


def wait(file: Path, lines: int, most: float) -> None:
    deadline = time.monotonic() + most
    while file.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, "the worker does not come for its job"
        time.sleep(0.05)
