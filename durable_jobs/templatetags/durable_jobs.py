"""How screens show a job's phase, its progress, and moments. Everything from a job is text, and escaped as such."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from django import template
from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from durable_jobs import explain
from durable_jobs.models import Job

register = template.Library()

PHASES = {
    "held": gettext_lazy("Held"),
    "scheduled": gettext_lazy("Scheduled"),
    "waiting": gettext_lazy("Waiting"),
    "paused": gettext_lazy("Paused"),
    "running": gettext_lazy("Running"),
    "retrying": gettext_lazy("Retrying"),
    "stopping": gettext_lazy("Stopping"),
    "stuck": gettext_lazy("Stuck"),
    "completed": gettext_lazy("Completed"),
    "failed": gettext_lazy("Failed"),
    "parked": gettext_lazy("Parked"),
    "cancelled": gettext_lazy("Cancelled"),
}

EVENTS = {
    "cancel_requested": gettext_lazy("Cancel requested"),
    "cancelled": gettext_lazy("Cancelled"),
    "failed": gettext_lazy("Failed"),
    "item_skipped": gettext_lazy("Item skipped"),
    "mirror_failed": gettext_lazy("Hook failed"),
    "orphaned": gettext_lazy("Worker lost"),
    "parked": gettext_lazy("Parked"),
    "paused": gettext_lazy("Paused"),
    "unpaused": gettext_lazy("Unpaused"),
    "started": gettext_lazy("Started"),
    "redriven": gettext_lazy("Redriven"),
    "row_gone": gettext_lazy("The project’s row was gone"),
    "settled_without_hooks": gettext_lazy("Settled without hooks"),
    "slice_failed": gettext_lazy("Slice failed"),
}


@register.filter
def plain(value: Any) -> str:
    """The value as text that will be escaped, whatever it claims to be."""
    # A SafeString gives itself away as an exact str only so.
    return "" if value is None else str.__str__(str(value))


@register.simple_tag
def pill(phase: Any) -> str:
    """The phase as a coloured word."""
    return format_html('<span class="jobs-pill jobs-{}">{}</span>', str(phase), phase_name(phase))


@register.filter
def phase_name(phase: Any) -> str:
    """The phase in the reader's language."""
    return str(PHASES.get(str(phase), str(phase)))


@register.filter
def event_name(event: str) -> str:
    """What happened, in the reader's language."""
    return str(EVENTS.get(event, event))


@register.simple_tag
def moment(value: datetime | None, now: datetime | None = None) -> str:
    """A time in the active zone, the exact one as its title. With `now` it says how long ago it was."""
    if value is None:
        return "–"
    local = timezone.localtime(value)
    exact = f"{local:%Y-%m-%d %H:%M:%S.%f} {local.tzname()} ({value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC)"
    shown = f"{date_format(local, 'Y-m-d H:i:s')} {local.tzname()}" if now is None else distance(value, now)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', value.astimezone(UTC).isoformat(), exact, shown
    )


def distance(value: datetime, now: datetime) -> str:
    """How long ago, or in how long."""
    seconds = (now - value).total_seconds()
    if abs(seconds) < 1:
        return _("now")
    if seconds < 0:
        return _("in %(time)s") % {"time": span(-seconds)}
    return _("%(time)s ago") % {"time": span(seconds)}


@register.filter
def span(seconds: float | timedelta | None) -> str:
    """A length of time in one unit, such as "45 s" or "12 min"."""
    if seconds is None:
        return "–"
    total = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
    if 0 < total < 1:
        return _("%(number)s ms") % {"number": round(total * 1000)}
    return explain.span(total)


@register.simple_tag
def took(job: Job, now: datetime) -> str:
    """How long a job has taken since its first start."""
    if job.started_at is None:
        return "–"
    return span((job.finished_at or now) - job.started_at)


@register.inclusion_tag("admin/durable_jobs/progress.html")
def progress(job: Job) -> dict[str, Any]:
    """The bar with its percent and counts; without a known total only the count."""
    percent = job.percent
    return {
        "percent": percent,
        "shown": None if percent is None else f"{percent:.0f}",
        "value": None if percent is None else f"{percent:.1f}",
        "done": job.processed_count,
        "total": job.total_count,
        "message": plain(job.progress_message),
    }


@register.filter
def number(value: Any) -> str:
    """A whole number with the separators of the reader's language."""
    return "–" if value is None else number_format(value, force_grouping=True)


@register.filter
def pretty(value: Any) -> str:
    """JSON for reading."""
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)


@register.filter
def last_part(dotted: str | None) -> str:
    """The last name of a dotted one: the class of an error without its module."""
    return plain((dotted or "").rpartition(".")[2])


@register.filter
def get(mapping: Any, key: Any) -> Any:
    """The value under a key."""
    return mapping.get(key)


@register.simple_tag
def how_many(count: Any) -> str:
    """A number of jobs, in words."""
    whole = int(getattr(count, "number", count))
    shown = str(count) if hasattr(count, "more") else number(whole)
    return ngettext("%(shown)s job", "%(shown)s jobs", whole) % {"shown": shown}
