"""The filters of the list of jobs. A name or a value that means nothing is an error that names the parameter."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final

import django_filters
from django import forms
from django.core.exceptions import ValidationError
from django.http import QueryDict
from rest_framework import serializers

from durable_jobs.explain import Phase
from durable_jobs.models import Job, Status
from durable_jobs.selection import RESTING

INSTANT: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:([Zz])|([+-])(\d\d):(\d\d))", re.ASCII
)
WHOLE: Final = re.compile(r"[0-9]{1,9}")


class InstantField(forms.CharField):
    """A time by RFC 3339, with its offset. What lies beyond the calendar's ends is taken as the end."""

    def clean(self, value: Any) -> datetime | None:
        """The instant in UTC; None for nothing."""
        text = super().clean(value)
        if not text:
            return None
        found = INSTANT.fullmatch(text)
        try:
            if found is None:
                raise ValueError
            return _instant(found)
        except ValueError:
            raise ValidationError(
                "Give a time with its offset, as 2026-03-01T03:00:00Z (a + in an address is written %2B)."
            ) from None


def _instant(found: re.Match[str]) -> datetime:
    year, month, day, hour, minute, second = (int(found[group]) for group in range(1, 7))
    micro = int((found[7] or "0").ljust(6, "0")[:6])
    if year == 0:
        return datetime.min.replace(tzinfo=UTC)
    hours, minutes = int(found[10] or 0), int(found[11] or 0)
    if hours > 23 or minutes > 59:
        raise ValueError
    offset = timedelta(hours=hours, minutes=minutes) * (-1 if found[9] == "-" else 1)
    moment = datetime(year, month, day, hour, minute, min(second, 59), micro)
    if second > 60:
        raise ValueError
    try:
        return moment.replace(tzinfo=timezone(offset)).astimezone(UTC)
    except OverflowError:
        return (datetime.max if year > 5000 else datetime.min).replace(tzinfo=UTC)


class InstantFilter(django_filters.Filter):
    """Compares a time."""

    field_class = InstantField


def _text(column: str, length: int) -> django_filters.CharFilter:
    return django_filters.CharFilter(field_name=column, max_length=length, strip=False)


class JobFilter(django_filters.FilterSet):
    """Jobs by their columns; `phase` is judged row by row, when they have been read."""

    base_filters: dict[str, Any]

    kind = _text("kind", 200)
    queue = _text("queue_name", 100)
    tenant = _text("tenant_id", 64)
    organization = _text("organization_id", 64)
    status = django_filters.ChoiceFilter(choices=Status.choices)
    phase = django_filters.ChoiceFilter(
        choices=[(phase.value, phase.value) for phase in Phase], method="judged_later"
    )
    subject_type = _text("subject_type", 200)
    subject_id = _text("subject_id", 200)
    lock_key = _text("lock_key", 200)
    error_type = _text("error_type", 200)
    error_code = _text("error_code", 100)
    created_since = InstantFilter(field_name="created_at", lookup_expr="gte")
    created_before = InstantFilter(field_name="created_at", lookup_expr="lt")
    finished_since = InstantFilter(field_name="finished_at", lookup_expr="gte")
    finished_before = InstantFilter(field_name="finished_at", lookup_expr="lt")

    class Meta:
        model = Job
        fields: tuple[str, ...] = ()

    def __init__(self, data: Any = None, *args: Any, **options: Any) -> None:
        # Each filter that is there is copied; those that are not asked for need not be.
        self.base_filters = {
            name: filter
            for name, filter in type(self).base_filters.items()
            if name in (data or ()) or filter.extra.get("required")
        }
        super().__init__(data, *args, **options)

    def judged_later(self, queryset: Any, name: str, value: str) -> Any:
        """All of them: the phase needs the database's time, which was read once for the whole answer."""
        return queryset

    @property
    def given(self) -> dict[str, Any]:
        """The values of the filters that were given."""
        return {name: value for name, value in self.form.cleaned_data.items() if value not in (None, "")}

    @property
    def asked_phase(self) -> Phase | None:
        """The phase that was asked for."""
        asked = self.form.cleaned_data.get("phase")
        return Phase(asked) if asked else None

    @property
    def is_indexed(self) -> bool:
        """Whether an index finds these jobs; others are looked for among so many jobs at a time."""
        given = self.given
        state = given.get("phase") or given.get("status")
        return "subject_type" in given or (state is not None and state not in RESTING)

    @classmethod
    def checked(cls, parameters: QueryDict, queryset: Any, **options: Any) -> JobFilter:
        """The filters of a request; raises a ValidationError that names every parameter that is wrong."""
        chosen = cls(
            {name: value for name, value in parameters.items() if name in cls.base_filters},
            queryset,
            **options,
        )
        if not chosen.is_valid():
            raise serializers.ValidationError(
                {name: [str(message) for message in messages] for name, messages in chosen.errors.items()}
            )
        return chosen


def problems(parameters: QueryDict, known: set[str]) -> Iterator[tuple[str, str]]:
    """What is wrong with the parameters of an address, whatever they are for."""
    for name, values in parameters.lists():
        if name not in known:
            listed = f"Known here: {', '.join(sorted(known))}." if known else "There are none here."
            yield name, f"There is no such parameter. {listed}"
        elif len(values) > 1:
            yield name, "It is given more than once."
        elif not values[0]:
            yield name, "It is empty. Leave it out, or give a value."
        elif "\x00" in values[0]:
            yield name, "It holds NUL."


def whole(parameters: QueryDict, name: str, least: int, most: int, otherwise: int) -> int:
    """A whole number among the parameters; raises a ValidationError that names it."""
    given = parameters.get(name)
    if given is None:
        return otherwise
    if not WHOLE.fullmatch(given) or not least <= int(given) <= most:
        raise serializers.ValidationError({name: [f"Give a whole number from {least} to {most}."]})
    return int(given)


def required(parameters: QueryDict, name: str, longest: int) -> str:
    """A text among the parameters that must be there; raises a ValidationError that names it."""
    given = parameters.get(name, "")
    if not given.strip() or len(given) > longest:
        raise serializers.ValidationError({name: [f"Give a text of 1 to {longest} characters."]})
    return given


def one_of(parameters: QueryDict, name: str, choices: Collection[str]) -> str | None:
    """One of these among the parameters, or None; raises a ValidationError that names it."""
    given = parameters.get(name)
    if given is not None and given not in choices:
        raise serializers.ValidationError({name: [f"Give one of {', '.join(choices)}."]})
    return given
