"""Anything that may happen, in any order, on few jobs: the rows stay what the state chart says."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

import pytest
from django.db import connection
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from durable_jobs import database, kinds, reconciler, runner
from tests.model.conftest import figures
from tests.model.hands import processes
from tests.model.machine import Machine, kinds_of_the_machine

PROVE = os.environ.get("DURABLE_JOBS_PROVE") == "1"
SHRINK = os.environ.get("MODEL_SHRINK") != "0"
STEPS = 50
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", 700 if PROVE else 30))


@pytest.fixture(autouse=True)
def world(registry: None, transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reconciler, "JITTER", 0.0)
    # Everything here runs in one process and waits for its turn only when something is wrong.
    monkeypatch.setattr(runner, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(database, "BUSY_LIMIT_SECONDS", float("inf"))
    for kind in kinds_of_the_machine():
        kinds.register(kind)
    logging.disable(logging.CRITICAL)
    with processes() as Machine.processes:
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(3600 if PROVE else 600)
def test_the_rows_follow_the_chart() -> None:
    Machine.steps = 0
    Machine.outcomes.clear()
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '5s'")
    begun = time.monotonic()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize=not PROVE,
            print_blob=True,
            phases=[Phase.generate, *([Phase.shrink] if SHRINK else [])],
            suppress_health_check=list(HealthCheck),
        ),
    )
    took = time.monotonic() - begun
    figures.append(f"{Machine.steps:,} acts in {took:.0f} s, {Machine.steps / took:.0f} a second")
    told = sorted(Machine.outcomes.items(), key=lambda one: -one[1])
    figures.append(", ".join(f"{name} {count:,}" for name, count in told if not name.startswith("act ")))
