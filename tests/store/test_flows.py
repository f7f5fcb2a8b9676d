"""Whole lives of jobs, verb by verb: every legal flow, with what must never change looked at after each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from durable_jobs import store
from durable_jobs.exceptions import ErrorClass, ErrorFacts
from durable_jobs.jsontext import sha256
from durable_jobs.models import Job, Scope, uuid7
from durable_jobs.store import BUSY, Beat, Counts, Lease, NewJob
from tests.store.rows import GRACE, INPUT, ago, execute, image, letters, orphan_on, post_letter, user

pytestmark = pytest.mark.django_db

SCOPE = Scope("acme", "north")

FLOWS = {
    "one slice": "start claim complete",
    "three slices": "start claim commit yield claim commit yield claim commit complete",
    "a deploy": "start claim commit drain claim complete",
    "claimed and not begun": "start claim give_back claim complete",
    "retries until it works": "start claim fail claim fail claim commit complete",
    "retries until they are used up": "start claim fail claim fail claim fail:last claim end_failed",
    "the decision is tried again": "start claim fail:unrecoverable claim release claim give_back claim end_failed",
    "a decided job whose worker dies": "start claim fail:terminal claim expire park_orphan",
    "a terminal error": "start claim fail:terminal end_failed redrive claim complete",
    "an unrecoverable error": "start claim fail:unrecoverable end_failed force claim complete",
    "an unrecoverable error, refused": "start claim fail:unrecoverable end_failed !redrive",
    "no completing over a verdict": "start claim fail:terminal claim !complete end_failed",
    "parked by its step": "start claim park redrive claim complete",
    "its worker dies": "start claim commit expire take claim complete",
    "its worker dies and dies": "start claim expire take claim expire take claim expire park_orphan force claim complete",
    "its supervisor reports the death": "start claim take:dead claim cancel_running",
    "from the start again": "start claim commit fail:terminal end_failed restart claim complete",
    "an operator does not wait for the retry": "start claim fail redrive claim complete",
    "an operator redrives an orphan": "start claim expire redrive claim complete",
    "cancelled before it began": "start request cancel_waiting",
    "cancelled while held": "start:held request cancel_waiting",
    "cancelled between retries": "start claim fail request cancel_waiting",
    "cancelled while it runs": "start claim request cancel_running",
    "cancelled with a verdict on it": "start claim fail:unrecoverable claim request cancel_running",
    "cancelled by letter before the claim": "start letter claim cancel_running",
    "cancelled by letter, then handed back": "start claim letter yield cancel_waiting",
    "cancelled by letter, folded in": "start claim letter fold cancel_running",
    "cancelled when its worker is dead": "start claim letter expire cancel_orphan",
    "cancelled too late": "start claim request complete !cancel_waiting !redrive !force",
    "a step that cancels itself": "start claim cancel_running",
    "a late request does not outlive a redrive": "start claim letter fail:terminal end_failed redrive claim complete",
    "a redrive of a failed cancel": "start claim request end_failed redrive claim yield claim complete",
    "progress keeps nothing alive": "start claim progress expire take claim complete",
    "every end is the end": "start claim complete !claim !yield !fail !commit !end_failed !cancel_running !take",
}  # fmt: skip


@pytest.mark.parametrize("steps", FLOWS.values(), ids=FLOWS.keys())
def test_a_life(steps: str) -> None:
    """Every CHECK holds at every step, and A9, A10, B35, B44, B111 with them; `!verb` has to be refused."""
    life = Life()
    for step in steps.split():
        verb, _, option = step.removeprefix("!").partition(":")
        before = image(life.id) if life.begun else None
        answer = getattr(life, verb)(*([option] if option else []))
        refused = answer is None or answer is False or answer is BUSY
        assert refused == step.startswith("!"), f"{step} in {steps!r}: {answer!r}"
        if refused:
            assert image(life.id) == before, step
        life.look(before)


class Life:
    """One job, its present lease, and all those that it has had."""

    def __init__(self) -> None:
        self.id = uuid7()
        self.begun = False
        self.leases: list[Lease] = []
        self._owners = (f"worker-{number}" for number in range(100))

    # the verbs

    def start(self, status: str = "pending") -> Any:
        self.begun = True
        return store.insert(
            NewJob(
                self.id, "tests.work", status, *_parts(SCOPE), "queue", INPUT, sha256(INPUT),
                idempotency_key="once", lock_key="ledger",
            )
        )  # fmt: skip

    def claim(self) -> Any:
        row = image(self.id)
        job = store.claim(self.id, row["continuation_seq"], row["redrives"], next(self._owners), 60)
        if isinstance(job, Job):
            assert job.lease_owner
            self.leases.append(Lease(self.id, job.lease_owner, job.lease_epoch, 60))
        return job

    def commit(self) -> Any:
        answer = store.write_checkpoint(self.lease, '{"at": 1}', Counts(processed=1))
        return None if answer is None else "committed"

    def progress(self) -> Any:
        answer = store.set_progress(self.lease, Counts(message="half"))
        return None if answer is None else "noted"

    def fail(self, how: str = "transient") -> Any:
        error_class = ErrorClass.TRANSIENT if how == "last" else ErrorClass(how)
        facts = ErrorFacts(error_class, "E1", "builtins.OSError", "no route", "")
        limit = 1 if how == "last" else 9
        return store.fail_slice(
            self.lease, facts, max_failures=limit, first_delay=5, longest_delay=300, exponential=True
        )

    def take(self, dead: str = "") -> Any:
        return store.take_orphan(orphan_on(self.id), grace=GRACE, delay=0, dead=bool(dead))

    def redrive(self, **options: bool) -> Any:
        return store.redrive(self.id, scope=SCOPE, grace=GRACE, **options)

    def park(self) -> Any:
        facts = ErrorFacts(ErrorClass.TERMINAL, "by_hand", "Park", "look at it", "")
        return store.fail_terminal(self.id, self.lease.epoch, facts, parked=True)

    def request(self) -> Any:
        return store.request_cancel(self.id, scope=SCOPE)

    def letter(self) -> bool:
        post_letter(self.id)
        return True

    def expire(self) -> bool:
        execute("UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", ago(GRACE + 60), self.id)
        return True

    def __getattr__(self, verb: str) -> Any:
        lease = self.lease
        plain = {
            "yield": lambda: store.yield_slice(lease),
            "drain": lambda: store.yield_slice(lease, interrupted=True),
            "give_back": lambda: store.give_back(lease),
            "release": lambda: store.release_lease(lease, 0),
            "complete": lambda: store.complete(lease, None),
            "end_failed": lambda: store.fail_terminal(self.id, image(self.id)["lease_epoch"]),
            "cancel_running": lambda: store.cancel_running(self.id, image(self.id)["lease_epoch"]),
            "cancel_waiting": lambda: store.cancel_waiting(self.id),
            "fold": lambda: store.fold_cancel(self.id),
            "park_orphan": lambda: store.park_orphan(
                orphan_on(self.id), grace=GRACE, code="orphaned", message="gone"
            ),
            "cancel_orphan": lambda: store.cancel_orphan(orphan_on(self.id), grace=GRACE),
            "force": lambda: self.redrive(forced=True),
            "restart": lambda: self.redrive(restart=True),
        }
        return plain[verb]

    @property
    def lease(self) -> Lease:
        return self.leases[-1] if self.leases else Lease(self.id, "nobody", 0, 60)

    # what is always true

    def look(self, before: dict[str, Any] | None) -> None:
        row = image(self.id)
        assert (row["input"], row["input_sha256"]) == (INPUT, sha256(INPUT))
        holder = store.by_lock_key("ledger", SCOPE)
        assert (holder is not None) == (row["status"] in ("pending", "running"))
        for lease in self.leases:
            mine = row["lease_owner"] == lease.owner and row["lease_epoch"] == lease.epoch
            assert store.still_mine(lease) == mine
            assert store.lock_fence(lease, 30) == mine
            assert not store.still_mine(replace(lease, owner="somebody else"))
        if row["status"] in ("completed", "failed", "cancelled"):
            assert row["finished_at"] and row["domain_mirrored_at"] and not row["lease_owner"]
        if row["status"] == "cancelled":
            assert not letters().get(self.id)
        if before is None:
            return
        for column in ("created_at", "kind", "tenant_id", "organization_id", "idempotency_key", "lock_key"):
            assert row[column] == before[column], column
        for column in ("lease_epoch", "attempts", "continuation_seq", "redrives", "interruptions"):
            assert row[column] >= before[column], column
        if before["started_at"]:
            assert row["started_at"] == before["started_at"]


def _parts(scope: Scope) -> Iterator[Any]:
    return iter((scope.tenant, scope.organization))


def test_a_commit_gives_the_retries_back() -> None:
    """B75, B84: the verdict sees the counter as a commit in the same slice left it, so that long work never exhausts."""
    life = Life()
    life.start()
    for _ in range(4):
        life.claim()
        life.commit()
        job = store.fail_slice(
            life.lease, ErrorFacts(ErrorClass.TRANSIENT, None, "E", "no", ""), max_failures=2, first_delay=5,
            longest_delay=300, exponential=True,
        )  # fmt: skip
        assert job is not None and (job.verdict, job.consecutive_failures) == (None, 1)


@pytest.mark.parametrize(
    ("failures", "exponential", "delay"),
    [(0, True, 5), (1, True, 10), (4, True, 80), (5, True, 100), (40, True, 100), (2_000_000_000, True, 100),
     (0, False, 5), (6, False, 5)],
)  # fmt: skip
def test_the_delay_doubles_up_to_its_limit(failures: int, exponential: bool, delay: float) -> None:
    """B80, P19: the n of the backoff is the counter under the row's lock, and no count is too high for it."""
    life = Life()
    life.start()
    life.claim()
    execute("UPDATE durable_jobs_job SET consecutive_failures = %s WHERE id = %s", failures, life.id)
    job = store.fail_slice(
        life.lease, ErrorFacts(ErrorClass.TRANSIENT, None, "E", "no", ""), max_failures=3_000_000,
        first_delay=5, longest_delay=100, exponential=exponential,
    )  # fmt: skip
    assert job is not None and job.next_run_at is not None
    assert abs((job.next_run_at - ago(-delay)).total_seconds()) < 5


