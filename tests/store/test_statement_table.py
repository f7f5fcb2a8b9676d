"""The statement table, walked: every statement on every state, by the right hand and by wrong ones.

`RULES` is the table. A rule says from which states a statement moves a row, to which, and what it writes into
which column; every other state, every foreign hand and every other column has to stay byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from durable_jobs import store
from durable_jobs.exceptions import ErrorClass, ErrorFacts
from durable_jobs.models import Job, Scope, uuid7
from durable_jobs.store import Counts
from tests.store.rows import (
    CLAIMER,
    GRACE,
    STATES,
    State,
    ahead,
    as_columns,
    images,
    lease_on,
    letters,
    make_all,
    orphan_on,
    probe_for,
    state_of,
    stored,
    user,
)

pytestmark = pytest.mark.django_db

SLACK = 10.0
"""Seconds that a slow machine may need between a statement and the look at what it wrote."""


# --- what a column holds afterwards ---------------------------------------------------------------------


@dataclass(frozen=True)
class In:
    """A moment so many seconds after the statement ran."""

    seconds: float = 0.0


NOW = In(0.0)


@dataclass(frozen=True)
class Plus:
    """The value before, and so much more."""

    more: int


@dataclass(frozen=True)
class Of:
    """The value that another column held before."""

    column: str


@dataclass(frozen=True)
class Or:
    """The value before; where there was none, this."""

    otherwise: Any


FIRST_LETTER = object()
"""The time, or the user, of the first request in the mailbox; without one, nothing."""


@dataclass(frozen=True)
class FirstLetterOr:
    """The time of the first request in the mailbox; without one, this."""

    otherwise: In


FOLDED = {"cancel_requested_at": Or(FIRST_LETTER), "cancelled_by_id": Or(FIRST_LETTER)}
TAKEN = {
    "status": "running", "lease_owner": CLAIMER, "lease_epoch": Plus(1), "attempts": Plus(1),
    "lease_expires_at": In(30), "heartbeat_at": NOW, "claimed_at": NOW,
    "processed_at_claim": Of("processed_count"), "started_at": Or(NOW), "pending_since": None,
    "next_run_at": None, "updated_at": NOW, **FOLDED,
}  # fmt: skip
LET_GO = {"lease_owner": None, "lease_expires_at": NOW, "updated_at": NOW}
COUNTED = {"processed_count": 14, "total_count": None, "progress_message": "on it"}
ENDED = {**LET_GO, "next_run_at": None, "pending_since": None, "finished_at": NOW, "domain_mirrored_at": NOW}
FAILED = {
    **LET_GO, **FOLDED, **COUNTED, "consecutive_failures": Plus(1), "error_code": "E1",
    "error_type": "builtins.OSError", "error_message": "no route",
}  # fmt: skip
CANCELLED = {
    **ENDED, "status": "cancelled", "verdict": None, "cancel_requested_at": Or(FirstLetterOr(NOW)),
    "cancelled_by_id": Or(FIRST_LETTER),
}  # fmt: skip
REDRIVEN = {
    **LET_GO, "status": "pending", "lease_epoch": Plus(1), "redrives": Plus(1), "pending_since": NOW,
    "next_run_at": In(11), "redrives_since_commit": 0, "lost_deliveries": 0, "consecutive_failures": 0,
    "mirror_attempts": 0, "verdict": None, "parked_at": None, "error_class": None, "error_code": None,
    "error_type": None, "finished_at": None, "domain_mirrored_at": None, "cancel_requested_at": None,
    "cancelled_by_id": None,
}  # fmt: skip
RETRIED = {
    "status": "running", "lease_owner": CLAIMER, "lease_epoch": Plus(1), "attempts": Plus(1),
    "lease_expires_at": In(30), "heartbeat_at": NOW, "claimed_at": NOW,
    "processed_at_claim": Of("processed_count"), "started_at": Or(NOW), "updated_at": NOW,
    "redrives_since_commit": 0, "lost_deliveries": 0, "consecutive_failures": 0, "mirror_attempts": 0,
    "verdict": None, "parked_at": None, "error_class": None, "error_code": None, "error_type": None,
    "error_message": None, "result": None, "progress": 0.0, "finished_at": None, "domain_mirrored_at": None,
    "cancel_requested_at": None, "cancelled_by_id": None,
}  # fmt: skip
COMPLETED_BY_HAND = {
    **ENDED, "status": "completed", "heartbeat_at": NOW, "result": "[1]", "progress": 100.0,
    "error_class": None, "error_code": None, "error_type": None, "error_message": None,
}  # fmt: skip
REPAIRED = {
    **LET_GO, "status": "pending", "lease_epoch": Plus(1), "redrives": Plus(1),
    "redrives_since_commit": Plus(1), "pending_since": NOW, "next_run_at": In(15),
}  # fmt: skip
PARKED = {
    **ENDED, "status": "failed", "parked_at": NOW, "error_code": "orphaned", "error_class": Or("terminal"),
    "error_message": Or("its worker is gone"),
}  # fmt: skip


# --- hands: the one that may, and those that may not ------------------------------------------------------


HOME = Scope("acme", "north")


@dataclass(frozen=True)
class Hand:
    """With which identity a statement is called; by default with the row's own."""

    name: str = "own"
    owner: str | None = None
    epoch: int = 0
    seq: int = 0
    redrives: int = 0
    scope: Scope = HOME
    queue: str | None = None
    kind: str | None = None
    priority: int = 0
    unknown: bool = False


