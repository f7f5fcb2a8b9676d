"""The state machine: acts at random on real rows and on the chart, and after each what must hold."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Final, TypeVar
from uuid import UUID

from django.db import connection
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from durable_jobs import database, receipts, service, store
from durable_jobs.exceptions import DurableJobsError, ErrorClass, ErrorFacts
from durable_jobs.kinds import Retry
from durable_jobs.models import Job, Scope
from durable_jobs.receipts import AttemptOutcome, ExecutionContext, Finalized, Submission
from durable_jobs.reconciler import Reconciler
from durable_jobs.store import Lease, Orphan, Probe
from tests.model import hands as people
from tests.model.chart import (
    AGREES,
    CANCELLED,
    ENDED,
    FAILED,
    GRACE,
    HELD,
    LEASE,
    OPEN,
    QUEUE,
    RUNNING,
    TENANT,
    Chart,
    Grip,
    Pause,
    Row,
    Rules,
    Slice,
    Watch,
)
from tests.model.hands import ENDS, Executor, Hand, Hooks, Manager, Process, Undo, advance
from tests.models import Shipment
from tests.store.rows import post_letter

RULES: Final = (
    Rules("model.ship", "redrive", 2, 3, 10, 30, True, hooks=True),
    Rules("model.bank", "park", 3, 2, 10, 10, False, hooks=True),
    Rules("model.plain", "redrive", 1, 2, 20, 300, True, hooks=False),
)
BY_HAND: Final = Rules("model.by_hand", "park", 3, 3, 5, 5, False, hooks=False, known=False)
PAUSES: Final[tuple[Pause, ...]] = (
    *(("", rules.name, "") for rules in RULES),
    (QUEUE, "", ""),
    (QUEUE, RULES[0].name, ""),
    ("", "", TENANT),
    ("", RULES[2].name, TENANT),
    ("", "", ""),
    ("another", "", ""),
    (QUEUE, RULES[0].name, "another"),
)
INPUT: Final = '{"at":1}'
SCOPE: Final = Scope(TENANT)
FACTS: Final = ErrorFacts(ErrorClass.TRANSIENT, "E1", "builtins.OSError", "no route", "")
MOST_LATE: Final = 6
"""Leases, grips and sightings of old that are kept, so that somebody may still act on them."""
MOST_JOBS: Final = 8
TOLERANCE: Final = 4.5
"""Seconds by which a time on a row may differ from the chart's."""
A_MOMENT: Final = 0.005
"""Added whenever the clock moves on, so that what is due at that very second is past."""
MOST_SECONDS: Final = 3.0
"""Real time after which an example does nothing more: times differ by 5 s at least, a busy machine must not pass them."""

ACTS: Final = tuple(
    f"{10 * 'work '}start start start cancel cancel redrive redrive release settle pause weather beat beat deliver"
    " claim_and_lose_the_answer freeze freeze open_fence open_fence close_fence close_fence kill tick tick tick repair_dead"
    " late_write late_write late_write sight act_late seize letter by_hand by_hand by_hand by_hand by_hand manage manage manage"
    " wait wait wait".split()
)
"""What may happen next, the likely things more than once. All in one rule: Hypothesis leaves out half of the rules
in each example, and a life needs all of them."""
PLANNED: Final = ("commit", "commit", "commit", "checkpoint", "progress", "undo")
ENDINGS: Final = ("done", "done", "transient", *ENDS, *(14 * ("goes on",)))

One = TypeVar("One")

TABLES: Final = (
    "durable_jobs_job", "durable_jobs_event", "durable_jobs_cancelrequest", "durable_jobs_pause",
    "durable_jobs_worker", "tests_shipment",
)  # fmt: skip
TIMES: Final = (
    "created_at", "updated_at", "next_run_at", "pending_since", "lease_expires_at", "heartbeat_at",
    "claimed_at", "cancel_requested_at", "finished_at", "parked_at",
)  # fmt: skip

_LOOK: Final = {
    "postgresql": """
        SELECT j.id, j.status, j.lease_owner, j.lease_epoch, j.continuation_seq, j.redrives, j.attempts,
            j.verdict, j.redrives_since_commit, j.consecutive_failures, j.mirror_attempts, j.interruptions,
            j.cancel_requested_at IS NOT NULL,
            EXISTS (SELECT 1 FROM durable_jobs_cancelrequest m WHERE m.job_id = j.id),
            CASE WHEN j.parked_at IS NOT NULL THEN j.error_code END, j.domain_mirrored_at IS NOT NULL,
            j.checkpoint, s.status, s.note,
            extract(epoch FROM j.next_run_at - clock_timestamp())::float8,
            extract(epoch FROM j.lease_expires_at - clock_timestamp())::float8,
            j.finished_at IS NOT NULL, j.lock_key
        FROM durable_jobs_job j LEFT JOIN tests_shipment s ON s.id = j.subject_id::bigint""",
    "sqlite": """
        SELECT j.id, j.status, j.lease_owner, j.lease_epoch, j.continuation_seq, j.redrives, j.attempts,
            j.verdict, j.redrives_since_commit, j.consecutive_failures, j.mirror_attempts, j.interruptions,
            j.cancel_requested_at IS NOT NULL,
            EXISTS (SELECT 1 FROM durable_jobs_cancelrequest m WHERE m.job_id = j.id),
            CASE WHEN j.parked_at IS NOT NULL THEN j.error_code END, j.domain_mirrored_at IS NOT NULL,
            j.checkpoint, s.status, s.note,
            (julianday(j.next_run_at) - julianday('now')) * 86400.0,
            (julianday(j.lease_expires_at) - julianday('now')) * 86400.0,
            j.finished_at IS NOT NULL, j.lock_key
        FROM durable_jobs_job j LEFT JOIN tests_shipment s ON s.id = CAST(j.subject_id AS INTEGER)""",
}
_PAPERS: Final = "SELECT note, count(*) FROM tests_shipment WHERE note LIKE '%% %%' GROUP BY note".replace(
    "%%", "%"
)
NAMES: Final = (
    "status", "owner", "epoch", "seq", "redrives", "attempts", "verdict", "orphanings", "failures",
    "hook_failures", "interruptions", "asked", "mailed", "parked", "mirrored", "checkpoint", "domain", "moved",
)  # fmt: skip


