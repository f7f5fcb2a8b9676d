"""Which steps of two actors can notice each other: what a statement touches, and how.

Two steps that cannot notice each other give the same run in either order, so that one of the orders is enough
(partial-order reduction). In doubt they can: a statement without the id of a row touches the whole table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

READS, LOCKS, COMMITS = "reads", "locks", "commits"
"""A plain look; a lock or a write that nobody else sees yet; what is seen, and free again, from now on."""

NOTICE: Final = frozenset(
    [(LOCKS, LOCKS), (LOCKS, COMMITS), (COMMITS, LOCKS), (READS, COMMITS), (COMMITS, READS)]
)
"""READ COMMITTED: a look sees what is committed, so it notices no lock; two commits of two actors hold no row in
common, and who could tell their order stands between them."""

EVERY: Final = "*"
FILE: Final = "the file"
"""SQLite's one lock."""

_TABLE: Final = re.compile(r"\b(?:durable_jobs|tests|soak|auth|django)_\w+")
_WRITTEN: Final = re.compile(r'\b(?:UPDATE|INSERT INTO|DELETE FROM)\s+"?(\w+)')
_LOCKED: Final = re.compile(r"\bFOR (?:NO KEY )?UPDATE\b")
_ADVISORY: Final = "advisory_xact_lock"
_OF_ONE_ROW: Final = re.compile(r'\bid"?\s*=\s')
_ID: Final = re.compile(r"\b[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}\b")
_JOBS: Final = "durable_jobs_job"
_HISTORY: Final = "durable_jobs_event"
_MAKES_LIVE: Final = re.compile(r"INSERT INTO durable_jobs_job|\bfinished_at = NULL|c\.status = 'held'")
"""These ask the index on lock keys, and so meet other rows."""

names: dict[UUID, str] = {}
"""What the rows of this run are called, in every run alike."""


@dataclass(frozen=True)
class Touch:
    how: str
    what: str
    row: str = EVERY

    def meets(self, other: Touch) -> bool:
        return (
            self.what == other.what
            and (self.row == other.row or EVERY in (self.row, other.row))
            and (self.how, other.how) in NOTICE
        )


@dataclass(frozen=True)
class Event:
    """What one actor did between two choices."""

    actor: int
    touches: frozenset[Touch]

    def meets(self, other: Event) -> bool:
        return self.actor == other.actor or any(
            one.meets(two) for one in self.touches for two in other.touches
        )


@dataclass(frozen=True)
class Step:
    """What happened between two choices: somebody went on, and with it whoever had waited for him."""

    own: Event
    freed: tuple[Event, ...] = ()

    @property
    def actor(self) -> int:
        return self.own.actor

    @property
    def events(self) -> tuple[Event, ...]:
        return (self.own, *self.freed)

    def meets(self, other: Step) -> bool:
        return any(one.meets(two) for one in self.events for two in other.events)


def touches_of(sql: str, params: Any) -> set[Touch]:
    """What a statement reads, and what it locks, in whatever transaction."""
    tables = set(_TABLE.findall(sql))
    written = set(_WRITTEN.findall(sql)) & tables
    if _LOCKED.search(sql):
        written |= tables & {_JOBS}
    rows = _rows(sql, params)
    found = {
        Touch(READS, table, row)
        for table in tables - {_HISTORY}
        for row in (rows if table == _JOBS else [EVERY])
    }
    found |= {
        Touch(LOCKS, table, row)
        for table in written - {_HISTORY}
        for row in (rows if table == _JOBS else [EVERY])
    }
    if _ADVISORY in sql:
        found.add(Touch(LOCKS, "advisory locks"))
    return found


def _rows(sql: str, params: Any) -> list[str]:
    if not _OF_ONE_ROW.search(sql) or _MAKES_LIVE.search(sql):
        return [EVERY]
    told = " ".join(map(str, params.values() if isinstance(params, dict) else params or ()))
    found = {UUID(one) for one in _ID.findall(told)}
    return sorted({names.get(one, EVERY) for one in found}) or [EVERY]


def committed(touches: Iterable[Touch]) -> set[Touch]:
    """What the end of a transaction does that has locked these."""
    return {Touch(COMMITS, one.what, one.row) for one in touches if one.how == LOCKS}