OWN = Hand()
FOREIGN_OWNER = Hand("a foreign owner", owner="worker-other")
OLD_EPOCH = Hand("an old epoch", epoch=-1)
COMING_EPOCH = Hand("an epoch to come", epoch=1)
UNKNOWN = Hand("an unknown id", unknown=True)
OLD_SEQ = Hand("an old seq", seq=-1)
OLD_REDRIVES = Hand("an old count of redrives", redrives=-1)
OTHER_TENANT = Hand("another tenant", scope=Scope("umbrella", "north"))
OTHER_ORGANIZATION = Hand("another organization", scope=Scope("acme", "south"))
NO_ORGANIZATION = Hand("no organization", scope=Scope("acme"))
OTHER_QUEUE = Hand("another queue", queue="elsewhere")
OTHER_KIND = Hand("another kind", kind="tests.other")
OTHER_PRIORITY = Hand("another priority", priority=1)

BY_OWNER = (FOREIGN_OWNER, OLD_EPOCH, COMING_EPOCH, UNKNOWN)
BY_EPOCH = (OLD_EPOCH, COMING_EPOCH, UNKNOWN)
BY_DELIVERY = (OLD_SEQ, OLD_REDRIVES, UNKNOWN)
BY_SCOPE = (OTHER_TENANT, OTHER_ORGANIZATION, NO_ORGANIZATION, UNKNOWN)


@dataclass(frozen=True)
class Call:
    """A row as it was, and the hand that reaches for it."""

    row: Mapping[str, Any]
    hand: Hand = OWN

    @property
    def id(self) -> UUID:
        return uuid7() if self.hand.unknown else self.row["id"]

    @property
    def epoch(self) -> int:
        return self.row["lease_epoch"] + self.hand.epoch

    @property
    def lease(self) -> store.Lease:
        own = lease_on(self.row)
        return replace(own, job_id=self.id, owner=self.hand.owner or own.owner, epoch=self.epoch)

    @property
    def orphan(self) -> store.Orphan:
        return orphan_on(self.row)._replace(id=self.id, epoch=self.epoch)

    @property
    def delivery(self) -> dict[str, Any]:
        return {
            "job_id": self.id,
            "seq": self.row["continuation_seq"] + self.hand.seq,
            "redrives": self.row["redrives"] + self.hand.redrives,
        }

    @property
    def probe(self) -> store.Probe:
        own = probe_for(self.row)
        return own._replace(
            queue=self.hand.queue or own.queue,
            kind=self.hand.kind or own.kind,
            priority=own.priority + self.hand.priority,
        )


COUNTS = Counts(processed=14, total=None, message="on it")


def facts(error_class: ErrorClass) -> ErrorFacts:
    return ErrorFacts(error_class, "E1", "builtins.OSError", "no route", "Traceback …")


def failing(error_class: ErrorClass, *, limit: int = 5) -> Callable[[Call], Any]:
    def act(call: Call) -> Any:
        return store.fail_slice(
            call.lease, facts(error_class), max_failures=limit, first_delay=5, longest_delay=300,
            exponential=True, counts=COUNTS,
        )  # fmt: skip

    return act


