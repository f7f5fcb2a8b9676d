"""Every pair of the store's statements on one row, each in a transaction of its own, in every order.

The judge is the serial order: what two acts leave behind side by side, one after the other must have been able to
leave behind, with the same of them taking effect. One that met a locked row and did nothing counts as left out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from durable_jobs import database, store
from durable_jobs.exceptions import ErrorClass, ErrorFacts
from durable_jobs.jsontext import sha256
from durable_jobs.models import Scope, uuid7
from durable_jobs.store import Lease, NewJob
from tests.explorer.explore import Begin, Programs, Scene
from tests.explorer.stage import Run
from tests.explorer.world import Left, World, differences, left_behind
from tests.store.rows import GRACE, State, lease_on, orphan_on, probe_for

FACTS: Final = ErrorFacts(ErrorClass.TRANSIENT, "E1", "builtins.OSError", "no route", "")
FAR: Final = datetime(2200, 1, 1, tzinfo=UTC)

Statement = Callable[[dict[str, Any], str], Any]
"""Acts on a row as it was before the run, on behalf of an owner of this name (where it takes a lease)."""


def _scope(row: dict[str, Any]) -> Scope:
    return Scope(row["tenant_id"], row["organization_id"])


def _prune(row: dict[str, Any]) -> Any:
    """This row alone, if it has ended: rows of earlier runs are there."""
    ended = row["finished_at"] or FAR
    moment = timedelta(microseconds=1)
    return store.prune_batch(
        ended_before=ended + moment, statuses=["completed", "failed", "cancelled"],
        after=(ended - moment, row["id"]), batch=1, budget=10**6,
    )  # fmt: skip


def _new(row: dict[str, Any], **values: Any) -> NewJob:
    given = {"lock_key": row["lock_key"], "queue": row["queue_name"], **values}
    return NewJob(
        id=uuid7(), kind=row["kind"], status="pending", tenant=row["tenant_id"],
        organization=row["organization_id"], input="1", input_sha256=sha256("1"), **given,
    )  # fmt: skip


def _owned(act: Callable[[Lease], Any]) -> Statement:
    return lambda row, owner: act(lease_on(row))


def _fail(lease: Lease) -> Any:
    return store.fail_slice(lease, FACTS, max_failures=5, first_delay=50, longest_delay=300, exponential=True)


def _fence(lease: Lease) -> Any:
    return store.lock_fence(lease, 30) and store.write_checkpoint(lease, '{"at": 11}') is not None


def _beat(row: dict[str, Any], owner: str) -> bool:
    return store.beat_many(row["lease_owner"] or owner, [lease_on(row)])[row["id"]].renewed


def _retry(row: dict[str, Any], owner: str) -> Any:
    return store.lock_row(row["id"]) and store.retry_claim(row["id"], row["lease_epoch"], owner, 60)


STATEMENTS: Final[dict[str, Statement]] = {
    "insert": lambda row, owner: store.insert(_new(row)),
    "insert (its key)": lambda row, owner: store.insert(
        _new(row, idempotency_key=row["idempotency_key"], lock_key=None)
    ),
    "insert_many": lambda row, owner: store.insert_many([_new(row)]),
    "insert_running": lambda row, owner: store.insert_running(_new(row, idempotency_key="by hand"), owner, 60),
    "release_held": lambda row, owner: store.release_held(row["id"], scope=_scope(row)),
    "claim_held": lambda row, owner: store.claim_held(row["id"], scope=_scope(row), owner=owner, ttl=60),
    "claim": lambda row, owner: store.claim(
        row["id"], row["continuation_seq"], row["redrives"], owner, 60
    ),
    "claim_next": lambda row, owner: store.claim_next(owner, 1, [probe_for(row)]),
    "claim_limited": lambda row, owner: store.claim_limited(
        owner, 1, probe_for(row), _scope(row), [row["kind"]], 1
    ),
    "beat_many": _beat,
    "lock_fence + write_checkpoint": _owned(_fence),
    "write_checkpoint": _owned(lambda lease: store.write_checkpoint(lease, '{"at": 12}') is not None),
    "set_progress": _owned(
        lambda lease: store.set_progress(lease, store.Counts(processed=11)) is not None
    ),
    "yield_slice": _owned(lambda lease: store.yield_slice(lease, 50)),
    "give_back": _owned(store.give_back),
    "fail_slice": _owned(_fail),
    "release_lease": _owned(lambda lease: store.release_lease(lease, 50)),
    "complete": _owned(lambda lease: store.complete(lease, "1")),
    "fail_terminal": lambda row, owner: store.fail_terminal(row["id"], row["lease_epoch"]),
    "fail_terminal (parked)": lambda row, owner: store.fail_terminal(
        row["id"], row["lease_epoch"], FACTS, parked=True
    ),
    "cancel_running": lambda row, owner: store.cancel_running(row["id"], row["lease_epoch"]),
    "request_cancel": lambda row, owner: store.request_cancel(row["id"], scope=None),
    "cancel_waiting": lambda row, owner: store.cancel_waiting(row["id"]),
    "fold_cancel": lambda row, owner: store.fold_cancel(row["id"]),
    "take_orphan": lambda row, owner: store.take_orphan(orphan_on(row), grace=GRACE, delay=50),
    "take_orphan (dead)": lambda row, owner: store.take_orphan(
        orphan_on(row), grace=GRACE, delay=50, dead=True
    ),
    "park_orphan": lambda row, owner: store.park_orphan(
        orphan_on(row), grace=GRACE, code="orphaned", message="gone"
    ),
    "cancel_orphan": lambda row, owner: store.cancel_orphan(orphan_on(row), grace=GRACE),
    "redrive": lambda row, owner: store.redrive(row["id"], scope=_scope(row), grace=GRACE, delay=50),
    "redrive (forced)": lambda row, owner: store.redrive(
        row["id"], scope=_scope(row), grace=GRACE, forced=True, restart=True
    ),
    "settle": lambda row, owner: store.settle(row["id"], scope=_scope(row), grace=GRACE),
    "bump_mirror_attempts": lambda row, owner: store.bump_mirror_attempts(row["id"], row["lease_epoch"]),
    "set_delivery": lambda row, owner: store.set_delivery(
        row["id"], row["continuation_seq"], row["redrives"], owner
    ),
    "renew": _owned(store.renew),
    "set_percent": _owned(lambda lease: store.set_percent(lease, 50.0)),
    "keep_checkpoint": _owned(lambda lease: store.keep_checkpoint(lease, '{"at": 13}')),
    "complete_owned": _owned(lambda lease: store.complete_owned(lease, "1", late=False)),
    "fail_owned": _owned(lambda lease: store.fail_owned(lease, FACTS)),
    "cancel_owned": _owned(lambda lease: store.cancel_owned(lease, message="stopped")),
    "retry_claim": _retry,
    "prune_batch": lambda row, owner: _prune(row),
    "pause": lambda row, owner: store.pause(queue=row["queue_name"], reason="a test", actor="anna") or True,
}  # fmt: skip

OWN_TRANSACTION: Final = {"claim_limited"}
"""Statements that open their transaction themselves."""

STATES: Final = (
    State("held"),
    State("held", request="row"),
    State("pending"),
    State("pending", request="row"),
    State("pending", verdict="retry_exhausted"),
    State("running"),
    State("running", request="row"),
    State("running", request="mail"),
    State("expired"),
    State("expired", request="row"),
    State("expired", request="mail"),
    State("expired", verdict="retry_exhausted"),
    State("retry"),
    State("retry", request="mail"),
    State("retry", verdict="unrecoverable"),
    State("failed"),
    State("failed", verdict="unrecoverable"),
    State("parked"),
    State("cancelled", request="row"),
    State("completed"),
)


@dataclass(frozen=True)
class Pair:
    """Two statements and the state of the row that they meet on."""

    first: str
    second: str
    state: State

    def __str__(self) -> str:
        return f"{self.first} × {self.second} on {self.state}"


def world(state: State) -> World:
    """One row in this state; who owns it may be working by hand or under a worker."""
    made = World()
    row = made.add("job", state)
    made.beside = [("SELECT count(*) FROM durable_jobs_pause WHERE queue_name = %s", row["queue_name"])]
    return made


def act(name: str, made: World) -> bool:
    """Perform a statement in a transaction of its own; whether it took effect. Leases it takes are in its name."""
    row, owner = made.rows["job"], f"by {name}"
    if name in OWN_TRANSACTION:
        return took_effect(STATEMENTS[name](row, owner))
    with database.transaction(database.alias()):
        return took_effect(STATEMENTS[name](row, owner))


def took_effect(answer: Any) -> bool:
    if isinstance(answer, tuple) and answer and isinstance(answer[0], list):
        answer = answer[0]  # claim_limited
    return answer not in (None, False, store.BUSY) and answer != [] and answer != {}


def pairs(most: int) -> Iterator[Pair]:
    """Each pair of statements, on up to `most` states where both take effect; else where one of them does."""
    for first, second in itertools.combinations_with_replacement(STATEMENTS, 2):
        both = [state for state in STATES if matches(first, state) and matches(second, state)]
        either = [
            next((state for state in STATES if matches(name, state) and not matches(other, state)), None)
            for name, other in ((first, second), (second, first))
        ]
        some = [state for state in either if state is not None]
        for state in [*both[:most], *(some if len(both) < most else [])] or [STATES[0]]:
            yield Pair(first, second, state)


def serially(state: State, names: Sequence[str]) -> tuple[tuple[bool, ...], Left]:
    """One after the other: which took effect, and what they left behind. The first in STATEMENTS is rival 0."""
    made = world(state)
    hits = tuple(act(name, made) for name in names)
    return hits, left_behind(made)


@functools.cache
def alone(state: State, name: str) -> tuple[tuple[bool, ...], Left]:
    """What one of them does when nobody else is there; no name: nothing."""
    return serially(state, [name] if name else [])


class _Undo(Exception):
    """Rolls back what was only tried."""


@functools.cache
def which_match(state: State) -> frozenset[str]:
    """The statements that take effect on such a row when nobody else is there."""
    found = set()
    made = world(state)
    for name in STATEMENTS:
        with contextlib.suppress(_Undo), database.transaction(database.alias()):
            if act(name, made):
                found.add(name)
            raise _Undo
    return frozenset(found)


def matches(name: str, state: State) -> bool:
    return name in which_match(state)


class Judge:
    """Knows what the serial orders of a pair leave behind."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        first, second = pair.first, pair.second
        (one, other), left = serially(pair.state, (first, second))
        self._serial = [((one, other), left)]
        (other, one), left = serially(pair.state, (second, first))
        self._serial.append(((one, other), left))
        self._serial.append(((matches(first, pair.state), False), alone(pair.state, first)[1]))
        self._serial.append(((False, matches(second, pair.state)), alone(pair.state, second)[1]))
        self._serial.append(((False, False), alone(pair.state, "")[1]))

    def check(self, made: World, run: Run) -> None:
        hits = (run.answers[0][0], run.answers[1][0])
        left = left_behind(made)
        same = [expected for effect, expected in self._serial if effect == hits]
        if left in same or self._asked_too_late(hits, left):
            return
        told = " / ".join(differences(left, expected) for expected in same)
        raise AssertionError(
            f"effects {hits}: no order of the two leaves this behind. {told or 'None has them.'}"
        )

    def _asked_too_late(self, hits: tuple[bool, bool], left: Left) -> bool:
        """A request that met the lock of whoever ended the job meanwhile is a letter that ends nothing any more."""
        names = (self.pair.first, self.pair.second)
        if "request_cancel" not in names or left.rows["job"]["status"] not in (
            "completed",
            "failed",
            "cancelled",
        ):
            return False
        without = tuple(hit and name != "request_cancel" for name, hit in zip(names, hits, strict=True))
        ended = {**left.rows["job"]}
        ended["requested"] = ended["requested"] and "job" not in left.by_mail
        as_if = Left({"job": ended}, left.new, left.rest)
        return any(effect == without and expected == as_if for effect, expected in self._serial)


def scenes(most: int) -> list[Scene]:
    """All pairs, each on up to `most` states."""
    return [Scene(str(pair), _beginning(pair)) for pair in pairs(most)]


def _beginning(pair: Pair) -> Begin:
    judges: list[Judge] = []

    def begin() -> tuple[Programs, Callable[[Run], None]]:
        if not judges:
            judges.append(Judge(pair))
        made = world(pair.state)
        acts = [[functools.partial(act, pair.first, made)], [functools.partial(act, pair.second, made)]]
        return acts, functools.partial(judges[0].check, made)

    return begin
