"""Anything that may happen, in any order, on few jobs: the rows stay what the state chart says."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator

import pytest
from django.db import connection
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from durable_jobs import database, kinds, reconciler, runner
from tests.model.chart import FAILED
from tests.model.conftest import figures
from tests.model.hands import processes
from tests.model.machine import LATE, PAUSES, Machine, kinds_of_the_machine
from tests.store import rows

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
    rows.users.clear()
    for kind in kinds_of_the_machine():
        kinds.register(kind)
    logging.disable(logging.CRITICAL)
    with processes() as Machine.processes:
        yield
    logging.disable(logging.NOTSET)


def taken_over_late(machine: Machine) -> None:
    """A repair was decided, and then somebody else had the job and died, too."""
    machine.start(0, 0)
    machine.claim_next(machine.hands[0])
    machine.pass_by(85)
    machine.sight(0, 0)
    machine.redrive(0, 0)
    machine.claim_next(machine.hands[2])
    machine.pass_by(85)
    machine.act_late(0, 0)


def redriven_with_a_letter(machine: Machine) -> None:
    """The request of the former run ends nothing of the next one."""
    fails_with_a_letter(machine)
    machine.redrive(0, 0)
    machine.compare()
    machine.claim_next(machine.hands[1])


def retried_with_a_letter(machine: Machine) -> None:
    fails_with_a_letter(machine)
    machine.retry(0)


def fails_with_a_letter(machine: Machine) -> None:
    machine.start(0, 0)
    machine.claim_next(machine.hands[0])
    machine.letter(0, 0)
    [(hand, slice)] = machine.slices.items()
    machine.end(hand, slice, "park")
    assert slice.row.status == FAILED and slice.row.mailed
    machine.compare()


def beats_of_an_earlier_epoch(machine: Machine) -> None:
    """The same owner has the job again, and the slice of before still beats."""
    machine.start(0, 0)
    machine.claim_next(machine.hands[0])
    machine.pass_by(85)
    machine.redrive(0, 0)
    machine.claim_next(machine.hands[1])
    for number in range(len(LATE)):
        machine.late_write(0, number)
        machine.compare()


def delivered_though_paused(machine: Machine) -> None:
    machine.start(0, 0)
    for number in range(len(PAUSES)):
        machine.pause(number, 0)
        machine.compare()
        if machine.chart.is_paused(machine.row(0)):
            machine.deliver(0, 1)
            assert machine.took_one(machine.hands[0], True) is None
        machine.pause(0, 1)


def held_by_hand_too_long(machine: Machine) -> None:
    """Nothing that is written by hand is written under a lease that ran out."""
    machine.begin_by_hand(1)
    machine.seize(0, 0)
    machine.pass_by(85)
    for two in range(6, 12):
        machine.by_hand(0, two)
        machine.compare()


SCENES = (
    taken_over_late, redriven_with_a_letter, retried_with_a_letter, beats_of_an_earlier_epoch,
    delivered_though_paused, held_by_hand_too_long,
)  # fmt: skip


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_life_that_chance_seldom_makes(scene: Callable[[Machine], None]) -> None:
    """Each of these shows a fault that the random acts meet once in many thousands."""
    machine = Machine()
    scene(machine)
    machine.look()
    machine.teardown()


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
