"""The forms of the screens: a confirmation, a pause, the scope of a start, the filters of the history."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from django import forms
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from durable_jobs import explain, kinds, service
from durable_jobs.access import sees_everything
from durable_jobs.admin import access, listing
from durable_jobs.admin.acts import LONGEST_SPREAD, Act, Redrive
from durable_jobs.conf import config
from durable_jobs.keyset import compared
from durable_jobs.kinds import Kind
from durable_jobs.models import JobEvent, Pause, Scope
from durable_jobs.selection import WINDOW
from durable_jobs.service import KEY_LENGTH, QUEUE_LENGTH, REASON_LENGTH, SCOPE_LENGTH, Started
from durable_jobs.templatetags.durable_jobs import EVENTS, plain

EVENTS_A_PAGE: Final = 100
WITHOUT_INDEX: Final = {"kind": "kind", "actor": "actor__icontains", "operation": "operation_id"}
"""Filters of the history that no index serves, and their conditions: looked for among so many events at a time."""


class Confirmation(forms.Form):
    """Why, and for many jobs: over what time."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        required=False,
        max_length=REASON_LENGTH,
        widget=forms.Textarea(attrs={"rows": 2, "cols": 60}),
        help_text=gettext_lazy("Kept in the history, for whoever asks later."),
    )
    spread_minutes = forms.IntegerField(
        label=gettext_lazy("Spread over … minutes"),
        required=False,
        min_value=0,
        max_value=LONGEST_SPREAD,
        help_text=gettext_lazy("They come due one after the other. Empty: all at once."),
    )

    def __init__(self, act: Act, data: Any = None, *, one: bool = False) -> None:
        super().__init__(data)
        self.fields["reason"].required = act.reason_required
        if one or not isinstance(act, Redrive):
            del self.fields["spread_minutes"]

    @property
    def spread(self) -> float:
        """Seconds."""
        return 60.0 * (self.cleaned_data.get("spread_minutes") or 0)


# --- pauses ---------------------------------------------------------------------------------------------


class PauseForm(forms.Form):
    """What to pause, and why. All blank is everything."""

    queue = forms.CharField(label=gettext_lazy("Queue"), required=False, max_length=QUEUE_LENGTH)
    kind = forms.CharField(label=gettext_lazy("Kind"), required=False, max_length=KEY_LENGTH)
    tenant = forms.CharField(label=gettext_lazy("Tenant"), required=False, max_length=SCOPE_LENGTH)
    everything = forms.BooleanField(
        label=gettext_lazy("Pause everything"),
        required=False,
        help_text=gettext_lazy("All work of all queues, kinds and tenants."),
    )
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=REASON_LENGTH,
        widget=forms.Textarea(attrs={"rows": 2, "cols": 60}),
        help_text=gettext_lazy("Shown on every screen, for whoever finds the work standing."),
    )

    def __init__(self, request: HttpRequest, data: Any = None) -> None:
        super().__init__(
            data, initial={"queue": request.GET.get("queue", ""), "kind": request.GET.get("kind", "")}
        )
        self.suggestions = {
            "queue": sorted({kind.queue for kind in kinds.all_kinds()}),
            "kind": kinds.names(),
        }
        allowed = access.scopes(request)
        if allowed is not None and not sees_everything(request):
            tenants = sorted({scope.tenant for scope in allowed})
            self.fields["tenant"].required = True
            self.fields["tenant"].initial = tenants[0] if len(tenants) == 1 else ""
            self.suggestions["tenant"] = tenants
            del self.fields["everything"]
        for name, suggested in self.suggestions.items():
            if suggested:
                self.fields[name].widget.attrs["list"] = f"{name}-names"

    def clean(self) -> dict[str, Any]:
        said = super().clean() or {}
        named = any(said.get(name) for name in ("queue", "kind", "tenant"))
        if named and said.get("everything"):
            raise forms.ValidationError(_("Name what to pause, or tick everything: not both."))
        if not named and not said.get("everything") and not self.errors:
            raise forms.ValidationError(_("Name a queue, a kind or a tenant, or tick everything."))
        return said


def what_in_words(pause: Pause) -> str:
    """What a pause stops."""
    return plain(explain.what_stops(pause))


def pause_in_words(pause: Pause) -> str:
    """What it stops and why."""
    return _("Paused: %(what)s. %(reason)s") % {"what": what_in_words(pause), "reason": plain(pause.reason)}


# --- starting -------------------------------------------------------------------------------------------