def redriving(**options: Any) -> Callable[[Call], Any]:
    def act(call: Call) -> Any:
        return store.redrive(call.id, scope=call.hand.scope, grace=GRACE, delay=11, **options)

    return act


def claimed(call: Call) -> Any:
    rows = store.claim_next(CLAIMER, 5, [call.probe])
    assert len(rows) <= 1
    return rows[0].job if rows else None


def claimed_alone(call: Call) -> Any:
    rows = store.claim_next(CLAIMER, 1, [call.probe])
    return rows[0].job if rows else None


def claimed_apart(call: Call) -> Any:
    """As a kind with a limit that is not reached; how it is kept has tests of its own."""
    kind, scope = call.hand.kind or call.row["kind"], call.hand.scope
    answer = store.claim_limited(CLAIMER, 5, call.probe, scope, [kind], 10_000)
    assert answer is not None and len(answer[0]) <= 1
    return answer[0][0] if answer[0] else None


def announced(call: Call) -> Any:
    """What nobody has come for, or was written ahead; the two are told apart by tests of their own."""
    route = store.Route(*call.probe[:3], 0.0)
    jobs = store.announce(route, reach=0.0, ttl=0.0, limit=5, scope=call.hand.scope)
    assert len(jobs) <= 1
    return jobs[0] if jobs else None


def beaten(call: Call) -> Any:
    """The keeper's beat; its answer about a request is checked by a test of its own."""
    lease = call.lease
    beat = store.beat_many(lease.owner, [lease]).get(lease.job_id)
    return beat is not None and beat.renewed


def parking(call: Call, dead: bool = False) -> Any:
    return store.park_orphan(
        call.orphan, grace=GRACE, code="orphaned", message="its worker is gone", dead=dead
    )


# --- the table --------------------------------------------------------------------------------------------

ANY_VERDICT = (None, "retry_exhausted", "unrecoverable")
ANY_REQUEST = ("none", "row", "mail", "both")
REQUESTED = ("row", "mail", "both")


@dataclass(frozen=True)
class Rule:
    """One row of the statement table."""

    name: str
    act: Callable[[Call], Any]
    start: Sequence[str]
    effect: Mapping[str, Any] | Callable[[State], Mapping[str, Any]] = field(default_factory=dict)
    strangers: Sequence[Hand] = ()
    verdict: Sequence[str | None] = ANY_VERDICT
    request: Sequence[str] = ANY_REQUEST
    due: bool = False
    empties_mailbox: bool = False

    def allows(self, state: State) -> bool:
        return (
            state.base in self.start
            and state.verdict in self.verdict
            and state.request in self.request
            and not (self.due and state.later)
        )

    def effect_on(self, state: State) -> Mapping[str, Any]:
        return self.effect(state) if callable(self.effect) else self.effect


def settled(state: State) -> dict[str, Any]:
    """Ended as was asked, but not as mirrored: nobody told the project's own row."""
    unmirrored = {column: value for column, value in ENDED.items() if column != "domain_mirrored_at"}
    if state.request == "none":
        return {**unmirrored, "status": "failed", "error_class": Or("terminal")}
    return {**unmirrored, **FOLDED, "status": "cancelled", "verdict": None}


def after_failure(verdict: str | None, delay: float, error_class: str) -> Callable[[State], dict[str, Any]]:
    """A verdict that is on the row already is never taken back, nor made milder."""

    def effect(state: State) -> dict[str, Any]:
        decided = "unrecoverable" if "unrecoverable" in (verdict, state.verdict) else verdict or state.verdict
        return {**FAILED, "verdict": decided, "next_run_at": In(delay), "error_class": error_class}

    return effect


OWNED = ("running", "expired")
RUNNING = ("running", "expired", "retry")
WAITING = ("held", "pending", "retry")
LIVE_OR_HELD = ("held", "pending", "running", "expired", "retry")