LATE: Final[dict[str, Callable[[Lease], Any]]] = {
    "beat": lambda lease: store.beat_many(lease.owner, [lease])[lease.job_id].mine,
    "beat again": lambda lease: store.beat_many(lease.owner, [lease])[lease.job_id].renewed,
    "fence": lambda lease: store.lock_fence(lease, 30.0),
    "checkpoint": lambda lease: store.write_checkpoint(lease, '"late"') is not None,
    "progress": lambda lease: store.set_progress(lease, store.Counts(processed=99)) is not None,
    "yield": lambda lease: store.yield_slice(lease),
    "give back": lambda lease: store.give_back(lease),
    "fail": lambda lease: store.fail_slice(
        lease, FACTS, max_failures=5, first_delay=5, longest_delay=9, exponential=False
    ),
    "release": lambda lease: store.release_lease(lease, 5.0),
    "complete": lambda lease: store.complete(lease, '"late"'),
    "complete many": lambda lease: store.complete_many(lease.owner, [(lease, '"late"')]),
    "fail for good": lambda lease: store.fail_terminal(lease.job_id, lease.epoch),
    "cancel": lambda lease: store.cancel_running(lease.job_id, lease.epoch),
    "renew": lambda lease: isinstance(store.renew(lease), Job),
    "percent": lambda lease: store.set_percent(lease, 50.0),
    "keep": lambda lease: store.keep_checkpoint(lease, '"late"'),
    "complete by hand": lambda lease: store.complete_owned(lease, '"late"', late=True),
    "fail by hand": lambda lease: store.fail_owned(lease, FACTS),
    "cancel by hand": lambda lease: store.cancel_owned(lease, stopped=True),
}
"""All that a lease allows, each as it is written; the answer says whether it took effect."""
BY_EPOCH: Final = ("fail for good", "cancel")
"""These ask for the epoch alone: whoever has let the lease go still decides with them."""


def kinds_of_the_machine() -> list[type]:
    """The kinds that the rules above describe."""
    made = []
    for rules in RULES:
        attributes = {
            "__module__": __name__,
            "name": rules.name,
            "orphan_policy": rules.orphan_policy,
            "max_orphanings": rules.max_orphanings,
            "lease_seconds": LEASE,
            "slice_seconds": 30,
            "allow_restart": True,
            "retry": Retry(
                rules.failures,
                rules.first_delay,
                rules.longest_delay,
                "exponential" if rules.exponential else "fixed",
            ),
        }
        base = people.Mirrored if rules.hooks else people.Obedient
        made.append(type("Made", (base,), attributes))
    return made


def empty() -> None:
    with connection.cursor() as cursor:
        deletions = [f"DELETE FROM {table}" for table in TABLES]
        for deletion in deletions if connection.vendor == "sqlite" else [";".join(deletions)]:
            cursor.execute(deletion)


def pass_time(seconds: float) -> None:
    """Let time pass for every row: whatever was to come comes sooner, what has been is longer ago."""
    if connection.vendor == "sqlite":
        shifted = "replace(strftime('%%Y-%%m-%%d %%H:%%M:%%f',{0},'{1:+.3f} seconds')||'000','.000000','')"
        parts = [f"{name} = {shifted.format(name, -seconds)}" for name in TIMES]
    else:
        parts = [f"{name} = {name} - interval '{seconds:.3f} seconds'" for name in TIMES]
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE durable_jobs_job SET {', '.join(parts)}".replace("%%", "%"))


