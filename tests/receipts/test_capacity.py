"""Limits on running jobs: by hand, and of kinds that workers run. Dead leases count, whoever asks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from durable_jobs import explain, kinds, receipts, runner, service, store
from durable_jobs.exceptions import InvalidInput, NotReclaimable
from durable_jobs.kinds import Done, Kind
from durable_jobs.manager import JobManager
from durable_jobs.models import Job, Scope, uuid7
from durable_jobs.receipts import Submission
from durable_jobs.store import Lease
from durable_jobs.testing import make_job, register_for_test, run_slice
from durable_jobs.transports.database import Claimer
from durable_jobs.worker import Worker
from tests.connections import OtherConnection
from tests.postgres import wait_until
from tests.processes import Processes
from tests.receipts import acts
from tests.receipts.acts import HOME, KIND, age, context, ended, everything, expired, job_of, owned, read

pytestmark = pytest.mark.django_db(transaction=True)

OTHER = Scope("umbrella")


class Limited(Kind):
    name = "tests.limited"
    aliases = ("tests.once_limited",)
    queue = "limited"
    max_running = 2
    lease_seconds = 30

    def step(self, ctx: Any) -> Done:
        return Done()


class Free(Kind):
    name = "tests.free"
    queue = "limited"

    def step(self, ctx: Any) -> Done:
        return Done()


@pytest.fixture
def limited() -> Iterator[None]:
    with register_for_test(Limited, Free):
        yield


def start(count: int = 1, kind: type[Kind] = Limited, scope: Scope = HOME, **options: Any) -> list[UUID]:
    return [service.start(kind, scope=scope, **options).job.id for _ in range(count)]


def running(scope: Scope = HOME) -> int:
    return Job.objects.in_scope(scope).filter(status="running", lease_owner__isnull=False).count()


# --- by hand ----------------------------------------------------------------------------------------------


def test_the_limit_counts_what_runs_in_the_scope() -> None:
    """A62, A63: named in the refusal; held and ended work, and other scopes, do not count."""
    ended("failed")
    receipts.defer(KIND, Submission("held", "{}"), scope=HOME)
    receipts.begin(context(scope=OTHER), "{}", max_running=2)
    for _ in range(2):
        receipts.begin(context(), "{}", max_running=2)
    before = everything()
    with pytest.raises(InvalidInput, match=r"is reached: 2 jobs run \(given: 2\)") as refused:
        receipts.begin(context(), "{}", max_running=2)
    assert refused.value.code == "E_JOB_INPUT_INVALID" and everything() == before


def test_a_dead_lease_counts_and_may_be_taken_over_at_the_limit() -> None:
    """A63: the job that is claimed is not counted twice."""
    dead, job = expired(key="k1"), owned()
    assert job_of(job).ownership == "current"
    with pytest.raises(InvalidInput):
        receipts.begin(context(), "{}", max_running=2)
    held = receipts.defer(KIND, Submission("k2", "{}"), scope=HOME)
    with pytest.raises(InvalidInput):
        receipts.claim(held.id, context("k2"), max_running=2)
    receipts.claim(job_of(dead).id, context("k1"), max_running=2)
    failed = ended("failed", key="k3")
    with pytest.raises(InvalidInput):
        receipts.retry_atomically(failed.id, context("k3"), lambda _: "1", max_running=2)
    receipts.retry_atomically(failed.id, context("k3"), lambda _: "1", max_running=3)


def test_a_repeat_at_the_limit_is_no_new_job() -> None:
    """A21, T20."""
    first = receipts.begin(context("k1"), "{}", max_running=1)
    again = receipts.begin(context("k1"), "{}", max_running=1)
    assert (again.job.id, again.ctx) == (first.job.id, None)


def test_deferring_needs_no_capacity() -> None:
    """A59."""
    manager = JobManager(HOME, max_jobs=1)
    owned()
    stop = threading.Event()
    try:
        with pytest.raises(InvalidInput, match="max_jobs"):
            manager.start_job("any", lambda _: stop.wait(5), Submission("k1", "{}"))
        held = manager.defer_job("any", Submission("k1", "{}"))
        with pytest.raises(InvalidInput, match="max_jobs"):
            manager.resume_job(held, lambda _: None)
        assert read(held).status == "held"
    finally:
        stop.set()


def test_a_kinds_own_limit_holds_by_hand_as_well(limited: None) -> None:
    """C24: whoever runs them."""
    start(2)
    assert len(Claimer("w").claim(5)) == 2
    manager = JobManager(HOME)
    with pytest.raises(InvalidInput, match="max_running"):
        manager.start_job(Limited.name, lambda _: None)
    held = service.start(Limited, {"n": 1}, scope=HOME, hold=True).job
    with pytest.raises(InvalidInput, match="max_running"):
        manager.resume_job(held.id, lambda _: None)
    with pytest.raises(InvalidInput, match="max_running"):
        receipts.begin(context(kind="tests.once_limited"), "{}")


def test_a_larger_limit_of_the_caller_lifts_no_kinds_own(limited: None) -> None:
    """C24: the lesser of both, whoever asks."""
    jobs = [receipts.defer(Limited.name, Submission(key, "{}"), scope=HOME) for key in ("h1", "h2", "h3")]
    for job in jobs[:2]:
        receipts.claim(job.id, context(job.idempotency_key, kind=Limited.name), max_running=50)
    third = context("h3", kind=Limited.name)
    with pytest.raises(InvalidInput, match=r"2 jobs run \(given: 2\)"):
        receipts.claim(jobs[2].id, third, max_running=50)
    with pytest.raises(InvalidInput, match=r"2 jobs run \(given: 1\)"):
        receipts.claim(jobs[2].id, third, max_running=1)
    with pytest.raises(InvalidInput, match="max_running"):
        receipts.begin(context(kind=Limited.name), "{}", max_running=50)
    assert running() == 2


def race(count: int, act: Any) -> list[Any]:
    barrier, answers = threading.Barrier(count), []

    def run(number: int) -> None:
        try:
            barrier.wait(10)
            answers.append(act(number))
        except InvalidInput as refusal:
            answers.append(refusal)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


@pytest.mark.parametrize("way", ["begin", "claim", "retry"])
def test_five_at_once_with_a_limit_of_two(way: str) -> None:
    """A64, T21: inserted, claimed or retried."""
    keys = [acts.new_key() for _ in range(5)]
    jobs = []
    if way == "claim":
        jobs = [receipts.defer(KIND, Submission(key, acts.INPUT), scope=HOME) for key in keys]
    if way == "retry":
        jobs = [ended("failed", key=key) for key in keys]

    def act(number: int) -> Any:
        if way == "begin":
            return receipts.begin(context(keys[number]), "{}", max_running=2)
        if way == "claim":
            return receipts.claim(jobs[number].id, context(keys[number]), max_running=2)
        return receipts.retry_atomically(jobs[number].id, context(keys[number]), lambda _: "1", max_running=2)

    answers = race(5, act)
    assert len(answers) == 5 and sum(isinstance(answer, InvalidInput) for answer in answers) == 3
    assert running() == 2


@pytest.mark.postgres_only
@pytest.mark.parametrize("way", ["begin", "claim", "retry", "start", "deliver"])
def test_a_project_of_repeatable_reads_is_held_to_the_limit(limited: None, way: str) -> None:
    """A64, T21, P16: what is counted under the lock is what others have committed."""
    keys = [acts.new_key() for _ in range(6)]
    jobs: list[Any] = []
    if way == "claim":
        jobs = [receipts.defer(KIND, Submission(key, acts.INPUT), scope=HOME) for key in keys]
    if way == "retry":
        jobs = [ended("failed", key=key) for key in keys]
    if way == "deliver":
        jobs = start(6)
    stop, managers = threading.Event(), [JobManager(HOME, max_jobs=2) for _ in keys]

    def act(number: int) -> Any:
        acts.rows.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        key = context(keys[number])
        if way == "begin":
            return receipts.begin(key, "{}", max_running=2)
        if way == "claim":
            return receipts.claim(jobs[number].id, key, max_running=2)
        if way == "retry":
            return receipts.retry_atomically(jobs[number].id, key, lambda _: "1", max_running=2)
        if way == "start":
            return managers[number].start_job("any", lambda _: stop.wait(20))
        while (answer := deliver(jobs[number])) is store.BUSY:
            time.sleep(0.002)
        return answer

    try:
        answers = race(6, act)
        assert len(answers) == 6 and running() == 2, answers
    finally:
        stop.set()
        for manager in managers:
            wait_until(lambda manager=manager: not manager._runs, 20, "executors left")


# --- kinds that workers run -------------------------------------------------------------------------------


def test_no_more_of_a_kind_are_claimed_than_may_run(limited: None) -> None:
    """P22, C24: in each scope so many, by all names of the kind; other kinds are not held up."""
    start(5), start(5, scope=OTHER), start(3, kind=Free)
    acts.rows.execute("UPDATE durable_jobs_job SET kind = 'tests.once_limited' WHERE id = %s", start(1)[0])
    claimer = Claimer("w1")
    claimed = claimer.claim(20)
    assert sorted(job.kind for job in claimed if job.kind == "tests.free") == ["tests.free"] * 3
    assert running() == 2 + 3 and running(OTHER) == 2
    assert Claimer("w2").claim(20) == [] == claimer.claim(20)


def test_priority_and_limit_go_together(limited: None) -> None:
    """Higher first, whether or not a kind has a limit."""
    (low,) = start(1, kind=Free, priority=-1)
    (high,) = start(1, priority=9)
    (middle,) = start(1, kind=Free, priority=3)
    claimer = Claimer("w")
    assert [job.id for job in claimer.claim(1)] == [high]
    assert [job.id for job in claimer.claim(1)] == [middle]
    assert [job.id for job in claimer.claim(1)] == [low]


def test_a_scope_that_is_full_holds_no_other_up(limited: None) -> None:
    """A long backlog of one scope in front of another's single job."""
    start(40)
    claimer = Claimer("w")
    assert len(claimer.claim(10)) == 2
    (theirs,) = start(1, scope=OTHER)
    assert [job.id for job in Claimer("other").claim(10)] == [theirs]
    later = start(1, scope=Scope("third"))
    deadline = time.monotonic() + 3
    while not (found := claimer.claim(10)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [job.id for job in found] == later


def test_a_dead_worker_keeps_its_places_until_it_is_repaired(limited: None) -> None:
    """A63, C24."""
    start(4)
    dead = Claimer("dead").claim(5)
    for job in dead:
        age(job.id, 3600)
    claimer = Claimer("w")
    assert claimer.claim(5) == [] and running() == 2
    assert store.give_back(Lease(dead[0].id, "dead", dead[0].lease_epoch, 30)) is not None
    claimer.heard(None)
    claimer._full.clear()
    assert len(claimer.claim(5)) == 1 and running() == 2


def test_an_end_seen_here_makes_room_at_once(limited: None) -> None:
    start(3)
    claimer = Claimer("w")
    first, _second = claimer.claim(5)
    assert claimer.claim(5) == []
    with transaction.atomic():
        done = store.complete(Lease(first.id, "w", first.lease_epoch, 30), None)
    assert done is not None
    claimer.expect(done)
    assert len(claimer.claim(5)) == 1 and running() == 2


@pytest.mark.postgres_only
def test_while_somebody_counts_the_others_pass_by(limited: None, second_connection: OtherConnection) -> None:
    """P22: nobody waits for the count of another."""
    start(2), start(1, scope=OTHER)
    second_connection.enter(transaction.atomic())
    second_connection.run(store.wait_lock, store.capacity_lock(Limited.name, HOME))
    began = time.monotonic()
    claimed = Claimer("w").claim(5)
    assert time.monotonic() - began < 1 and [job.scope for job in claimed] == [OTHER]
    second_connection.leave()
    claimer = Claimer("w2")
    assert len(claimer.claim(5)) == 2


CHILD = """
import sys
from durable_jobs import kinds
from tests.receipts.test_capacity import Limited, churn
kinds.register(Limited)
sys.exit(churn(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
"""


def churn(threads: int, claims: int, name: str) -> int:
    """Claim, look how many run, and let go, in so many threads until so many were claimed. 0 when all was well.

    A third of the threads polls, one claims as a broker's deliveries do, by identity, one works by hand.
    """
    guard, done, exceeded, until = threading.Lock(), [0, 0, 0], [0], time.monotonic() + 60

    def poll(owner: str) -> Callable[[], list[Job]]:
        claimer = Claimer(owner)

        def claimed() -> list[Job]:
            claimer._full.clear()
            claimer.heard(None)
            return claimer.claim(3)

        return claimed

    def deliver(owner: str) -> Callable[[], list[Job]]:
        def claimed() -> list[Job]:
            waiting = list(Job.objects.filter(status="pending"))
            job = random.choice(waiting)
            answer = runner.claim(job.id, job.continuation_seq, job.redrives, owner=owner)
            return [answer] if isinstance(answer, Job) else []

        return claimed

    def by_hand(owner: str) -> Callable[[], list[Job]]:
        def claimed() -> list[Job]:
            ctx = replace(context(kind=Limited.name), idempotency_key=None)
            try:
                return [receipts.begin(ctx).job]
            except InvalidInput:
                return []

        return claimed

    def work(owner: str, way: int) -> None:
        claim = (poll, deliver, by_hand)[way](owner)
        try:
            while (sum(done) < claims or min(done) < 2) and time.monotonic() < until:
                claimed = claim()
                found = running() if claimed else 0
                with guard:
                    done[way] += len(claimed)
                    exceeded[0] = max(exceeded[0], found)
                for job in claimed:
                    lease = Lease(job.id, job.lease_owner or "", job.lease_epoch, 30)
                    if way == 2:
                        with transaction.atomic():
                            assert store.complete_owned(lease, None, late=True)
                    else:
                        assert store.yield_slice(lease)
                # Who works by hand waits for the count, and so would leave none to those who only try for it.
                time.sleep(0.03 if way == 2 else 0.001)
        finally:
            connection.close()

    workers = [
        threading.Thread(target=work, args=[f"{name}:{number}", number % 3]) for number in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{done} claimed, at most {exceeded[0]} at once", flush=True)
    return 0 if exceeded[0] <= 2 and sum(done) >= claims and min(done) >= 2 else 1


def test_two_processes_and_twelve_threads_never_exceed_the_limit(limited: None, processes: Processes) -> None:
    """P22: a limit of 2, by poll, by delivery and by hand; one of the places is a dead lease's throughout."""
    start(30)
    (corpse,) = Claimer("dead").claim(1)
    age(corpse.id, 3600)
    children = [processes.python(CHILD, "6", "25", f"process-{number}") for number in range(2)]
    most = 0
    while any(child.running for child in children):
        most = max(most, running())
        time.sleep(0.01)
    for child in children:
        assert child.wait(20) == 0, child.output
    assert most <= 2 and running() == 1
    assert sum(Job.objects.values_list("attempts", flat=True)) >= 50


def deliver(job_id: UUID, owner: str = "broker") -> Any:
    job = read(job_id)
    return runner.claim(job.id, job.continuation_seq, job.redrives, owner=owner)


def test_a_delivery_is_held_to_the_limit_too(limited: None) -> None:
    """P22, C24: refused as full it waits as it was, and is found again when there is room."""
    first, second, third = start(3)
    (theirs,) = start(1, scope=OTHER)
    for job_id in (first, second, theirs):
        assert deliver(job_id).status == "running"
    before = everything()
    assert deliver(third) is store.FULL and everything() == before
    done = read(first)
    with transaction.atomic():
        assert store.complete(Lease(first, "broker", done.lease_epoch, 30), None)
    assert deliver(third).status == "running" and running() == 2


def test_a_dead_lease_keeps_a_delivery_out(limited: None) -> None:
    """A63; a job that waits for its retry has no owner, and its own place is not counted."""
    first, second, third = start(3)
    corpse = deliver(first)
    age(corpse.id, 3600)
    claimed = deliver(second)
    assert deliver(third) is store.FULL
    released = store.release_lease(Lease(second, "broker", claimed.lease_epoch, 30), 60)
    assert released is not None and released.lease_owner is None
    assert deliver(second).attempts == 2 and running() == 2


def test_a_delivery_that_is_owed_nothing_is_refused_however_full_its_kind_is(limited: None) -> None:
    """B43: full says "later", and a stale delivery must not come back for ever."""
    first, second, third = start(3)
    stale, ended_job = read(third), make_job("completed", kind=Limited, scope=HOME)
    deliver(first), deliver(second)
    service.cancel(third, scope=HOME)
    for job in (stale, ended_job, read(first)):
        assert runner.claim(job.id, job.continuation_seq, job.redrives, owner="late") is None
    assert runner.claim(uuid7(), 0, 0, owner="late") is None
    (waiting,) = start(1)
    assert runner.claim(waiting, 1, 0, owner="late") is None
    service.pause(kind=Limited.name, reason="deploy", actor="anna")
    assert deliver(waiting) is None


@pytest.mark.postgres_only
def test_a_delivery_does_not_wait_for_somebody_elses_count(
    limited: None, second_connection: OtherConnection
) -> None:
    """P22: busy says "at once again"; what is refused for good is refused all the same."""
    (job_id,) = start(1)
    done = make_job("completed", kind=Limited, scope=HOME)
    second_connection.enter(transaction.atomic())
    second_connection.run(store.wait_lock, store.capacity_lock(Limited.name, HOME))
    began = time.monotonic()
    assert deliver(job_id) is store.BUSY and deliver(done.id) is None
    assert time.monotonic() - began < 1
    second_connection.leave()
    assert deliver(job_id).status == "running"


@pytest.mark.postgres_only
def test_a_row_that_somebody_holds_is_busy_not_full(
    limited: None, second_connection: OtherConnection
) -> None:
    """P17."""
    (job_id,) = start(1)
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: Job.objects.select_for_update().get(pk=job_id))
    assert deliver(job_id) is store.BUSY
    second_connection.leave()


def test_the_test_kit_is_held_to_the_limit(limited: None) -> None:
    """`run_slice` claims by identity."""
    for _ in range(2):
        make_job("running", kind=Limited, scope=HOME)
    (job_id,) = start(1)
    with pytest.raises(NotReclaimable, match="max_running"):
        run_slice(read(job_id))
    assert read(job_id).status == "pending"


def test_a_delivery_of_a_kind_without_limit_pays_nothing(
    limited: None,
) -> None:
    """One look at the row, one statement that claims."""
    (job_id,) = start(1, kind=Free)
    with CaptureQueriesContext(connection) as captured:
        assert runner.claim(job_id, 0, 0, owner="w").status == "running"  # type: ignore[union-attr]
    on_jobs = [query["sql"] for query in captured.captured_queries if "durable_jobs_job" in query["sql"]]
    assert len(on_jobs) == 2 and not any("count(*)" in sql for sql in on_jobs)
    if connection.vendor == "postgresql":
        assert len(captured.captured_queries) == 2


def test_a_worker_runs_a_limited_kind_to_its_end() -> None:
    """All of them, two at a time."""
    guard, at_once, most = threading.Lock(), [0], [0]

    class Counting(Kind):
        name = "tests.counting"
        max_running = 2

        def step(self, ctx: Any) -> Done:
            with guard:
                at_once[0] += 1
                most[0] = max(most[0], at_once[0])
            time.sleep(0.02)
            with guard:
                at_once[0] -= 1
            return Done()

    with register_for_test(Counting):
        jobs = [service.start(Counting, scope=HOME).job.id for _ in range(8)]
        assert Worker(concurrency=5, until_idle=True).run() == 0
    assert {read(job_id).status for job_id in jobs} == {"completed"}
    assert most[0] == 2


def test_a_job_that_waits_for_its_kinds_limit_says_so(limited: None) -> None:
    """F: "why does it not run?" has an answer."""
    ids = start(3)
    Claimer("w").claim(5)
    waiting = [job_id for job_id in ids if read(job_id).status == "pending"]
    store.worker_started("w", host="h", pid=1, queues=[], kinds=[], concurrency=4)
    (reason,) = explain.explain(read(waiting[0]))
    assert reason.code == "full" and "2 jobs of its kind run" in reason.sentence
    acts.tamper(waiting[0])
    (changed,) = explain.explain(read(waiting[0]))
    assert changed.code == "input_changed" and "do not match" in changed.sentence


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "2", 1_000_001])
def test_a_kinds_limit_is_a_positive_whole_number(most: Any) -> None:
    """A62."""
    with pytest.raises(kinds.InvalidKind, match="max_running"):
        kinds.register(type("Bad", (Limited,), {"name": "tests.bad", "aliases": (), "max_running": most}))


def test_other_kinds_of_the_worker_pay_nothing_for_it(
    limited: None, django_assert_max_num_queries: Any
) -> None:
    """A worker without due limited work claims in one statement."""
    start(3, kind=Free)
    claimer = Claimer("w")
    claimer.claim(0)
    claimer._sweep()
    with django_assert_max_num_queries(9):
        assert len(claimer.claim(5)) == 3


def test_make_job_is_not_bounded(limited: None) -> None:
    """The test kit's rows are what a test says."""
    for _ in range(4):
        make_job("running", kind=Limited, scope=HOME)
    assert running() == 4
