"""The state chart as a small program: what each act makes of a job, in plain Python, with no database.

It is written from `docs/state_machine.md` and the rules of failures, cancels and repair, not from the statements.
Time is a number of seconds that stands still unless the clock is moved on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

GRACE: Final = 20
LONGEST_GAP: Final = 40
"""Passes of one reconciler that are further apart begin anew what it has seen, `MOST_DOUBTS` times."""
MOST_DOUBTS: Final = 3
LEASE: Final = 60

HELD, PENDING, RUNNING = "held", "pending", "running"
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
LIVE: Final = (PENDING, RUNNING)
ENDED: Final = (COMPLETED, FAILED, CANCELLED)

QUEUE, MANUAL, TENANT = "default", "manual", "default"
Pause = tuple[str, str, str]
"""A queue, a kind, a tenant; blank is every one."""

OPEN: Final = ("queued", "moving")
AGREES: Final = {COMPLETED: "arrived", FAILED: "lost", CANCELLED: "stopped"}
"""What the project's row says when its job has ended so."""


@dataclass(frozen=True)
class Rules:
    """What a kind says of its failures and orphans."""

    name: str
    orphan_policy: str
    max_orphanings: int
    failures: int
    first_delay: int
    longest_delay: int
    exponential: bool
    hooks: bool
    known: bool = True
    """Registered; only work by hand may be of a kind that is not."""

    def delay(self, failure: int) -> int:
        if not self.exponential:
            return min(self.first_delay, self.longest_delay)
        return int(min(self.first_delay * 2 ** (failure - 1), self.longest_delay))


@dataclass
class Row:
    """A job and the project's row, as they should be."""

    number: int
    rules: Rules
    status: str
    lock_key: str | None = None
    key: str | None = None
    due: int | None = None
    owner: str | None = None
    expires: int = 0
    epoch: int = 0
    seq: int = 0
    redrives: int = 0
    attempts: int = 0
    verdict: str | None = None
    orphanings: int = 0
    failures: int = 0
    hook_failures: int = 0
    interruptions: int = 0
    asked: bool = False
    mailed: bool = False
    parked: str | None = None
    mirrored: bool = False
    domain: str = "queued"
    moved: int = 0
    """Batches whose effect is in the project's row; the checkpoint says the same number, unless it was restarted."""
    checkpoint: int = 0
    locked: bool = False
    """A fence is open on it."""
    manual: bool = False
    """In the queue of work by hand: workers and reconcilers leave it alone."""
    has_input: bool = True
    receipts: int = 0
    """Changes of the project's that were committed with a receipt."""
    kept: int = 0
    """Images of it that retries have kept."""

    @property
    def live(self) -> bool:
        return self.status in LIVE

    @property
    def retrying(self) -> bool:
        return self.status == RUNNING and self.owner is None

    @property
    def wants_end(self) -> bool:
        return self.asked or self.mailed


@dataclass
class Slice:
    """A worker's hold on a job: the lease it was given, and what it has learned since."""

    row: Row
    owner: str
    epoch: int
    failed_hooks_before: int
    lost: bool = False
    cancelled: bool = False
    paused: bool = False
    let_go: bool = False
    fenced: bool = False

    @property
    def mine(self) -> bool:
        row = self.row
        return row.status == RUNNING and row.owner == self.owner and row.epoch == self.epoch

    @property
    def of_this_epoch(self) -> bool:
        return self.row.status == RUNNING and self.row.epoch == self.epoch


@dataclass
class Grip:
    """A lease that is held by hand. It writes only while it has not run out."""

    row: Row
    owner: str
    epoch: int

    def holds(self, clock: int) -> bool:
        row = self.row
        mine = row.status == RUNNING and row.owner == self.owner and row.epoch == self.epoch
        return mine and row.expires > clock


@dataclass
class Sighting:
    epoch: int
    expires: int
    at: int
    doubts: int = 0