class ScopeChoice(forms.Form):
    """For whom a job is started, and a key that makes a second click find the first one's job."""

    scope = forms.CharField(
        label=gettext_lazy("Scope"),
        max_length=140,
        help_text=gettext_lazy("Tenant, or tenant/organization."),
    )
    once = forms.CharField(widget=forms.HiddenInput, max_length=64)

    def __init__(self, request: HttpRequest, data: Any = None) -> None:
        allowed = access.scopes(request)
        self._allowed = allowed
        own = Scope(config.DEFAULT_TENANT)
        first = own if allowed is None or own in allowed or not allowed else allowed[0]
        super().__init__(data, prefix="job", initial={"scope": access.written(first), "once": uuid4().hex})
        if allowed is not None:
            labels = access.labels(allowed)
            choices = [(access.written(scope), labels[scope]) for scope in allowed]
            widget: Any = forms.HiddenInput if len(choices) == 1 else forms.Select
            self.fields["scope"] = forms.ChoiceField(
                label=self.fields["scope"].label, choices=choices, widget=widget()
            )

    @property
    def chosen(self) -> Scope:
        tenant, organization = access.parts(self.cleaned_data["scope"])
        return Scope(tenant or "", organization)

    @property
    def once_key(self) -> str:
        return f"form:{self.cleaned_data['once']}"


def start(request: HttpRequest, kind: Kind, form: Any, scope: ScopeChoice) -> Started:
    """Start what a kind's form describes: its cleaned data is the input.

    A form with a method `start(*, created_by, scope)` starts the job itself, with its own row and keys, and
    answers the job.
    """
    own = getattr(form, "start", None)
    if callable(own):
        asked = {name: str(value) for name, value in kinds.input_of(form).items()}
        return service.start_by(
            lambda: own(created_by=request.user, scope=scope.chosen),
            kind=type(kind),
            request=asked,
            scope=scope.chosen,
            idempotency_key=scope.once_key,
            created_by=request.user,
        )
    return service.start(
        type(kind),
        kinds.input_of(form),
        scope=scope.chosen,
        created_by=request.user,
        idempotency_key=scope.once_key,
    )


# --- history --------------------------------------------------------------------------------------------


class EventFilters(forms.Form):
    """The filters of the history, as they stand in its address."""

    event = forms.ChoiceField(
        label=gettext_lazy("Event"), required=False, choices=[("", gettext_lazy("All")), *EVENTS.items()]
    )
    actor = forms.CharField(label=gettext_lazy("Actor"), required=False, max_length=200)
    kind = forms.CharField(label=gettext_lazy("Kind"), required=False, max_length=200)
    operation = forms.CharField(label=gettext_lazy("Operation"), required=False, max_length=64)
    since = listing.Moment(gettext_lazy("From"))
    until = listing.Moment(gettext_lazy("To"))


def events(request: HttpRequest, filters: EventFilters, rows: Any) -> tuple[list[JobEvent], str]:
    """A page of the history, newest first, and where the next one begins."""
    said = {name: value for name, value in filters.cleaned_data.items() if value}
    ordered = rows.order_by("-created_at", "-id").defer("data", "traceback")
    if "event" in said:
        ordered = ordered.filter(event=said["event"])
    if "since" in said:
        ordered = ordered.filter(created_at__gte=said["since"])
    if "until" in said:
        ordered = ordered.filter(created_at__lt=listing.through(said["until"]))
    after = _read_place(request.GET.get("after", ""))
    if after is not None:
        moment, key = after
        ordered = ordered.filter(compared("<", created_at=moment, id=key))
    floor = None
    rest = {column: said[name] for name, column in WITHOUT_INDEX.items() if name in said}
    if rest:
        floor = ordered.only("id", "created_at")[WINDOW - 1 : WINDOW].first()
        ordered = ordered.filter(**rest)
        if floor is not None:
            ordered = ordered.filter(created_at__gte=floor.created_at)
    found = list(ordered[: EVENTS_A_PAGE + 1])
    if len(found) > EVENTS_A_PAGE:
        return found[:EVENTS_A_PAGE], _place(found[EVENTS_A_PAGE - 1])
    return found, _place(floor) if floor is not None else ""


def _place(event: JobEvent) -> str:
    return f"{event.created_at.astimezone(UTC):%Y%m%dT%H%M%S.%f}~{event.pk}"


def _read_place(text: str) -> tuple[datetime, int] | None:
    moment, _, key = text.partition("~")
    try:
        at, number = datetime.strptime(moment, "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC), int(key)
    except ValueError:
        return None
    return (at, number) if 0 <= number < 2**63 else None