@pytest.mark.parametrize(
    ("reported", "failed"), [(None, "transient"), (ErrorClass.TERMINAL, "terminal")], ids=["kept", "given"]
)
def test_a_failure_keeps_what_was_told_of_it(reported: ErrorClass | None, failed: str) -> None:
    """B89: class, code and message stay when the end has none of its own."""
    life = Life()
    life.start()
    life.claim()
    life.fail()
    facts = reported and ErrorFacts(reported, None, "E", "worse", "")
    job = store.fail_terminal(life.id, life.lease.epoch, facts or None)
    assert job is not None
    assert (job.error_class, job.error_code) == (failed, "E1")
    assert job.error_message == ("worse" if reported else "no route")


def test_a_failure_that_nobody_described_is_terminal() -> None:
    life = Life()
    life.start()
    life.claim()
    job = store.fail_terminal(life.id, life.lease.epoch)
    assert job is not None and job.error_class == "terminal"


def test_counts_are_laid_over_the_row_three_ways() -> None:
    """B51: not given leaves a column alone, `total=None` says unknown, a number sets it."""
    life = Life()
    life.start()
    life.claim()
    store.set_progress(life.lease, Counts(processed=3, total=9, message="three"))
    store.set_progress(life.lease, Counts())
    row = image(life.id)
    assert (row["processed_count"], row["total_count"], row["progress_message"]) == (3, 9, "three")
    store.write_checkpoint(life.lease, counts=Counts(total=None))
    row = image(life.id)
    assert (row["processed_count"], row["total_count"]) == (3, None)
    store.write_checkpoint(life.lease, counts=Counts(processed=0, message=""))
    row = image(life.id)
    assert (row["processed_count"], row["progress_message"]) == (0, "")