RULES = (
    # name, act, from, effect, hands that must miss, guards
    Rule("claim", lambda c: store.claim(**c.delivery, owner=CLAIMER, ttl=30), ("pending", "retry"), TAKEN,
         BY_DELIVERY),
    Rule("claim(on time)", lambda c: store.claim(**c.delivery, owner=CLAIMER, ttl=30, early=False),
         ("pending", "retry"), TAKEN, BY_DELIVERY, due=True),
    Rule("announce", announced, ("pending", "retry"), {"updated_at": NOW, "lost_deliveries": Plus(1)},
         (OTHER_QUEUE, OTHER_KIND, OTHER_PRIORITY), request=("none", "mail"), due=True),
    Rule("claim_next", claimed, ("pending", "retry"), TAKEN, (OTHER_QUEUE, OTHER_KIND, OTHER_PRIORITY),
         due=True),
    Rule("claim_one", claimed_alone, ("pending", "retry"), TAKEN, (OTHER_QUEUE, OTHER_KIND, OTHER_PRIORITY),
         due=True),
    Rule("beat_many", beaten, OWNED, {"lease_expires_at": In(30), "heartbeat_at": NOW}, BY_OWNER),
    Rule("still_mine", lambda c: store.still_mine(c.lease), OWNED, {}, BY_OWNER),
    Rule("lock_fence", lambda c: store.lock_fence(c.lease, 30), OWNED, {}, BY_OWNER),
    Rule("write_checkpoint", lambda c: store.write_checkpoint(c.lease, '{"at": 14}', COUNTS) is not None,
         OWNED, {**COUNTED, "checkpoint": '{"at": 14}', "checkpoint_at": NOW, "lease_expires_at": In(30),
         "heartbeat_at": NOW, "last_committed_at": NOW, "updated_at": NOW, "consecutive_failures": 0,
         "redrives_since_commit": 0}, BY_OWNER),
    Rule("write_checkpoint(KEEP)", lambda c: store.write_checkpoint(c.lease) is not None,
         OWNED, {"lease_expires_at": In(30), "heartbeat_at": NOW, "last_committed_at": NOW, "updated_at": NOW,
         "consecutive_failures": 0, "redrives_since_commit": 0}, BY_OWNER),
    Rule("write_checkpoint(None)", lambda c: store.write_checkpoint(c.lease, None) is not None,
         OWNED, {"checkpoint": None, "checkpoint_at": None, "lease_expires_at": In(30), "heartbeat_at": NOW,
         "last_committed_at": NOW, "updated_at": NOW, "consecutive_failures": 0, "redrives_since_commit": 0},
         BY_OWNER),
    Rule("set_progress", lambda c: store.set_progress(c.lease, COUNTS) is not None, OWNED,
         {**COUNTED, "heartbeat_at": NOW}, BY_OWNER),
    Rule("yield_slice", lambda c: store.yield_slice(c.lease, 7, counts=COUNTS), OWNED,
         {**LET_GO, **FOLDED, **COUNTED, "status": "pending", "continuation_seq": Plus(1),
          "pending_since": NOW, "next_run_at": In(7)}, BY_OWNER),
    Rule("yield_slice(interrupted)", lambda c: store.yield_slice(c.lease, interrupted=True), OWNED,
         {**LET_GO, **FOLDED, "status": "pending", "continuation_seq": Plus(1), "pending_since": NOW,
          "next_run_at": NOW, "interruptions": Plus(1)}, BY_OWNER),
    Rule("give_back", lambda c: store.give_back(c.lease), OWNED,
         {**LET_GO, **FOLDED, "status": "pending", "pending_since": NOW, "next_run_at": NOW}, BY_OWNER),
    Rule("fail_slice(transient)", failing(ErrorClass.TRANSIENT), OWNED,
         after_failure(None, 5 * 2**2, "transient"), BY_OWNER),
    Rule("fail_slice(transient, the last)", failing(ErrorClass.TRANSIENT, limit=3), OWNED,
         after_failure("retry_exhausted", 5 * 2**2, "transient"), BY_OWNER),
    Rule("fail_slice(terminal)", failing(ErrorClass.TERMINAL), OWNED,
         after_failure("retry_exhausted", 5 * 2**2, "terminal"), BY_OWNER),
    Rule("fail_slice(unrecoverable)", failing(ErrorClass.UNRECOVERABLE), OWNED,
         after_failure("unrecoverable", 5 * 2**2, "unrecoverable"), BY_OWNER),
    Rule("release_lease", lambda c: store.release_lease(c.lease, 9), OWNED,
         {**LET_GO, **FOLDED, "next_run_at": In(9)}, BY_OWNER),
    Rule("complete", lambda c: store.complete(c.lease, '{"sum": 3}', COUNTS), OWNED,
         {**ENDED, **COUNTED, "status": "completed", "result": '{"sum": 3}', "error_class": None,
          "error_code": None, "error_type": None, "error_message": None}, BY_OWNER, verdict=(None,)),
    Rule("complete_many", lambda c: store.complete_many(c.lease.owner, [(c.lease, '{"sum": 3}')]) or None, OWNED,
         {**ENDED, "status": "completed", "result": '{"sum": 3}', "error_class": None,
          "error_code": None, "error_type": None, "error_message": None}, BY_OWNER, verdict=(None,)),
    Rule("complete_many_whole",
         lambda c: store.complete_many_whole(c.lease.owner, [(c.lease, '{"sum": 3}')]).get(c.id), OWNED,
         {**ENDED, "status": "completed", "result": '{"sum": 3}', "error_class": None,
          "error_code": None, "error_type": None, "error_message": None}, BY_OWNER, verdict=(None,)),
    Rule("fail_terminal", lambda c: store.fail_terminal(c.id, c.epoch), RUNNING,
         {**ENDED, **FOLDED, "status": "failed"}, BY_EPOCH),
    Rule("fail_terminal(parked)",
         lambda c: store.fail_terminal(c.id, c.epoch, facts(ErrorClass.TERMINAL), parked=True), RUNNING,
         {**ENDED, **FOLDED, "status": "failed", "parked_at": NOW, "error_class": "terminal",
          "error_code": "E1", "error_type": "builtins.OSError", "error_message": "no route"}, BY_EPOCH),
    Rule("cancel_running", lambda c: store.cancel_running(c.id, c.epoch, COUNTS), RUNNING,
         {**CANCELLED, **COUNTED}, BY_EPOCH, empties_mailbox=True),
    Rule("cancel_waiting", lambda c: store.cancel_waiting(c.id), WAITING, CANCELLED, (UNKNOWN,),
         request=REQUESTED, empties_mailbox=True),
    Rule("request_cancel",
         lambda c: store.request_cancel(c.id, scope=c.hand.scope, actor="Ann", user=user("asker")),
         LIVE_OR_HELD, lambda state: {"cancel_requested_at": Or(NOW), "cancelled_by_id": Or(user("asker"))},
         BY_SCOPE),
    Rule("fold_cancel", lambda c: store.fold_cancel(c.id), LIVE_OR_HELD, FOLDED, (UNKNOWN,),
         request=("mail", "both"), empties_mailbox=True),
    Rule("take_orphan", lambda c: store.take_orphan(c.orphan, grace=GRACE, delay=15), ("expired",), REPAIRED,
         BY_EPOCH, verdict=(None,), request=("none",)),
    Rule("take_orphan(dead)", lambda c: store.take_orphan(c.orphan, grace=GRACE, delay=15, dead=True), OWNED,
         REPAIRED, BY_EPOCH, verdict=(None,), request=("none",)),
    Rule("park_orphan", parking, ("expired",), PARKED, BY_EPOCH, request=("none",)),
    Rule("park_orphan(dead)", lambda c: parking(c, dead=True), OWNED, PARKED, BY_EPOCH, request=("none",)),
    Rule("cancel_orphan", lambda c: store.cancel_orphan(c.orphan, grace=GRACE), ("expired",), CANCELLED,
         BY_EPOCH, request=REQUESTED, empties_mailbox=True),
    Rule("cancel_orphan(dead)", lambda c: store.cancel_orphan(c.orphan, grace=GRACE, dead=True), OWNED,
         CANCELLED, BY_EPOCH, request=REQUESTED, empties_mailbox=True),
    Rule("redrive", redriving(), ("failed", "parked", "retry", "expired"), REDRIVEN, BY_SCOPE,
         verdict=(None, "retry_exhausted"), empties_mailbox=True),
    Rule("redrive(forced)", redriving(forced=True), ("failed", "parked", "retry", "expired"), REDRIVEN,
         BY_SCOPE, empties_mailbox=True),
    Rule("redrive(restart)", redriving(restart=True), ("failed", "parked", "retry", "expired"),
         {**REDRIVEN, "checkpoint": None, "checkpoint_at": None, "processed_count": 0}, BY_SCOPE,
         verdict=(None, "retry_exhausted"), empties_mailbox=True),
    Rule("release_held", lambda c: store.release_held(c.id, scope=c.hand.scope), ("held",),
         {**FOLDED, "status": "pending", "pending_since": NOW, "next_run_at": NOW, "updated_at": NOW}, BY_SCOPE),
    Rule("claim_held", lambda c: store.claim_held(c.id, scope=c.hand.scope, owner=CLAIMER, ttl=30),
         ("held", "expired"), TAKEN, BY_SCOPE, verdict=(None,)),
    Rule("claim_limited", claimed_apart, ("pending", "retry"), TAKEN,
         (OTHER_QUEUE, OTHER_KIND, OTHER_PRIORITY, OTHER_TENANT, OTHER_ORGANIZATION, NO_ORGANIZATION), due=True),
    Rule("retry_claim", lambda c: store.retry_claim(c.id, c.epoch, CLAIMER, 30),
         ("failed", "parked", "cancelled", "expired"), RETRIED, BY_EPOCH, empties_mailbox=True),
    Rule("renew", lambda c: store.renew(c.lease), ("running",),
         {**FOLDED, "lease_expires_at": In(30), "heartbeat_at": NOW}, BY_OWNER),
    Rule("set_percent", lambda c: store.set_percent(c.lease, 40.0), ("running",),
         {"progress": 40.0, "heartbeat_at": NOW}, BY_OWNER),
    Rule("keep_checkpoint", lambda c: store.keep_checkpoint(c.lease, '{"at": 14}'), ("running",),
         {"checkpoint": '{"at": 14}', "checkpoint_at": NOW, "updated_at": NOW}, BY_OWNER),
    Rule("complete_owned", lambda c: store.complete_owned(c.lease, "[1]", late=False), ("running",),
         COMPLETED_BY_HAND, BY_OWNER, verdict=(None,), request=("none",)),
    Rule("complete_owned(late)", lambda c: store.complete_owned(c.lease, "[1]", late=True), ("running",),
         COMPLETED_BY_HAND, BY_OWNER, verdict=(None,)),
    Rule("fail_owned", lambda c: store.fail_owned(c.lease, facts(ErrorClass.TERMINAL), "[1]"), ("running",),
         {**ENDED, **FOLDED, "status": "failed", "heartbeat_at": NOW, "result": "[1]", "error_class": "terminal",
          "error_code": "E1", "error_type": "builtins.OSError", "error_message": "no route"}, BY_OWNER),
    Rule("cancel_owned", lambda c: store.cancel_owned(c.lease), ("running",),
         {**CANCELLED, "heartbeat_at": NOW}, BY_OWNER, request=REQUESTED, empties_mailbox=True),
    Rule("cancel_owned(stopped)", lambda c: store.cancel_owned(c.lease, stopped=True, message="m", result="[1]"),
         ("running",), {**CANCELLED, "heartbeat_at": NOW, "result": "[1]", "error_message": "m"}, BY_OWNER,
         empties_mailbox=True),
    Rule("settle", lambda c: store.settle(c.id, scope=c.hand.scope, grace=GRACE),
         ("held", "pending", "retry", "expired"), settled, BY_SCOPE, empties_mailbox=True),
    Rule("bump_mirror_attempts", lambda c: store.bump_mirror_attempts(c.id, c.epoch),
         (*LIVE_OR_HELD, "failed", "parked"), {"mirror_attempts": Plus(1)}, BY_EPOCH),
    Rule("set_delivery", lambda c: store.set_delivery(**c.delivery, queue_job_id="message 2"), LIVE_OR_HELD,
         {"queue_job_id": "message 2"}, BY_DELIVERY),
)  # fmt: skip


