"""Pages by key: the next page begins after a row, not after a number of rows.

So a page costs the same wherever it lies, and rows that come or change while somebody walks make no row appear twice
and none be left out. A cursor is a place in the list, not a right: it holds the creation time and id of a row, and the
rows behind it are found within the scopes of whoever sends it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.db import models
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.utils.urls import remove_query_param, replace_query_param

from durable_jobs.keyset import RowComparison, compared
from durable_jobs.models import Job

PAGE_SIZE: Final = 25
LARGEST_PAGE: Final = 200
WINDOW: Final = 5_000
"""What no index finds is looked for among so many rows of the list in one request."""
JUDGED: Final = 2_000
"""So many rows are judged one by one in one request."""
CURSOR: Final = r"^[ab][0-9a-f]{13}[0-9a-f]{32}$"
EVENT_CURSOR: Final = r"^[ab][0-9]{1,18}$"
SIGNED_CURSOR: Final = r"^\.?[A-Za-z0-9_-]+:[A-Za-z0-9]+:[A-Za-z0-9_-]+\Z"
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Place:
    """Before or after a row of the list, which is newest first. As text: `a` or `b`, microseconds, id."""

    created_at: datetime
    id: UUID
    backwards: bool = False

    def __str__(self) -> str:
        micros = (self.created_at - EPOCH) // timedelta(microseconds=1)
        return f"{'b' if self.backwards else 'a'}{min(max(micros, 0), 16**13 - 1):013x}{self.id.hex}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """The place that was written so; raises a ValidationError."""
        if not re.fullmatch(CURSOR, text) or text.endswith("\n"):
            raise serializers.ValidationError({"cursor": ["Take it from an earlier answer, as it was."]})
        created_at = EPOCH + timedelta(microseconds=int(text[1:14], 16))
        return cls(created_at, UUID(hex=text[14:]), text[0] == "b")

    @classmethod
    def of(cls, job: Job, *, backwards: bool = False) -> Place:
        """Before or after this job."""
        return cls(job.created_at, job.id, backwards)

    def turned(self) -> Place:
        """The other way from here, the row itself included."""
        number = self.id.int + (1 if self.backwards else -1)
        return Place(self.created_at, UUID(int=min(max(number, 0), 2**128 - 1)), not self.backwards)


@dataclass(frozen=True)
class Page:
    """Jobs, newest first, and the places where there are more, or may be."""

    jobs: list[Job]
    previous: Place | None
    next: Place | None


@dataclass(frozen=True)
class Reading:
    """How a page is read: `rows` unordered; `within` the rows of the whole list when no index finds `rows`.

    `by_time`: of one tenant, whose list has an index by creation time and id; otherwise by id alone, which is by time
    up to the clocks of the processes that start jobs. `judge` tells of a row whether it belongs to the page.
    """

    rows: models.QuerySet[Any]
    within: models.QuerySet[Any] | None = None
    by_time: bool = True
    judge: Callable[[Job], bool] | None = None

    def page(self, place: Place | None, size: int) -> Page:
        """Read one page."""
        backwards = place is not None and place.backwards
        found, stop = self._found(place, size, backwards)
        more, jobs = len(found) > size, found[:size]
        last = Place.of(jobs[-1], backwards=backwards) if jobs else None
        onward = last if more else stop
        back = None
        if place is not None:
            back = Place.of(jobs[0], backwards=not backwards) if jobs else place.turned()
        if backwards:
            return Page(jobs[::-1], previous=onward, next=back)
        return Page(jobs, previous=back, next=onward)

    def _found(self, place: Place | None, size: int, backwards: bool) -> tuple[list[Job], Place | None]:
        """Up to one job more than fit the page, and where the search stopped when it did not reach the end."""
        rows = self._from(self.rows, place, backwards)
        stop = None
        if self.within is not None:
            window = self._from(self.within, place, backwards).only("id", "created_at")
            floor = window[WINDOW - 1 : WINDOW].first()
            if floor is not None:
                stop = Place.of(floor, backwards=backwards)
                rows = rows.filter(self._compared("<=" if backwards else ">=", Place.of(floor)))
        if self.judge is None:
            return list(rows[: size + 1]), stop
        # Most rows belong: a few more than fit are enough, as a rule.
        first = min(2 * size + 20, JUDGED)
        judged = list(rows[:first])
        if len(judged) == first and sum(map(self.judge, judged)) <= size:
            judged += list(rows[first:JUDGED])
        if len(judged) == JUDGED:
            stop = Place.of(judged[-1], backwards=backwards)
        return [job for job in judged if self.judge(job)][: size + 1], stop

    def _from(self, rows: models.QuerySet[Any], place: Place | None, backwards: bool) -> models.QuerySet[Any]:
        order = ("created_at", "id") if self.by_time else ("id",)
        rows = rows.order_by(*(order if backwards else (f"-{name}" for name in order)))
        if place is None:
            return rows
        return rows.filter(self._compared(">" if backwards else "<", place))

    def _compared(self, operator: str, place: Place) -> RowComparison:
        if not self.by_time:
            return compared(operator, id=place.id)
        return compared(operator, created_at=place.created_at, id=place.id)


def event_page(
    rows: models.QuerySet[Any], cursor: str | None, size: int
) -> tuple[list[Any], str | None, str | None]:
    """A page of a job's history, newest first, with the cursors of the previous and the next one."""
    if cursor is not None and (not re.fullmatch(EVENT_CURSOR, cursor) or cursor.endswith("\n")):
        raise serializers.ValidationError({"cursor": ["Take it from an earlier answer, as it was."]})
    backwards = cursor is not None and cursor[0] == "b"
    rows = rows.order_by("id" if backwards else "-id")
    if cursor is not None:
        rows = rows.filter(**{f"id__{'gt' if backwards else 'lt'}": int(cursor[1:])})
    found = list(rows[: size + 1])
    more, events = len(found) > size, found[:size]
    onward = f"{'b' if backwards else 'a'}{events[-1].id}" if more else None
    back = None
    if cursor is not None:
        step = 1 if backwards else -1
        edge = events[0].id if events else max(0, int(cursor[1:]) + step)
        back = f"{'a' if backwards else 'b'}{edge}"
    if backwards:
        return events[::-1], onward, back
    return events, back, onward


def link(request: Request, cursor: object | None) -> str | None:
    """The address of the page at a place."""
    if cursor is None:
        return None
    address = request.build_absolute_uri()
    return str(replace_query_param(remove_query_param(address, "cursor"), "cursor", str(cursor)))


def answer(
    request: Request, results: Sequence[Any], previous: object | None, next: object | None
) -> dict[str, Any]:
    """The body of a page."""
    return {"next": link(request, next), "previous": link(request, previous), "results": results}