class Machine(RuleBasedStateMachine):
    """Three workers, two reconcilers, operators, hooks that fail at times, and a clock that is moved by hand.

    Each act does the same on both sides. `compare` then compares every row with the chart, and holds the rows to
    what must be true whatever the chart says.
    """

    processes: ClassVar[list[Process]]
    steps: ClassVar[int] = 0
    outcomes: ClassVar[Counter[str]] = Counter()
    left_over: ClassVar[dict[Executor, Grip]]
    """Executors of the last example, which still wait for orders."""

    def __init__(self) -> None:
        super().__init__()
        for process in self.processes:
            process.kill()
        self.hands = [hand for process in self.processes for hand in process.hands]
        empty()
        Hooks.broken = None
        self.chart = Chart()
        self.ids: list[UUID] = []
        self.slices: dict[Hand, Slice] = {}
        self.dead: list[str] = []
        self.leases: list[tuple[Row, Lease]] = []
        self.grips: list[tuple[Grip, ExecutionContext]] = []
        self.orphans: list[tuple[Row, Orphan]] = []
        for executor in getattr(type(self), "left_over", ()):
            executor.order("die")
        self.manager = Manager(lease_seconds=LEASE, max_jobs=1000)
        self.runs: dict[Executor, Grip] = {}
        type(self).left_over = self.runs
        self.reconcilers = [Reconciler(f"mender-{n}", clock=self._monotonic) for n in range(2)]
        self.watches = [Watch(), Watch()]
        self.before: dict[UUID, tuple[Any, ...]] = {}
        self.reopened: set[UUID] = set()
        self.since = time.monotonic()
        self.sound = True
        """Nothing has failed yet: only then is it worth looking at the end of all jobs."""

    def _monotonic(self) -> float:
        return 1000.0 + self.chart.clock

    # --- choosing

    def row(self, number: int) -> Row:
        return choose(self.chart.rows, number)

    @property
    def idle(self) -> list[Hand]:
        return [hand for hand in self.hands if not hand.busy]

    @property
    def at_work(self) -> list[Slice]:
        return [slice for slice in self.slices.values() if not slice.fenced]

    @property
    def in_fence(self) -> list[Slice]:
        return [slice for slice in self.slices.values() if slice.fenced]

    def hand_of(self, slice: Slice) -> Hand:
        return next(hand for hand, held in self.slices.items() if held is slice)

    def id_of(self, row: Row) -> UUID:
        return self.ids[row.number]

    @rule(
        what=st.sampled_from(ACTS),
        one=st.integers(0, 11),
        two=st.integers(0, 11),
        plan=st.lists(st.sampled_from(PLANNED), max_size=2),
        ending=st.sampled_from(ENDINGS),
    )
    def act(self, what: str, one: int, two: int, plan: list[str], ending: str) -> None:
        """One act of one of them; what does not fit gives way to work."""
        if self.late:
            self.outcomes["not done, for lack of time"] += 1
            return
        self.sound = False
        self.outcomes[f"act {what}"] += 1
        if not self.chart.rows:
            what = "start"
        if what == "work" or not getattr(self, what)(one, two):
            self.work(one, two, [*plan, ending])

    # --- operators

    def start(self, one: int, two: int) -> bool:
        if len(self.chart.rows) == MOST_JOBS:
            return False
        rules, delay, hold = RULES[one % 3], 30 * (two in (5, 6)), two in (7, 8, 9)
        lock_key = choose([None, None, "a", "a", "b"], one)
        key = "once" if two % 4 == 1 else None
        subject = Shipment.objects.create(note="0") if rules.hooks else None
        expected = self.chart.start(rules, lock_key=lock_key, key=key, delay=delay, hold=hold)
        options: dict[str, Any] = {"run_after": timedelta(seconds=delay)} if delay else {}
        try:
            answer = service.start(
                rules.name, {"at": 1}, subject=subject, lock_key=lock_key, idempotency_key=key, hold=hold,
                **options,
            )  # fmt: skip
        except DurableJobsError as refusal:
            assert refusal.code == expected
            self.outcomes[refusal.code] += 1
            return True
        if isinstance(expected, Row):
            assert answer.created
            self.ids.append(answer.job.id)
        else:
            assert not answer.created and answer.job.id == self.id_of(expected[1])
        return True

    def cancel(self, one: int, two: int) -> bool:
        row = self.row(one)
        if row.status in ENDED and two % 3:
            return False
        self.same(self.chart.cancel(row), lambda: service.cancel(self.id_of(row), actor="anna"))
        return True

    def redrive(self, one: int, two: int) -> bool:
        likely = [row for row in self.chart.rows if row.status == FAILED or row.retrying]
        row = self.row(one) if two == 11 or not likely else choose(likely, one)
        force, restart, delay = two % 2 == 0, two % 3 == 2, 20 * (two in (4, 5))
        expected = self.chart.redrive(row, force=force, restart=restart, delay=delay)
        if expected is None:
            self.reopened.add(self.id_of(row))
        self.same(
            expected,
            lambda: service.redrive(self.id_of(row), actor="anna", force=force, restart=restart, delay=delay),
        )
        return True

    def release(self, one: int, two: int) -> bool:
        held = [row for row in self.chart.rows if row.status == HELD]
        if not held and two % 4:
            return False
        row = choose(held or self.chart.rows, one)
        self.same(self.chart.release(row), lambda: service.release(self.id_of(row), actor="anna"))
        return True

    def settle(self, one: int, two: int) -> bool:
        stuck = [row for row in self.chart.rows if row.hook_failures]
        if not stuck and two % 4:
            return False
        row = choose(stuck or self.chart.rows, one)
        self.same(
            self.chart.settle(row),
            lambda: service.settle_without_hooks(self.id_of(row), actor="anna", reason="it is gone"),
        )
        return True

    def pause(self, one: int, two: int) -> bool:
        """Something is paused, or goes on."""
        pauses = self.chart.pauses
        pause = choose(sorted(pauses), one) if pauses and two % 4 else choose(PAUSES, one)
        queue, kind, tenant = pause
        if pause in pauses:
            pauses.remove(pause)
            assert service.unpause(queue=queue, kind=kind, tenant=tenant)
        else:
            pauses.add(pause)
            service.pause(queue=queue, kind=kind, tenant=tenant, reason="a test", actor="anna")
        return True

    def letter(self, one: int, two: int) -> bool:
        """A cancel request that met a locked row: it is in the mailbox, however long ago the lock was."""
        live = [row for row in self.chart.rows if row.live or row.status == HELD]
        if not live:
            return False
        row = choose(live, one)
        post_letter(self.id_of(row))
        row.mailed = True
        return True

    def weather(self, one: int, two: int) -> bool:
        """The project's hooks fail from now on, or work again."""
        Hooks.broken = None if Hooks.broken or two % 4 == 0 else choose(["raise", "disagree"], one)
        self.chart.hooks_broken = Hooks.broken is not None
        return True

    def same(self, expected: str | None, act: Callable[[], Any]) -> None:
        """The act is refused with this code, or (None) is not."""
        try:
            act()
        except DurableJobsError as refusal:
            assert refusal.code == expected, f"refused as {refusal.code}, expected {expected}"
        else:
            assert expected is None, f"not refused; expected {expected}"
        self.outcomes[expected or "an operator's act"] += 1

    # --- workers

    def work(self, one: int, two: int, plan: Sequence[str]) -> None:
        """A worker claims, if it has nothing to do, and its step does what was planned, or a part of it."""
        hand = self.hands[one % 3]
        if not hand.busy:
            if not self.chart.claimable() and not self.start(one, two):
                self.wait(one, two)
            self.claim_next(hand, suspects=two % 3 > 0)
        for what in plan:
            slice = self.slices.get(hand)
            if slice is None or slice.fenced:
                return
            self.compare()
            if what in ENDS:
                self.end(hand, slice, what)
            elif what in PLANNED:
                getattr(self, what)(hand, slice)

    def claim_next(self, hand: Hand, suspects: bool = True) -> None:
        took = self.took_one(hand, suspects)
        if took is not None:
            self.run(hand, *took)

    def claim_and_lose_the_answer(self, one: int, two: int) -> bool:
        """The claim was committed, its answer never came: only the keeper can find it."""
        if not self.idle or not self.chart.claimable():
            return False
        hand = choose(self.idle, one)
        self.took_one(hand, True)
        for _ in range(two % 3):
            self.compare()
            self.beat_of(hand.process)
        return True

    def took_one(self, hand: Hand, suspects: bool) -> tuple[Job, Row, Slice] | None:
        may = self.chart.claimable(suspects=suspects)
        probes = [Probe("default", rules.name, 0, None, float(LEASE)) for rules in RULES]
        claimed = store.claim_next(hand.process.owner, 1, probes, suspects=suspects)
        assert bool(claimed) == bool(may), f"claimed {claimed}, of {may}"
        if not claimed:
            return None
        [(job, _)] = claimed
        row = self.chart.rows[self.ids.index(job.id)]
        assert row in may, f"took what it may not: {row}"
        earlier = [one for one in may if one.rules is row.rules and (one.due or 0) < (row.due or 0)]
        assert not earlier, "not the longest due"
        slice = self.chart.claim(row, hand.process.owner)
        self.remember(slice)
        return job, row, slice

    def deliver(self, one: int, two: int) -> bool:
        """A broker's message: it may come early, twice, or late."""
        if not self.idle:
            return False
        due = [row for row in self.chart.rows if row.due is not None]
        hand, row = choose(self.idle, one), choose(due if due and one % 4 else self.chart.rows, two)
        old = choose(["", "", "", "seq", "redrives"], one + two)
        seq, redrives = row.seq - (old == "seq"), row.redrives - (old == "redrives")
        answer = store.claim(self.id_of(row), seq, redrives, hand.process.owner, LEASE)
        if row.due is None or old or self.chart.is_paused(row):
            assert answer is None
            self.outcomes[f"refused {old}" if row.due is not None else "refused"] += 1
        else:
            assert isinstance(answer, Job)
            slice = self.chart.claim(row, hand.process.owner)
            self.remember(slice)
            self.run(hand, answer, row, slice)
        return True

    def run(self, hand: Hand, job: Job, row: Row, slice: Slice) -> None:
        expected = self.chart.begin(slice)
        self.slices[hand] = slice
        self.heard(hand, expected or "step", hand.run(job))

    def heard(self, hand: Hand, expected: str, answer: str) -> None:
        assert answer == expected, f"{answer}, expected {expected}"
        self.outcomes[expected] += 1
        if not hand.busy:
            del self.slices[hand]

    def commit(self, hand: Hand, slice: Slice) -> None:
        kept = self.chart.commit(slice, moves=True)
        self.heard(hand, "did" if kept else "lease_lost", hand.order(hand.fence(advance)))

    def checkpoint(self, hand: Hand, slice: Slice) -> None:
        kept = self.chart.commit(slice, moves=False)
        answer = hand.order(lambda ctx: ctx.save_checkpoint(advance=1))
        self.heard(hand, "did" if kept else "lease_lost", answer)

    def progress(self, hand: Hand, slice: Slice) -> None:
        kept = self.chart.tell(slice)
        answer = hand.order(lambda ctx: ctx.progress(message="on its way"))
        self.heard(hand, "did" if kept else "lease_lost", answer)

    def undo(self, hand: Hand, slice: Slice) -> None:
        """A fence that is rolled back."""
        mine = slice.mine
        self.chart.rolled_back(slice)

        def work(ctx: Any) -> None:
            advance(ctx)
            raise Undo

        self.heard(hand, "did" if mine else "lease_lost", hand.order(hand.fence(work)))

    def end(self, hand: Hand, slice: Slice, how: str) -> None:
        expected = self.chart.end_slice(slice, how, hand.process.draining.is_set())
        self.heard(hand, expected, hand.end(how))

    def open_fence(self, one: int, two: int) -> bool:
        """On SQLite an open fence has the whole file, and nobody else would get on."""
        if connection.vendor != "postgresql" or not self.at_work:
            return False
        slice = choose(self.at_work, one)
        hand = self.hand_of(slice)
        if slice.mine:
            slice.fenced = slice.row.locked = True
            self.heard(hand, "did", hand.order(hand.open_fence))
        else:
            slice.lost = True
            self.heard(hand, "lease_lost", hand.order(hand.open_fence))
        return True

    def close_fence(self, one: int, two: int) -> bool:
        if not self.in_fence:
            return False
        slice = choose(self.in_fence, one)
        hand = self.hand_of(slice)
        if two < 2:
            self.die(hand.process)
            return True
        slice.fenced = slice.row.locked = False
        if two < 5:
            self.chart.rolled_back(slice)

            def undo(ctx: Any) -> None:
                raise Undo

            self.heard(hand, "did", hand.order(undo))
        else:
            assert self.chart.commit(slice, moves=True)
            self.heard(hand, "did", hand.order(advance))
        return True

    def kill(self, one: int, two: int) -> bool:
        """A signal: the process dies at once, or drains: its slice is interrupted at its end."""
        if not self.at_work:
            return False
        hand = self.hand_of(choose(self.at_work, one))
        if two % 3:
            self.die(hand.process)
        else:
            hand.process.draining.set()
        return True

    def freeze(self, one: int, two: int) -> bool:
        """Nobody beats past the lease, and a reconciler sees that twice; then the worker goes on."""
        if not self.at_work or self.in_fence:
            return False
        slice = choose(self.at_work, one)
        self.pass_by(85)
        for _ in range(2):
            self.one_tick(two % 2)
            self.compare()
            self.pass_by(20)
        if slice.row.due is not None and two % 4 and self.idle:
            self.claim_next(choose(self.idle, two))
        if two % 2:
            self.compare()
            self.end(self.hand_of(slice), slice, choose((*ENDS, "park", "cancelled"), one))
        return True

    def die(self, process: Process) -> None:
        self.dead.append(process.owner)
        for hand in process.hands:
            slice = self.slices.pop(hand, None)
            if slice is not None and slice.fenced:
                slice.row.locked = False
        process.kill()

    def beat(self, one: int, two: int) -> bool:
        """A round of the keeper. A frozen process is one that has none."""
        self.beat_of(self.processes[one % 2])
        return True

    def beat_of(self, process: Process) -> None:
        slices = [self.slices[hand] for hand in process.hands if hand in self.slices]
        for slice in slices:
            self.chart.beat(slice)
        self.chart.look_for_strangers(process.owner, slices)
        process.keeper.beat_now()
        process.keeper._round()

    # --- late writes

    def remember(self, slice: Slice | Grip) -> None:
        lease = Lease(self.id_of(slice.row), slice.owner, slice.epoch, float(LEASE))
        self.leases = [*self.leases[-MOST_LATE:], (slice.row, lease)]

    def late_write(self, one: int, two: int) -> bool:
        """A statement of a lease that somebody else has by now, or nobody: it matches nothing."""
        stale = [
            (row, lease) for row, lease in self.leases if (row.owner, row.epoch) != (lease.owner, lease.epoch)
        ]
        if not stale:
            return False
        row, lease = choose(stale, one)
        name, write = choose(list(LATE.items()), two)
        if name in BY_EPOCH and row.epoch == lease.epoch and row.status == RUNNING:
            return False
        with database.transaction(database.alias()):
            assert not write(lease), f"{name} of epoch {lease.epoch}, now {row.epoch}"
        self.outcomes["a late write"] += 1
        return True

    def sight(self, one: int, two: int) -> bool:
        """Somebody looks for orphans, and then is stopped for a while."""
        found = store.orphans(float(GRACE))
        should = {self.id_of(row) for row in self.chart._orphans()}
        assert {orphan.id for orphan in found} == should
        rows = dict(zip(self.ids, self.chart.rows, strict=True))
        self.orphans = [*self.orphans[-MOST_LATE:], *((rows[orphan.id], orphan) for orphan in found)]
        return bool(found)

    def act_late(self, one: int, two: int) -> bool:
        """He goes on and does what he had decided, if it still is so."""
        if not self.orphans:
            return False
        moved = [
            (row, seen) for row, seen in self.orphans if row.epoch != seen.epoch and self.chart.is_orphan(row)
        ]
        row, orphan = choose(moved or self.orphans, one)
        what = choose(["take", "take", "park", "cancel"], two)
        may = self.chart.act_late(row, orphan.epoch, what)
        if may and what != "take":
            return False
        with database.transaction(database.alias()):
            if what == "take":
                done = store.take_orphan(orphan, grace=GRACE, delay=0.0)
            elif what == "park":
                done = store.park_orphan(orphan, grace=GRACE, code="orphaned", message="gone")
            else:
                done = store.cancel_orphan(orphan, grace=GRACE)
        assert bool(done) == may, f"{what} of epoch {orphan.epoch}, now {row.epoch}"
        if may:
            self.chart.take_orphan(row)
        self.outcomes["a late repair" if may else "a repair too late"] += 1
        return True

    def seize(self, one: int, two: int) -> bool:
        """Somebody takes or retries by hand what he saw free a while ago: the statement alone has the last word."""
        row = self.row(one)
        free = row.status == HELD or (self.chart.has_run_out(row) and row.verdict is None)
        ended = row.status in (FAILED, CANCELLED) or self.chart.has_run_out(row)
        with database.transaction(database.alias()):
            if not free:
                assert store.claim_held(self.id_of(row), scope=SCOPE, owner="late", ttl=LEASE) is None
            assert store.retry_claim(self.id_of(row), row.epoch - 1, "late", LEASE) is None
            if not ended:
                assert store.retry_claim(self.id_of(row), row.epoch, "late", LEASE) is None
        return True

    # --- work by hand

    def context(self, rules: Rules, key: str | None) -> ExecutionContext:
        return ExecutionContext(SCOPE, "anna", rules.name, key, time.monotonic() + 60)

    def by_hand(self, one: int, two: int) -> bool:
        """Somebody begins work, takes or retries some, or writes what he holds."""
        if two == 0:
            return self.begin_by_hand(one)
        if two == 1:
            return self.defer(one)
        if two in (2, 3):
            return self.take(one)
        if two in (4, 5):
            return self.retry(one)
        if not self.grips:
            return self.take(one) or self.begin_by_hand(one)
        grip, ctx = self.grips[-1] if one % 3 else choose(self.grips, one)
        if grip.row.locked:
            # He would wait for the fence of whoever has taken it, and be told afterwards.
            return False
        if two in (6, 7):
            self.complete(grip, ctx)
        elif two in (8, 9):
            self.finish(grip, ctx, FAILED if two == 8 else CANCELLED)
        elif two == 10:
            renewed = store.renew(self.lease_of(grip))
            assert isinstance(renewed, Job) == self.chart.beat_by_hand(grip)
        else:
            number = str(grip.row.checkpoint + 1)
            assert store.keep_checkpoint(self.lease_of(grip), number) == self.chart.keep_by_hand(grip)
        return True

    def lease_of(self, grip: Grip) -> Lease:
        return Lease(self.id_of(grip.row), grip.owner, grip.epoch, float(LEASE))

    def hold(self, grip: Grip, ctx: ExecutionContext) -> None:
        assert ctx.fence is not None
        lease = ctx.fence.lease
        assert lease.epoch == grip.epoch
        grip.owner = grip.row.owner = lease.owner
        self.grips = [*self.grips[-MOST_LATE:], (grip, ctx)]
        self.remember(grip)

    def begin_by_hand(self, one: int) -> bool:
        if len(self.chart.rows) == MOST_JOBS:
            return False
        rules, key = choose([BY_HAND, RULES[2]], one), choose([None, "once", "by hand"], one)
        expected = self.chart.begin_by_hand(rules, "", key=key, has_input=key is not None)
        begun = receipts.begin(self.context(rules, key), None if key is None else INPUT, lease_seconds=LEASE)
        if isinstance(expected, Grip):
            assert begun.ctx is not None
            self.ids.append(begun.job.id)
            self.hold(expected, begun.ctx)
        else:
            assert begun.ctx is None and begun.job.id == self.id_of(expected[1])
        self.outcomes["begun by hand" if begun.ctx else "begun before"] += 1
        return True

    def defer(self, one: int) -> bool:
        if len(self.chart.rows) == MOST_JOBS:
            return False
        rules, key = choose([BY_HAND, RULES[2]], one), choose(["once", "by hand", "later"], one)
        expected = self.chart.defer(rules, key=key)
        job_id = self.manager.defer_job(rules.name, Submission(key, INPUT))
        if isinstance(expected, Row):
            self.ids.append(job_id)
        else:
            assert job_id == self.id_of(expected[1])
        return True

    def take(self, one: int) -> bool:
        return self.take_this(self.free_for_hands(one))

    def take_this(self, row: Row) -> bool:
        ctx = self.context(row.rules, row.key)
        expected = self.chart.take(row, "")
        try:
            ctx = receipts.claim(self.id_of(row), ctx, lease_seconds=LEASE)
        except DurableJobsError as refusal:
            assert refusal.code == expected, f"refused as {refusal.code}, expected {expected}"
        else:
            assert isinstance(expected, Grip), f"not refused; expected {expected}"
            self.hold(expected, ctx)
        self.outcomes["claimed by hand" if isinstance(expected, Grip) else f"by hand {expected}"] += 1
        return True

    def free_for_hands(self, one: int) -> Row:
        """Held, or with a lease that ran out; seldom any other."""
        likely = [row for row in self.chart.rows if row.status == HELD or self.chart.has_run_out(row)]
        return self.row(one) if not likely or one == 11 else choose(likely, one)

    def retry(self, one: int) -> bool:
        ended = [
            row for row in self.chart.rows if row.status in (FAILED, CANCELLED) or self.chart.has_run_out(row)
        ]
        row = self.row(one) if not ended or one == 11 else choose(ended, one)
        if row.locked:
            return False
        owner = f"hand-{len(self.leases)}-{one}"
        expected = self.chart.retry(row, owner)

        def retain(image: str) -> str:
            assert str(self.id_of(row)) in image
            Shipment.objects.create(note=f"image {row.number}")
            return '"kept"'

        try:
            lease = receipts.retry_atomically(
                self.id_of(row), self.context(row.rules, row.key), retain, owner=owner, lease_seconds=LEASE
            )
        except Exception as error:
            code = getattr(error, "code", None)
            assert expected == code or expected == "hook", f"refused as {error!r}, expected {expected}"
        else:
            assert isinstance(expected, Grip), f"not refused; expected {expected}"
            self.reopened.add(self.id_of(row))
            self.hold(expected, self.context(row.rules, row.key).with_fence(lease))
        self.outcomes["retried by hand" if isinstance(expected, Grip) else f"by hand {expected}"] += 1
        return True

    def paper(self, row: Row) -> Callable[[ExecutionContext], str]:
        """The project's own change, which commits with the end of the job."""

        def write(ctx: ExecutionContext) -> str:
            Shipment.objects.create(note=f"receipt {row.number}")
            return '"written"'

        return write

    def complete(self, grip: Grip, ctx: ExecutionContext) -> None:
        expected = self.chart.complete_by_hand(grip)
        try:
            receipts.complete_atomically(ctx, self.paper(grip.row))
        except Exception as error:
            code = getattr(error, "code", None)
            assert expected == code or expected == "hook", f"refused as {error!r}, expected {expected}"
        else:
            assert expected is None, f"not refused; expected {expected}"
            grip.row.receipts += 1
        self.outcomes["completed by hand" if expected is None else f"by hand {expected}"] += 1

    def finish(self, grip: Grip, ctx: ExecutionContext, status: Any) -> None:
        expected = self.chart.finish_by_hand(grip, status)
        answer = receipts.finalize_atomically(ctx, AttemptOutcome(status, "so it is"), self.paper(grip.row))
        if isinstance(answer, Finalized):
            assert expected is None, f"not refused; expected {expected}"
            grip.row.receipts += 1
        else:
            assert expected in (answer.code, "hook"), f"refused as {answer}, expected {expected}"
        self.outcomes[f"{status} by hand" if expected is None else f"by hand {expected}"] += 1

    def manage(self, one: int, two: int) -> bool:
        """The manager of a process without workers: it starts and resumes executors, beats, or dies with them."""
        if two in (0, 1):
            return self.start_executor(one)
        if two in (2, 3, 4):
            return self.resume(one)
        if not self.runs:
            return self.resume(one) if one % 2 else self.start_executor(one)
        executor = choose(list(self.runs), one)
        grip = self.runs[executor]
        if grip.row.locked:
            return False
        if two == 5:
            self.manager_dies()
        elif two == 6:
            self.beat_of_manager(executor, grip)
        elif two == 7:
            kept = self.chart.keep_by_hand(grip)
            assert executor.order(grip.row.checkpoint + (not kept)) == ("kept" if kept else "refused")
        else:
            self.end_executor(executor, grip, choose(["return", "return", "raise", "abort"], two))
        return True

    def start_executor(self, one: int) -> bool:
        if len(self.chart.rows) == MOST_JOBS:
            return False
        rules, key = choose([BY_HAND, RULES[2]], one), choose(["once", "managed", "by hand"], one)
        expected = self.chart.begin_by_hand(rules, self.manager.owner, key=key)
        executor = Executor()
        job_id = self.manager.start_job(rules.name, executor, Submission(key, INPUT))
        if isinstance(expected, Grip):
            self.ids.append(job_id)
            self.attend(executor, expected)
        else:
            assert job_id == self.id_of(expected[1])
        return True

    def resume(self, one: int) -> bool:
        row = self.free_for_hands(one)
        expected = self.chart.take(row, self.manager.owner)
        executor = Executor()
        try:
            self.manager.resume_job(self.id_of(row), executor)
        except DurableJobsError as refusal:
            assert refusal.code == expected, f"refused as {refusal.code}, expected {expected}"
        else:
            assert isinstance(expected, Grip), f"not refused; expected {expected}"
            for earlier, grip in self.runs.items():
                if grip.row is row and earlier.stop is not None:
                    assert earlier.stop.is_set(), "an earlier attempt goes on"
            if row.asked:
                # It was asked to end before: the executor is not even called.
                assert executor.heard() == "over" and executor.stop is None
                self.chart.finish_by_hand(expected, CANCELLED, counted=True)
            else:
                self.attend(executor, expected)
        self.outcomes["resumed" if isinstance(expected, Grip) else f"by hand {expected}"] += 1
        return True

    def attend(self, executor: Executor, grip: Grip) -> None:
        assert executor.heard() == "works"
        self.runs[executor] = grip
        self.remember(grip)

    def beat_of_manager(self, executor: Executor, grip: Grip) -> None:
        run = self.manager._runs.get(self.id_of(grip.row))
        if run is None or run.lease.epoch != grip.epoch:
            return
        good = self.chart.beat_by_hand(grip)
        self.manager._beat(run)
        assert executor.stop is not None
        # A job that has ended in this very attempt may have ended by the executor's own receipt.
        ended = grip.row.status in ENDED and grip.row.epoch == grip.epoch
        assert executor.stop.is_set() or ended or (good and not grip.row.asked), "nobody told it to stop"

    def end_executor(self, executor: Executor, grip: Grip, how: str) -> None:
        """Finished work stays finished; who was told to stop and does so has cancelled; else it has failed."""
        assert executor.stop is not None
        if how == "return":
            self.chart.complete_by_hand(grip, late=True)
        else:
            obeys = how == "abort" and executor.stop.is_set()
            self.chart.finish_by_hand(grip, CANCELLED if obeys else FAILED, counted=True)
        del self.runs[executor]
        assert executor.order(how) == "over"
        self.outcomes[f"an executor's {how}"] += 1

    def manager_dies(self) -> None:
        for executor in list(self.runs):
            assert executor.order("die") == "over"
            del self.runs[executor]
        self.manager = Manager(lease_seconds=LEASE, max_jobs=1000)

    # --- repair

    def tick(self, one: int, two: int) -> bool:
        """A pass of a reconciler, and perhaps another one when what it saw is old enough."""
        self.one_tick(one % 2)
        if two % 3 and not self.in_fence:
            self.compare()
            self.pass_by(20 + 5 * (two % 2))
            self.one_tick(one % 2)
        return True

    def one_tick(self, number: int) -> None:
        self.chart.tick(self.watches[number])
        report = self.reconcilers[number].tick()
        assert report.unknown_kind == 0

    def repair_dead(self, one: int, two: int) -> bool:
        if not self.dead:
            return False
        owner = self.dead[-1] if two % 3 else choose(self.dead, two)
        self.chart.repair_dead(owner, self.watches[one % 2])
        self.reconcilers[one % 2].repair_dead(owner)
        return True

    # --- time

    def wait(self, one: int, two: int) -> bool:
        if self.in_fence:
            return False
        self.pass_by(choose([10, 10, 20, 25, 35, 60, 85, 85, 85, 85, 700], two))
        return True

    def pass_by(self, seconds: int) -> None:
        self.chart.clock += seconds
        self.move(seconds + A_MOMENT)

    @property
    def late(self) -> bool:
        """The chart's clock stands still while acts take their time, the rows' clock does not."""
        return time.monotonic() - self.since > MOST_SECONDS

    def move(self, seconds: float) -> None:
        pass_time(seconds)
        for reconciler in self.reconcilers:
            reconciler._sightings = {
                key: replace(seen, expires_at=seen.expires_at - timedelta(seconds=seconds))
                for key, seen in reconciler._sightings.items()
            }

    # --- what must hold

    @invariant()
    def look(self) -> None:
        self.compare()
        self.sound = True

    def compare(self) -> None:
        if self.late:
            return
        type(self).steps += 1
        with connection.cursor() as cursor:
            cursor.execute(_LOOK[connection.vendor])
            found = {UUID(str(row[0])): tuple(row[1:]) for row in cursor.fetchall()}
            cursor.execute(_PAPERS)
            papers = dict(cursor.fetchall())
        self.holds(found)
        assert papers == {
            f"{word} {row.number}": number
            for row in self.chart.rows
            for word, number in (("receipt", row.receipts), ("image", row.kept))
            if number
        }, "what was written with a receipt is not what the jobs say"
        assert set(found) == set(self.ids)
        for row, job_id in zip(self.chart.rows, self.ids, strict=True):
            self.agrees(row, found[job_id])
        self.before, self.reopened = found, set()

    def agrees(self, row: Row, found: tuple[Any, ...]) -> None:
        """The row is what the chart says."""
        checkpoint = found[15]
        is_now = (
            *found[:11], bool(found[11]), bool(found[12]), found[13], bool(found[14]),
            int(checkpoint) if checkpoint else 0, found[16] or "queued", int(found[17] or 0),
        )  # fmt: skip
        should = (
            row.status, row.owner, row.epoch, row.seq, row.redrives, row.attempts, row.verdict, row.orphanings,
            row.failures, row.hook_failures, row.interruptions, row.asked, row.mailed, row.parked, row.mirrored,
            row.checkpoint, row.domain, row.moved,
        )  # fmt: skip
        if is_now != should:
            wrong = [
                f"{name} is {have!r}, should be {want!r}"
                for name, have, want in zip(NAMES, is_now, should, strict=True)
                if have != want
            ]
            raise AssertionError(f"job {row.number} ({row.rules.name}): {'; '.join(wrong)}")
        due_in, expires_in = found[18], found[19]
        assert (due_in is None) == (row.due is None), (
            f"job {row.number}: due in {due_in}, should be {row.due}"
        )
        if row.due is not None:
            assert abs(due_in - (row.due - self.chart.clock)) < TOLERANCE, (
                due_in,
                row.due - self.chart.clock,
            )
        if row.owner is not None:
            left = row.expires - self.chart.clock
            assert abs(expires_in - left) < TOLERANCE, (expires_in, left)

    def holds(self, found: dict[UUID, tuple[Any, ...]]) -> None:
        """What is true of the rows themselves, whatever the chart says."""
        live_keys = [row[21] for row in found.values() if row[0] in ("pending", "running") and row[21]]
        assert len(live_keys) == len(set(live_keys)), "two live jobs with one lock key"
        for job_id, row in found.items():
            status, owner, epoch = row[:3]
            assert (owner is not None) <= (status == "running"), "an owner of what does not run"
            if status in ("pending", "running"):
                # Nobody would ever look at a live row that is neither due some day nor held until some moment.
                assert (row[18] is not None) != (owner is not None and row[19] is not None), "out of sight"
            elif status in ENDED:
                assert row[20] and owner is None and row[18] is None
            domain = row[16]
            if domain is not None and row[14]:
                assert domain == AGREES[status], "the project's row disagrees with an end that says it agreed"
            if domain is not None and status not in ENDED:
                assert domain in OPEN, "the project's row has ended, its job has not"
            was = self.before.get(job_id)
            if was is None:
                continue
            assert epoch >= was[2], "an epoch went back"
            assert row[3:6] >= was[3:6] or row[4] > was[4], "seq, redrives or attempts went back"
            if was[0] in ENDED and job_id not in self.reopened:
                unchanged = (*was[:9], was[10], was[11], *was[13:18], *was[20:])
                now = (*row[:9], row[10], row[11], *row[13:18], *row[20:])
                assert now == unchanged, "what has ended changed without a redrive"

    def teardown(self) -> None:
        """All processes die, the hooks work again: repair and one more worker bring every job to an end."""
        if not self.sound or self.late:
            return
        for process in self.processes:
            self.die(process)
        Hooks.broken, self.chart.hooks_broken = None, False
        while self.chart.pauses:
            self.pause(0, 1)
        self.manager_dies()
        for row in self.chart.rows:
            if row.status == HELD:
                self.cancel(row.number, 0)
            elif row.manual and row.status == RUNNING:
                self.decide(row)
        hand = self.hands[0]
        for _ in range(40):
            if self.late:
                return
            if all(row.status in ENDED for row in self.chart.rows):
                break
            self.one_tick(0)
            self.pass_by(25)
            self.claim_next(hand)
            if hand in self.slices:
                self.end(hand, self.slices[hand], "done")
        self.compare()
        left = [row for row in self.chart.rows if row.status not in ENDED]
        assert not left, f"nothing brings these to their end: {left}"

    def decide(self, row: Row) -> None:
        """Nobody ends work by hand but a person, once its lease has run out."""
        if not self.chart.has_run_out(row):
            self.pass_by(85)
        self.take_this(row)
        self.finish(*self.grips[-1], FAILED)


def choose(those: Sequence[One], number: int) -> One:
    return those[number % len(those)]