# --- the walk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_statement_moves_what_the_table_says(rule: Rule) -> None:
    """From each state of its row in the table to the state it names, column by column (B20, B39, B49, B56, B66, B88,
    B89, B110, B123, B126), and the row that it answers is the row that is stored."""
    rows = make_all([state for state in STATES if rule.allows(state)])
    before, mailed = images(rows.values()), letters()
    answers = {}
    for state, job_id in rows.items():
        answers[state] = rule.act(Call(before[job_id]))
        assert is_hit(answers[state]), f"{rule.name} on {state}: missed"
    after, left = images(rows.values()), letters()
    for state, job_id in rows.items():
        what = f"{rule.name} on {state}"
        sent = mailed.get(job_id, [])
        assert_effect(rule.effect_on(state), before[job_id], after[job_id], bool(sent), what)
        assert left.get(job_id, []) == ([] if rule.empties_mailbox else sent), what
        assert state_of(after[job_id], job_id in left) in STATES, f"{what}: to a state outside the walk"
        if isinstance(answers[state], Job):
            assert as_columns(answers[state]) == after[job_id], what


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_statement_misses_every_other_state(rule: Rule) -> None:
    """A miss answers nothing, raises nothing and leaves the row and its mailbox byte for byte (A46, B44)."""
    rows = make_all([state for state in STATES if not rule.allows(state)])
    seen, before = images(rows.values()), stored()
    for state, job_id in rows.items():
        answer = rule.act(Call(seen[job_id]))
        assert not is_hit(answer), f"{rule.name} on {state}: answered {answer!r}"
    assert_untouched(rule, rows, before)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.strangers], ids=lambda rule: rule.name)
