"""Two and three actors on the same rows, in every order of their statements, each on a connection of its own.

`make test` plays a few schedules of each scene, `make explore` all of them.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from durable_jobs import database, kinds
from tests.explorer import pairs, scripts
from tests.explorer.explore import (
    ALL,
    REPLAY,
    Broken,
    Scene,
    all_orders,
    every_schedule,
    explore,
    play,
    replay,
)
from tests.explorer.stage import Run, Stage, first_ready
from tests.explorer.world import left_behind
from tests.models import Shipment
from tests.store import rows
from tests.store.rows import execute

CHART = Path(__file__).resolve().parent.parent.parent / "docs" / "state_machine.md"
ONLY_READ = {"lock_fence"}
FEW_SCRIPTS, FEW_PAIRS, EVERY = 4, 3, 20
"""Of each script 4 schedules, and 3 of every 20th pair."""

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(7200 if ALL else 300)]


@pytest.fixture
def stage(registry: None, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[Stage]:
    # A NOTIFY that is held back would be sent or not, as time has it.
    settings.DURABLE_JOBS = {"NOTIFY_DEBOUNCE": 0}
    # No other process is there to leave the file to.
    monkeypatch.setattr(database, "BUSY_LIMIT_SECONDS", float("inf"))
    rows.users.clear()
    for kind in scripts.KINDS:
        kinds.register(kind)
    logging.disable(logging.CRITICAL)
    with Stage(3) as made:
        yield made
    logging.disable(logging.NOTSET)


@pytest.mark.skipif(not REPLAY, reason="plays the schedule that DURABLE_JOBS_SCHEDULE names")
def test_the_named_schedule(stage: Stage) -> None:
    replay(stage, [*scripts.scenes(), *pairs.scenes(3)])


@pytest.mark.skipif(bool(REPLAY), reason="DURABLE_JOBS_SCHEDULE names one schedule")
def test_scripts_of_two_and_three_actors(stage: Stage) -> None:
    explore(stage, scripts.scenes(), "scripts", FEW_SCRIPTS)


@pytest.mark.skipif(bool(REPLAY), reason="DURABLE_JOBS_SCHEDULE names one schedule")
def test_each_pair_of_statements(stage: Stage) -> None:
    scenes = pairs.scenes(3 if ALL else 1)
    explore(stage, scenes if ALL else scenes[::EVERY], "pairs of statements", FEW_PAIRS)


def test_the_pairs_are_of_all_statements_of_the_chart() -> None:
    """Each statement that the chart names meets each other one."""
    named = set(
        re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", CHART.read_text(), re.MULTILINE)))
    )
    played = {name for told in pairs.STATEMENTS for name in re.findall(r"[a-z_]+", told.partition(" (")[0])}
    assert named - played == set()
    met = {(pair.first, pair.second) for pair in pairs.pairs(1)} if not ALL else set()
    count = len(pairs.STATEMENTS)
    assert ALL or len(met) == count * (count + 1) // 2


def test_a_lost_update_is_found_and_its_schedule_breaks_again(stage: Stage) -> None:
    """The explorer can fail: two that read, and write what they have read and one more."""

    def begin() -> Any:
        shipment = Shipment.objects.create(note="0")

        def add_one() -> None:
            note = execute("SELECT note FROM tests_shipment WHERE id = %s", shipment.pk)[0][0]
            with database.transaction(database.alias()):
                execute("UPDATE tests_shipment SET note = %s WHERE id = %s", str(int(note) + 1), shipment.pk)

        def check(run: Run) -> None:
            assert Shipment.objects.get(pk=shipment.pk).note == "2", "one was lost"

        return [[add_one], [add_one]], check

    scene = Scene("two that add one", begin)
    with pytest.raises(Broken, match="one was lost") as broken:
        list(every_schedule(stage, scene))
    with pytest.raises(Broken, match="one was lost") as again:
        play(stage, scene, first_ready(broken.value.choices))
    assert again.value.choices == broken.value.choices


def test_a_statement_that_waits_is_told_with_whom_it_waits_for(stage: Stage) -> None:
    def begin() -> Any:
        shipment = Shipment.objects.create(note="")

        def append() -> None:
            with database.transaction(database.alias()):
                execute("UPDATE tests_shipment SET note = note || '+' WHERE id = %s", shipment.pk)

        def check(run: Run) -> None:
            assert Shipment.objects.get(pk=shipment.pk).note == "++"

        return [[append], [append]], check

    runs = list(every_schedule(stage, Scene("two that append", begin)))
    waits = {wait for run in runs for wait in run.blocked}
    first = "UPDATE tests_shipment" if connection.vendor == "postgresql" else "BEGIN"
    assert waits and all(wait.startswith(first) and wait.endswith(("<- 0", "<- 1")) for wait in waits)
    assert any(not run.blocked for run in runs)


SMALL = ("a lost claim given back, and a cancel", "two redrives for one lock", "a reconciler and a cancel",
         "a slice that yields and a cancel", "two claims and a cancel", "a killed slice that still writes, and its supervisor")  # fmt: skip


@pytest.mark.parametrize("name", SMALL if ALL else SMALL[:1])
def test_what_is_left_out_leads_nowhere_else(stage: Stage, name: str) -> None:
    """Whatever any order leaves behind, one of those that are played does, with the same answers."""
    [script] = [script for script in scripts.SCRIPTS if script.name == name]
    ends: list[str] = []

    def begin() -> Any:
        world = scripts.set_up(script)
        programs = [make(world) for make in script.cast]

        def check(run: Run) -> None:
            left = left_behind(world)
            ends.append(f"{run.answers} {left.rows} {left.new} {left.rest}")

        return programs, check

    scene = Scene(name, begin)
    every = len(list(all_orders(stage, scene)))
    of_all, ends = set(ends), []
    chosen = len(list(every_schedule(stage, scene)))
    assert set(ends) == of_all and chosen < every


@pytest.mark.postgres_only
def test_two_that_wait_for_each_other_are_found_with_their_schedule(stage: Stage) -> None:
    def begin() -> Any:
        one, other = (Shipment.objects.create(note="").pk for _ in range(2))

        def append_to(*keys: int) -> None:
            with database.transaction(database.alias()):
                for key in keys:
                    execute("UPDATE tests_shipment SET note = note || '+' WHERE id = %s", key)

        both = [[functools.partial(append_to, one, other)], [functools.partial(append_to, other, one)]]
        return both, lambda run: None

    with pytest.raises(Broken, match="everybody waits for everybody") as broken:
        list(every_schedule(stage, Scene("two in opposite order", begin)))
    assert broken.value.choices == [1, 0, 0, 1] or broken.value.choices == [0, 1, 0, 1]