@dataclass
class Watch:
    """What one reconciler remembers between its passes."""

    sightings: dict[int, Sighting] = field(default_factory=dict)
    failures: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended_at: int | None = None


def spacing(earlier: int) -> int:
    return 0 if earlier < 1 else int(min(15 * 2 ** min(earlier - 1, 16), 600))


class HooksFailed(Exception):
    """The project's row could not be brought in line, so nothing has changed but the count of it."""


class Chart:
    """All jobs, and every act on them."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.clock = 0
        self.pauses: set[Pause] = set()
        self.hooks_broken = False
        self.strangers: dict[str, set[tuple[int, int]]] = {}

    # --- looking

    def holder_of(self, lock_key: str | None, but: Row | None = None) -> Row | None:
        if lock_key is None:
            return None
        return next(
            (row for row in self.rows if row.live and row.lock_key == lock_key and row is not but), None
        )

    def is_paused(self, row: Row) -> bool:
        return any(
            queue in ("", MANUAL if row.manual else QUEUE)
            and kind in ("", row.rules.name)
            and tenant in ("", TENANT)
            for queue, kind, tenant in self.pauses
        )

    def is_orphan(self, row: Row) -> bool:
        return self.has_run_out(row) and row.expires < self.clock - GRACE + 0.001

    def has_run_out(self, row: Row) -> bool:
        return row.status == RUNNING and row.owner is not None and row.expires <= self.clock

    def claimable(self, *, suspects: bool = True) -> list[Row]:
        """What a claim may take now."""
        return [
            row
            for row in self.rows
            if row.due is not None
            and row.due <= self.clock
            and not self.is_paused(row)
            and (suspects or row.orphanings == 0)
        ]

    # --- starting

    def start(
        self, rules: Rules, *, lock_key: str | None, key: str | None, delay: int, hold: bool
    ) -> Row | str | tuple[str, Row]:
        """A new row; an earlier one of the key; or who holds the lock key, as a refusal."""
        if key is not None:
            for row in self.rows:
                if row.key == key and row.rules is rules:
                    return ("earlier", row)
        if not hold and self.holder_of(lock_key):
            return "lock_key_held"
        row = Row(len(self.rows), rules, HELD if hold else PENDING, lock_key, key)
        if not hold:
            row.due = self.clock + delay
        self.rows.append(row)
        return row

    def release(self, row: Row) -> str | None:
        if row.status != HELD or row.manual:
            return "not_held"
        if self.holder_of(row.lock_key, row):
            return "lock_key_held"
        self._fold(row)
        row.status, row.due = PENDING, self.clock
        return None

    # --- claiming

    def claim(self, row: Row, owner: str) -> Slice:
        self._fold(row)
        row.status, row.owner, row.expires, row.due = RUNNING, owner, self.clock + LEASE, None
        row.epoch += 1
        row.attempts += 1
        return Slice(row, owner, row.epoch, row.hook_failures)

    def begin(self, slice: Slice) -> str | None:
        """A slice looks at its row first; None when its step may run."""
        row = slice.row
        if row.asked:
            return self.cancel_slice(slice)
        if row.verdict is not None:
            return self._decide(slice)
        return None

    # --- while a slice runs

    def commit(self, slice: Slice, *, moves: bool) -> bool:
        """The end of a fence, or a checkpoint alone; False when the lease is lost."""
        row = slice.row
        if not slice.mine:
            slice.lost = True
            return False
        row.expires = self.clock + LEASE
        row.failures = row.orphanings = 0
        slice.cancelled = slice.cancelled or row.wants_end
        if moves:
            row.checkpoint += 1
            if row.rules.hooks:
                row.moved += 1
                row.domain = "moving"
        return True

    def tell(self, slice: Slice) -> bool:
        """Progress: it renews nothing and counts as no commit."""
        if not slice.mine:
            slice.lost = True
            return False
        slice.cancelled = slice.cancelled or slice.row.wants_end
        return True

    def rolled_back(self, slice: Slice) -> None:
        """After a fence that was rolled back the slice beats at once."""
        if slice.mine:
            slice.row.expires = self.clock + LEASE
        else:
            slice.lost = True

    def beat(self, slice: Slice) -> None:
        """What the keeper carries back."""
        row = slice.row
        if slice.lost:
            return
        if not slice.mine:
            slice.lost = True
            return
        if not row.locked:
            row.expires = self.clock + LEASE
        slice.cancelled = slice.cancelled or row.wants_end
        slice.paused = slice.paused or self.is_paused(row)

    def look_for_strangers(self, owner: str, slices: Sequence[Slice]) -> None:
        """Rows of this owner that none of its slices holds, twice in a row, are given back."""
        known = {slice.row.number for slice in slices if not slice.lost}
        found = {
            (row.number, row.epoch)
            for row in self.rows
            if row.status == RUNNING and row.owner == owner and row.number not in known
        }
        found -= {(slice.row.number, slice.epoch) for slice in slices}
        for number, _ in found & self.strangers.get(owner, set()):
            row = self.rows[number]
            if not row.locked:
                self._fold(row)
                row.status, row.owner, row.due = PENDING, None, self.clock
        self.strangers[owner] = found

    # --- the end of a slice: each answers the outcome's name

    def end_slice(self, slice: Slice, how: str, draining: bool) -> str:
        """`how`: done, yield, yield_later, cancelled, nothing, or the error that the step raised."""
        if slice.lost:
            return "lease_lost"
        if slice.cancelled:
            return self.cancel_slice(slice)
        raised = how in ("transient", "terminal", "unrecoverable", "park", "later")
        interrupted = slice.paused or draining
        if how == "later":
            return self._yield(slice, 10, interrupted)
        if raised and interrupted:
            return self._yield(slice, 0, True)
        match how:
            case "done":
                return self._complete(slice)
            case "yield":
                return self._yield(slice, 0, interrupted)
            case "yield_later":
                return self._yield(slice, 20, interrupted)
            case "cancelled":
                return self.cancel_slice(slice)
            case "nothing":
                return self._fail(slice, "unrecoverable")
            case "park":
                return self._park(slice)
        return self._fail(slice, how)

    def _complete(self, slice: Slice) -> str:
        if not slice.mine:
            return "lease_lost"
        try:
            self._end(slice.row, COMPLETED)
        except HooksFailed:
            # Done but not agreed: a failure like any other.
            return self._fail(slice, "transient")
        return "completed"

    def _yield(self, slice: Slice, after: int, interrupted: bool) -> str:
        if not slice.mine:
            return "lease_lost"
        row = slice.row
        self._fold(row)
        row.status, row.owner, row.due = PENDING, None, self.clock + after
        row.seq += 1
        row.interruptions += interrupted
        return "yielded"

    def _fail(self, slice: Slice, error_class: str) -> str:
        if not slice.mine:
            return "lease_lost"
        row = slice.row
        row.failures += 1
        if error_class == "unrecoverable":
            row.verdict = "unrecoverable"
        elif error_class == "terminal" or row.failures >= row.rules.failures:
            row.verdict = row.verdict or "retry_exhausted"
        self._fold(row)
        row.owner, row.due = None, self.clock + row.rules.delay(row.failures)
        slice.let_go = True
        if row.asked:
            return self.cancel_slice(slice)
        if row.verdict is not None:
            return self._decide(slice)
        return "retry"

    def _decide(self, slice: Slice) -> str:
        """The row carries a verdict: only the decision is tried."""
        if not slice.of_this_epoch:
            return "lease_lost"
        try:
            self._end(slice.row, FAILED)
        except HooksFailed:
            return self._release_after_hook(slice)
        return "failed"

    def _park(self, slice: Slice) -> str:
        if not slice.of_this_epoch:
            return "lease_lost"
        try:
            self._end(slice.row, FAILED, parked="by_step")
        except HooksFailed:
            return self._release_after_hook(slice)
        return "failed"

    def cancel_slice(self, slice: Slice) -> str:
        if not slice.of_this_epoch:
            return "lease_lost"
        try:
            self._end(slice.row, CANCELLED)
        except HooksFailed:
            return self._release_after_hook(slice)
        return "cancelled"

    def _release_after_hook(self, slice: Slice) -> str:
        if slice.let_go:
            return "retry"
        if not slice.mine:
            return "lease_lost"
        row, earlier = slice.row, slice.failed_hooks_before
        first = row.rules.first_delay
        delay = first if earlier < 1 else min(first * 2**earlier, 600)
        self._fold(row)
        row.owner, row.due = None, self.clock + delay
        return "retry"

    # --- operators

    def cancel(self, row: Row) -> str | None:
        if row.status in ENDED:
            return "not_cancellable"
        if row.locked:
            row.mailed = True
        else:
            row.asked = True
        if row.status == RUNNING and row.owner is not None:
            return None
        self._try_to_cancel(row)
        return None

    def redrive(self, row: Row, *, force: bool, restart: bool, delay: int) -> str | None:
        if not row.rules.known:
            return "unknown_kind"
        if row.status in (COMPLETED, CANCELLED) or row.manual:
            return "not_redrivable"
        if row.verdict == "unrecoverable" and not force:
            return "unrecoverable_requires_force"
        if self.holder_of(row.lock_key, row):
            return "lock_key_held"
        if not (row.status == FAILED or row.retrying or self.is_orphan(row)) or row.locked:
            return "not_redrivable"
        if row.rules.hooks and self.hooks_broken:
            row.hook_failures += 1
            return "hook_failed"
        row.status, row.owner, row.due = PENDING, None, self.clock + delay
        row.epoch += 1
        row.redrives += 1
        row.orphanings = row.failures = row.hook_failures = 0
        row.verdict = row.parked = None
        row.asked = row.mailed = row.mirrored = False
        if restart:
            row.checkpoint = 0
        if row.rules.hooks:
            row.domain = "queued"
        return None

    def settle(self, row: Row) -> str | None:
        waits = row.status in (HELD, PENDING) or row.retrying or self.is_orphan(row)
        if row.hook_failures < 1 or not waits or row.locked:
            return "not_settleable"
        status = CANCELLED if row.wants_end else FAILED
        if row.wants_end:
            row.asked, row.verdict = True, None
        row.status, row.owner, row.due, row.mailed = status, None, None, False
        return None

    # --- work by hand: each answers a lease, or the code of the refusal

    def begin_by_hand(
        self, rules: Rules, owner: str, *, key: str | None, has_input: bool = True
    ) -> Grip | tuple[str, Row]:
        """A running row of its own; or the earlier one of the key, which is left alone."""
        earlier = self._of_key(rules, key)
        if earlier is not None:
            return ("earlier", earlier)
        row = Row(len(self.rows), rules, RUNNING, key=key, owner=owner, expires=self.clock + LEASE)
        row.epoch = row.attempts = 1
        row.manual, row.has_input = True, has_input
        self.rows.append(row)
        return Grip(row, owner, 1)

    def defer(self, rules: Rules, *, key: str) -> Row | tuple[str, Row]:
        earlier = self._of_key(rules, key)
        if earlier is not None:
            return ("earlier", earlier)
        row = Row(len(self.rows), rules, HELD, key=key, manual=True)
        self.rows.append(row)
        return row

    def _of_key(self, rules: Rules, key: str | None) -> Row | None:
        return next(
            (row for row in self.rows if key is not None and (row.key, row.rules) == (key, rules)), None
        )

    def take(self, row: Row, owner: str) -> Grip | str:
        """Held, or with a lease that ran out a moment ago: no grace, whoever had it; keeps a cancel request."""
        may = row.status == HELD or (self.has_run_out(row) and row.verdict is None)
        if not may or row.locked:
            return "E_JOB_NOT_RECLAIMABLE"
        if self.holder_of(row.lock_key, row):
            return "lock_key_held"
        return self._grasp(row, owner, fold=True)

    def retry(self, row: Row, owner: str) -> Grip | str:
        """A new attempt at what has ended or run out: the outcome, the request and the limits used are forgotten."""
        if row.status not in (FAILED, CANCELLED) and not self.has_run_out(row):
            return "E_JOB_NOT_RECLAIMABLE"
        if not row.has_input:
            return "E_JOB_INPUT_INVALID"
        if self.holder_of(row.lock_key, row):
            return "lock_key_held"
        if row.rules.hooks and self.hooks_broken:
            return "hook"
        row.verdict = row.parked = None
        row.orphanings = row.failures = row.hook_failures = 0
        row.asked = row.mailed = row.mirrored = False
        row.kept += 1
        if row.rules.hooks:
            row.domain = "queued"
        return self._grasp(row, owner, fold=False)

    def _grasp(self, row: Row, owner: str, *, fold: bool) -> Grip:
        if fold:
            self._fold(row)
        row.status, row.owner, row.expires, row.due = RUNNING, owner, self.clock + LEASE, None
        row.epoch += 1
        row.attempts += 1
        return Grip(row, owner, row.epoch)

    def complete_by_hand(self, grip: Grip, *, late: bool = False) -> str | None:
        """A receipt and the end together; `late`: a manager's executor, whose finished work stays finished."""
        if not grip.holds(self.clock) or (grip.row.wants_end and not late):
            return "E_JOB_LEASE_LOST"
        if grip.row.verdict is not None:
            return "E_JOB_LEASE_LOST"
        return self._end_by_hand(grip, COMPLETED, counted=late)

    def finish_by_hand(self, grip: Grip, status: str, *, counted: bool = False) -> str | None:
        """Failed or cancelled, by somebody's word; a cancel needs a request."""
        if not grip.holds(self.clock):
            return "E_JOB_LEASE_LOST"
        if status == CANCELLED and not grip.row.wants_end:
            return "E_JOB_INPUT_INVALID"
        return self._end_by_hand(grip, status, counted=counted)

    def _end_by_hand(self, grip: Grip, status: str, *, counted: bool) -> str | None:
        row, failed_before = grip.row, grip.row.hook_failures
        try:
            self._end(row, status)
        except HooksFailed:
            # A receipt's transaction is the caller's to roll back, and counts nothing.
            row.hook_failures = failed_before + counted
            return "hook"
        return None

    def beat_by_hand(self, grip: Grip) -> bool:
        if not grip.holds(self.clock):
            return False
        self._fold(grip.row)
        grip.row.expires = self.clock + LEASE
        return True

    def keep_by_hand(self, grip: Grip) -> bool:
        """A checkpoint: it renews nothing and counts as no commit."""
        if not grip.holds(self.clock):
            return False
        grip.row.checkpoint += 1
        return True

    # --- repair

    def tick(self, watch: Watch) -> None:
        """One pass: letters, cancels of what nobody works on, orphans at their second sighting."""
        now = self.clock
        if watch.ended_at is not None and now - watch.ended_at > LONGEST_GAP:
            for seen in watch.sightings.values():
                if seen.doubts < MOST_DOUBTS:
                    seen.at, seen.doubts = now, seen.doubts + 1
        for row in self.rows:
            if row.mailed and not row.locked and row.status not in ENDED and not row.manual:
                row.asked, row.mailed = True, False
        met: set[int] = set()
        for row in list(self._cancelling()):
            met.add(row.number)
            if not self._spaced_out(watch, row) and not self._try_to_cancel(row):
                self._note_failure(watch, row)
        for row in list(self._orphans()):
            met.add(row.number)
            self._repair(watch, row)
        watch.sightings = {key: seen for key, seen in watch.sightings.items() if key in met}
        watch.failures = {key: seen for key, seen in watch.failures.items() if key in met}
        watch.ended_at = now

    def repair_dead(self, owner: str, watch: Watch) -> None:
        """Its supervisor has reaped the process: no grace, no second sighting."""
        for row in self.rows:
            if row.status == RUNNING and row.owner == owner and not self._spaced_out(watch, row):
                self._act(watch, row)

    def _cancelling(self) -> Iterator[Row]:
        return (
            row
            for row in self.rows
            if row.asked and not row.manual and (row.status in (HELD, PENDING) or row.retrying)
        )

    def _orphans(self) -> Iterator[Row]:
        return (
            row
            for row in self.rows
            if self.is_orphan(row) and not row.manual and (row.wants_end or not self.is_paused(row))
        )

    def _repair(self, watch: Watch, row: Row) -> None:
        seen = watch.sightings.get(row.number)
        if seen is None or (seen.epoch, seen.expires) != (row.epoch, row.expires):
            watch.sightings[row.number] = Sighting(row.epoch, row.expires, self.clock)
        elif self.clock - seen.at >= GRACE and not self._spaced_out(watch, row):
            self._act(watch, row)

    def _act(self, watch: Watch, row: Row) -> None:
        if row.locked or (self.is_paused(row) and not row.wants_end):
            return
        try:
            if row.wants_end:
                self._end(row, CANCELLED)
            elif row.verdict:
                self._end(row, FAILED, parked=row.verdict)
            elif row.rules.orphan_policy == "park":
                self._end(row, FAILED, parked="orphaned")
            elif row.orphanings >= row.rules.max_orphanings:
                self._end(row, FAILED, parked="poison")
            else:
                row.status, row.owner, row.due = PENDING, None, self.clock + spacing(row.orphanings)
                row.epoch += 1
                row.redrives += 1
                row.orphanings += 1
        except HooksFailed:
            self._note_failure(watch, row)
            return
        watch.sightings.pop(row.number, None)

    def _note_failure(self, watch: Watch, row: Row) -> None:
        count = watch.failures.get(row.number, (0, 0))[0] + 1
        watch.failures[row.number] = (count, self.clock + spacing(count))

    def _spaced_out(self, watch: Watch, row: Row) -> bool:
        return row.number in watch.failures and self.clock < watch.failures[row.number][1]

    def act_late(self, row: Row, epoch: int, what: str) -> bool:
        """A repair that was decided long ago: whether it may still be done. It knows the epoch that it saw."""
        if not self.is_orphan(row) or row.epoch != epoch or row.locked:
            return False
        if what == "cancel":
            return row.wants_end
        if row.wants_end or self.is_paused(row):
            return False
        return what == "park" or row.verdict is None

    def take_orphan(self, row: Row) -> None:
        row.status, row.owner, row.due = PENDING, None, self.clock
        row.epoch += 1
        row.redrives += 1
        row.orphanings += 1

    # --- inside

    def _try_to_cancel(self, row: Row) -> bool:
        """A job that nobody works on and that was asked to end; False when its hooks failed."""
        try:
            self._end(row, CANCELLED)
        except HooksFailed:
            return False
        row.mirrored = row.rules.known
        return True

    def _end(self, row: Row, status: str, parked: str | None = None) -> None:
        if row.rules.hooks and self.hooks_broken:
            row.hook_failures += 1
            raise HooksFailed
        if status == CANCELLED:
            row.asked, row.mailed, row.verdict = True, False, None
        elif status == FAILED:
            self._fold(row)
        row.status, row.owner, row.due, row.parked, row.mirrored = status, None, None, parked, True
        if row.rules.hooks:
            row.domain = AGREES[status]

    def _fold(self, row: Row) -> None:
        """A letter is taken over by the next write that may act on it."""
        row.asked = row.asked or row.mailed