def test_a_statement_misses_in_a_foreign_hand(rule: Rule) -> None:
    """Owner, epoch, delivery and scope are part of the condition in every state (A34, B21, B38)."""
    rows = make_all([state for state in STATES if rule.allows(state) or state.request == "none"])
    seen, before = images(rows.values()), stored()
    for state, job_id in rows.items():
        for hand in rule.strangers:
            answer = rule.act(Call(seen[job_id], hand))
            assert not is_hit(answer), f"{rule.name} on {state} by {hand.name}: answered {answer!r}"
    assert_untouched(rule, rows, before)


def is_hit(answer: Any) -> bool:
    """Nothing, False and "ask again" are misses."""
    return answer is not None and answer is not False and not isinstance(answer, store.Answer)


def assert_untouched(rule: Rule, rows: Mapping[State, UUID], before: Mapping[UUID, Any]) -> None:
    after = stored()
    changed = [str(state) for state, job_id in rows.items() if after.get(job_id) != before[job_id]]
    assert not changed, f"{rule.name} missed and changed the row: {changed}"
    assert after.keys() == before.keys()


def assert_effect(
    effect: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    mailed: bool,
    what: str,
) -> None:
    wrong = []
    for column, value in after.items():
        expected = before[column] if column not in effect else resolve(effect[column], column, before)
        if not agrees(value, expected, column, mailed):
            wrong.append(f"{column}: {before[column]!r} → {value!r}, not {expected!r}")
    assert not wrong, f"{what}:\n" + "\n".join(wrong)


