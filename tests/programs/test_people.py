"""Program (c): a backfill over a table that goes on growing, throttled, ended by a pass that finds nothing."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from durable_jobs import service
from durable_jobs.reconciler import Reconciler
from durable_jobs.runner import SliceContext
from durable_jobs.testing import finish, interrupt_after, kill_after, run, run_slice, started
from tests.connections import OtherConnection
from tests.processes import Processes
from tests.programs.people.jobs import BackfillEmail, normalized
from tests.programs.people.models import Person

PEOPLE = 85
POISON = "x@" + "ü" * 70 + ".example"


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackfillEmail, "batch_size", 10)


def add_people(count: int = PEOPLE, prefix: str = "p") -> None:
    Person.objects.bulk_create(Person(email=f" {prefix}{n}@BÜCHER.example ") for n in range(count))


def assert_all_normalized(count: int = PEOPLE) -> None:
    assert Person.objects.count() == count
    for person in Person.objects.all():
        assert person.email_normalized == normalized(person.email)


def test_the_address_is_normalized() -> None:
    assert normalized(" Ann.Lee@BÜCHER.example ") == "ann.lee@xn--bcher-kva.example"


class TestBackfill:
    def test_it_fills_every_row_and_ends(self, db: None) -> None:
        add_people()
        job = run(BackfillEmail)
        assert (job.status, job.processed_count) == ("completed", PEOPLE)
        assert_all_normalized()

    @pytest.mark.parametrize("block", [interrupt_after, kill_after])
    def test_stopped_after_each_batch_it_repeats_and_skips_nothing(
        self, db: None, monkeypatch: pytest.MonkeyPatch, block: Any
    ) -> None:
        add_people()
        touched: list[Any] = []
        monkeypatch.setattr(
            "tests.programs.people.jobs.normalized", lambda email: touched.append(email) or normalized(email)
        )
        with block(1):
            job = run(BackfillEmail)
        assert (job.status, job.processed_count) == ("completed", PEOPLE)
        assert len(touched) == len(set(touched)) == PEOPLE
        assert_all_normalized()

    def test_rows_inserted_meanwhile_are_found_wherever_their_keys_fall(self, db: None) -> None:
        """Their keys are random: some come before the cursor, some behind the end of the pass."""
        add_people()
        job = service.start(BackfillEmail).job
        with interrupt_after(1):
            for number in range(6):
                run_slice(job)
                add_people(7, prefix=f"late{number}-")
        finish(job)
        assert_all_normalized(PEOPLE + 6 * 7)

    def test_it_waits_between_batches_outside_the_transaction(
        self, transactional_db: None, second_connection: OtherConnection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While it waits, others may write the rows of the batch: what they write is what is normalized."""
        add_people(20)
        waits = BackfillEmail.before_batch
        waited: list[int] = []

        def edited_while_it_waits(self: Any, ctx: SliceContext, batch: list[Person]) -> None:
            waits(self, ctx, batch)
            waited.append(len(batch))
            second_connection.run(Person.objects.filter(email__contains="p3@").update, email="new@x.example")

        monkeypatch.setattr(BackfillEmail, "before_batch", edited_while_it_waits)
        assert run(BackfillEmail).status == "completed"
        assert waited == [10, 10]
        assert Person.objects.get(email="new@x.example").email_normalized == "new@x.example"
        assert_all_normalized(20)

    def test_a_poison_row_is_skipped_recorded_and_left_for_the_next_job(self, db: None) -> None:
        add_people()
        poison = Person.objects.create(email=POISON)
        job = run(BackfillEmail)
        assert job.status == "completed"
        poison.refresh_from_db()
        assert poison.email_normalized is None
        for event in job.events.filter(event="item_skipped"):
            assert str(poison.pk) in event.data["item"]
            assert "label empty or too long" in event.message
        Person.objects.filter(pk=poison.pk).update(email="mended@x.example")
        assert run(BackfillEmail).processed_count == 1
        assert_all_normalized(PEOPLE + 1)

    def test_the_command_starts_one_at_a_time(self, db: None) -> None:
        out = StringIO()
        call_command("backfill_email", stdout=out)
        call_command("backfill_email", stdout=out)
        (job,) = started(BackfillEmail)
        assert out.getvalue().splitlines() == [f"Started: job {job.id}", f"At work already: job {job.id}"]
        finish(job)
        call_command("backfill_email", stdout=out)
        assert len(started(BackfillEmail)) == 2


class TestKill:
    def test_sigkill_inside_a_batch_leaves_nothing_of_it(
        self, processes: Processes, transactional_db: None
    ) -> None:
        add_people()
        job = service.start(BackfillEmail).job
        doomed = processes.python(KILLED_INSIDE_A_BATCH, str(job.id))
        assert doomed.wait() == -9, doomed.output
        assert Person.objects.exclude(email_normalized=None).count() == 30
        assert Reconciler("tests").repair_dead("doomed").redriven == 1
        assert finish(job).processed_count == PEOPLE
        assert_all_normalized()


KILLED_INSIDE_A_BATCH = """
import os, signal, sys, uuid
from durable_jobs import store
from durable_jobs.runner import run_slice
from tests.programs.people.jobs import BackfillEmail

BackfillEmail.batch_size = 10
process, batches = BackfillEmail.process, []

def dies(self, ctx, batch):
    process(self, ctx, batch)
    batches.append(batch)
    if len(batches) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

BackfillEmail.process = dies
run_slice(store.claim(uuid.UUID(sys.argv[1]), 0, 0, "doomed", 60), owner="doomed")
"""