def test_an_answer_tells_of_a_request() -> None:
    """B50, P11: beat, checkpoint and progress tell of a request on the row and of one in the mailbox."""
    for ask in (Life.request, Life.letter):
        life = Life()
        store.insert(NewJob(life.id, "tests.work", "pending", "acme", "north", "q", None, None))
        life.claim()
        assert store.beat_many(life.lease.owner, [life.lease]) == {life.id: Beat(True, True, False, False)}
        assert store.write_checkpoint(life.lease) is False
        assert store.set_progress(life.lease, Counts()) is False
        assert ask(life)
        assert store.beat_many(life.lease.owner, [life.lease]) == {life.id: Beat(True, True, True, False)}
        assert store.write_checkpoint(life.lease) is True
        assert store.set_progress(life.lease, Counts()) is True


def test_the_first_request_counts() -> None:
    """B97, A48: later ones change neither its time nor its user."""
    life = Life()
    life.start()
    assert store.request_cancel(life.id, scope=SCOPE, user=user("ann")) == "stamped"
    first = image(life.id)
    assert store.request_cancel(life.id, scope=SCOPE, user=user("bob")) == "stamped"
    assert image(life.id) == first
    assert first["cancelled_by_id"] == user("ann") and first["status"] == "pending"


def test_ended_jobs_take_no_request() -> None:
    """A47, B107: a late request answers nothing, whoever asks."""
    life = Life()
    life.start()
    life.claim()
    life.complete()
    before = image(life.id)
    assert store.request_cancel(life.id, scope=SCOPE) is None
    assert store.request_cancel(life.id, scope=None) is None
    assert store.request_cancel(UUID(int=7), scope=None) is None
    assert image(life.id) == before and not letters()