def resolve(expected: Any, column: str, before: Mapping[str, Any]) -> Any:
    if isinstance(expected, Plus):
        return before[column] + expected.more
    if isinstance(expected, Of):
        return before[expected.column]
    if isinstance(expected, Or):
        # Whose request counts is decided with the time of the request, not by the user alone.
        decided_by = "cancel_requested_at" if column == "cancelled_by_id" else column
        return expected.otherwise if before[decided_by] is None else before[column]
    return expected


def agrees(value: Any, expected: Any, column: str, mailed: bool) -> bool:
    if expected is FIRST_LETTER:
        expected = (user("by-mail") if column == "cancelled_by_id" else In(-400)) if mailed else None
    if isinstance(expected, FirstLetterOr):
        expected = In(-400) if mailed else expected.otherwise
    if isinstance(expected, In):
        return value is not None and abs(value - ahead(expected.seconds)) < timedelta(seconds=SLACK)
    return type(value) is type(expected) and value == expected


def test_the_table_names_every_statement_that_changes_a_job() -> None:
    """A transition that the walk leaves out is a transition that nobody has checked."""
    walked = {rule.name.partition("(")[0] for rule in RULES}
    elsewhere = {"insert", "insert_many", "extend", "set_idempotency_key"}
    written = set()
    for name, statement in vars(store).items():
        if isinstance(statement, store.Statement) and "UPDATE durable_jobs_job" in statement.sql("sqlite"):
            written.add(name.lstrip("_").lower())
    named = {"beat_many", "bump_mirror", *(walked - {"beat_many", "bump_mirror_attempts"}), *elsewhere}
    assert written <= named, f"not in RULES: {sorted(written - named)}"
