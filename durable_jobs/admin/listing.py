"""What the lists show: the filters in the address, the search, and the rows with what is said of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django import forms
from django.apps import apps
from django.db.models import Q, Value
from django.db.models.functions import Coalesce
from django.http import HttpRequest, QueryDict
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from durable_jobs import database, explain, kinds, selection
from durable_jobs.admin import access
from durable_jobs.conf import config
from durable_jobs.explain import Phase, Reason
from durable_jobs.models import LIVE, Job, Status, as_uuid
from durable_jobs.selection import Listed, Look, Place, Selection
from durable_jobs.templatetags.durable_jobs import PHASES

PAGE: Final = 50
MOST_FOUND: Final = 50
HUMAN: Final = "human"
FORMATS: Final = ("%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d")


class Moment(forms.DateTimeField):
    """A time to the minute, in the active zone."""

    def __init__(self, label: Any) -> None:
        widget = forms.DateTimeInput(attrs={"type": "datetime-local"}, format=FORMATS[0])
        super().__init__(label=label, required=False, input_formats=FORMATS, widget=widget)

    def clean(self, value: Any) -> datetime | None:
        found: datetime | None = super().clean(value)
        if found is not None and not 1970 <= found.year <= 9000:
            # Beyond, zones and databases run out of years.
            raise forms.ValidationError(self.error_messages["invalid"], code="invalid")
        return found


class Filters(forms.Form):
    """The filters of the list, as they stand in its address."""

    phase = forms.ChoiceField(
        label=gettext_lazy("Phase"),
        required=False,
        choices=[
            ("", gettext_lazy("All")),
            (HUMAN, gettext_lazy("Needs a human (failed or parked)")),
            *PHASES.items(),
        ],
    )
    kind = forms.CharField(label=gettext_lazy("Kind"), required=False, max_length=200)
    queue = forms.CharField(label=gettext_lazy("Queue"), required=False, max_length=100)
    scope = forms.CharField(label=gettext_lazy("Scope"), required=False, max_length=140)
    error_type = forms.CharField(label=gettext_lazy("Error type"), required=False, max_length=200)
    error_code = forms.CharField(label=gettext_lazy("Error code"), required=False, max_length=100)
    created_from = Moment(gettext_lazy("Created from"))
    created_to = Moment(gettext_lazy("Created to"))
    finished_from = Moment(gettext_lazy("Finished from"))
    finished_to = Moment(gettext_lazy("Finished to"))
    q = forms.CharField(label=gettext_lazy("Search"), required=False, max_length=300)

    FOLDED = ("error_type", "error_code", "created_from", "created_to", "finished_from", "finished_to")

    def __init__(self, request: HttpRequest, data: QueryDict | None = None) -> None:
        super().__init__(request.GET if data is None else data, auto_id="filter_%s")
        self.suggestions = {
            "kind": kinds.names(),
            "queue": sorted({kind.queue for kind in kinds.all_kinds()}),
            "scope": sorted(access.written(scope) for scope in access.scopes(request) or ()),
        }
        for name, suggested in self.suggestions.items():
            if suggested:
                self.fields[name].widget.attrs["list"] = f"{name}-names"
        if not self.is_valid():
            for field in self.errors:
                self.fields[field].widget.attrs["aria-describedby"] = f"filter_{field}_error"

    @property
    def folded(self) -> list[Any]:
        return [self[name] for name in self.FOLDED]

    @property
    def opens(self) -> bool:
        """Whether a filter of the folded part is set."""
        return any(self.data.get(name) for name in self.FOLDED)

    def selection(self, request: HttpRequest) -> Selection:
        """The jobs that are asked for, within the user's scopes. A filter that means nothing is left out."""
        said: dict[str, Any] = {name: value for name, value in self.cleaned_data.items() if value}
        phase = said.get("phase")
        tenant, organization = access.parts(said.get("scope", ""))
        chosen = Selection(
            status=Status.FAILED.value if phase == HUMAN else None,
            phase=Phase(phase) if phase and phase != HUMAN else None,
            kind=said.get("kind"),
            queue=said.get("queue"),
            tenant=tenant,
            organization=organization,
            error_type=said.get("error_type"),
            error_code=said.get("error_code"),
            created_since=said.get("created_from"),
            created_before=through(said.get("created_to")),
            ended_since=said.get("finished_from"),
            ended_before=through(said.get("finished_to")),
            scopes=access.scopes(request),
        )
        if (chosen.error_type or chosen.error_code) and phase is None:
            # Only these keep their error for long, and only these an index finds.
            chosen = replace(chosen, status=Status.FAILED.value)
        return chosen

    @property
    def words(self) -> str:
        """What is searched for."""
        return str(self.cleaned_data.get("q", "")).strip()


def through(minute: datetime | None) -> datetime | None:
    """A time to the minute takes in that minute."""
    return minute + timedelta(minutes=1) if minute is not None else None


@dataclass(frozen=True)
class Row:
    """A job of the list, with what is said of it."""

    job: Job
    phase: Phase
    reason: Reason | None
    subject: Subject | None
    scope: str


@dataclass(frozen=True)
class Subject:
    """The project's own row: its name in words, and its page in the admin if it has one."""

    name: str
    url: str = ""


@dataclass(frozen=True)
class Page:
    """A page of the list. `shows_scopes` when there is more than one on it."""

    rows: list[Row]
    next: Place | None
    searched: int | None
    look: Look
    chosen: Selection
    may_choose_scope: bool
    shows_scopes: bool


def read(request: HttpRequest, filters: Filters, site: Any) -> Page:
    """The page of the list that the address names."""
    look, chosen = Look.take(), filters.selection(request)
    after = Place.parse(request.GET.get("after", ""))
    words = filters.words
    if words:
        chosen, found = _search(words, chosen, look, after)
    else:
        found = selection.listed(chosen, look, limit=PAGE, after=after)
    scopes = access.scopes(request)
    rows = rows_of(found.jobs, look, site)
    return Page(
        rows=rows,
        next=found.next,
        searched=found.searched,
        look=look,
        chosen=chosen,
        may_choose_scope=scopes is None or len(scopes) > 1,
        shows_scopes=len({job.scope for job in found.jobs}) > 1,
    )


def rows_of(jobs: list[Job], look: Look, site: Any) -> list[Row]:
    """What the list says of each job, without a query for each."""
    labels = access.labels(job.scope for job in jobs)
    return [
        Row(
            job,
            (phase := look.phase(job)),
            _reason(job, phase, look),
            subject_of(job, site),
            labels[job.scope],
        )
        for job in jobs
    ]


def _reason(job: Job, phase: Phase, look: Look) -> Reason | None:
    """The most pressing trouble of a job that is stuck; of the others their phase says enough."""
    if phase is Phase.STUCK:
        return next(iter(explain.troubles(job, look.now, look.pauses)), None)
    if phase is Phase.PAUSED:
        return next(
            (Reason("paused", explain.of_pause(pause)) for pause in explain.matching(job, look.pauses)), None
        )
    return None


def subject_of(job: Job, site: Any) -> Subject | None:
    """The job's subject, by its label alone: no query."""
    if not job.subject_type:
        return None
    try:
        model = apps.get_model(job.subject_type)
    except (LookupError, ValueError):
        return Subject(f"{job.subject_type} {job.subject_id}")
    name = f"{model._meta.verbose_name} {job.subject_id}"
    if not site.is_registered(model):
        return Subject(name)
    url = f"{site.name}:{model._meta.app_label}_{model._meta.model_name}_change"
    return Subject(name, url)


# --- search ---------------------------------------------------------------------------------------------


def _search(words: str, chosen: Selection, look: Look, after: Place | None) -> tuple[Selection, Listed]:
    """An exact id first; then subject, lock key and idempotency key, by index where there is one."""
    job_id = as_uuid(words)
    if job_id is not None:
        exact = Selection(ids=(job_id,), scopes=chosen.scopes)
        return exact, selection.listed(exact, look, limit=1)
    found = _by_index(words, chosen) if after is None else []
    if found:
        among = replace(chosen, ids=tuple(found))
        return among, selection.listed(among, look, limit=MOST_FOUND)
    return chosen, _among_the_newest(words, chosen, look, after)


def _by_index(words: str, chosen: Selection) -> list[UUID]:
    jobs = Job.objects.using(database.alias()).order_by()
    label, _, key = words.rpartition(":")
    subjects = (
        [label.lower()]
        if label
        else sorted(
            {kind.mirror.model_label.lower() for kind in kinds.all_kinds() if kind.mirror is not None}
        )
    )
    questions: list[Any] = [jobs.filter(lock_key=words, status__in=LIVE)]
    if subjects:
        questions.append(jobs.filter(subject_type__in=subjects, subject_id=key))
    tenants = {scope.tenant for scope in chosen.scopes or ()} or {chosen.tenant or config.DEFAULT_TENANT}
    questions.append(
        jobs.annotate(within=Coalesce("organization_id", Value(""))).filter(
            tenant_id__in=tenants,
            within__in={scope.organization or "" for scope in chosen.scopes or ()}
            or {chosen.organization or ""},
            kind__in=kinds.names(),
            idempotency_key=words,
        )
    )
    found: list[UUID] = []
    for question in questions:
        found += question.values_list("id", flat=True)[:MOST_FOUND]
    return list(dict.fromkeys(found))[:MOST_FOUND]


def _among_the_newest(words: str, chosen: Selection, look: Look, after: Place | None) -> Listed:
    matching = Q(lock_key=words) | Q(idempotency_key=words) | Q(subject_id=words)
    return selection.listed(chosen, look, limit=PAGE, after=after, also=matching)


# --- the address ----------------------------------------------------------------------------------------


def address(request: HttpRequest, *without: str, **changed: Any) -> str:
    """The query of this address with parameters changed, and the page left out."""
    query = request.GET.copy()
    for name in ("after", *without):
        query.pop(name, None)
    for name, value in changed.items():
        query[name] = str(value)
    return query.urlencode()


def minute(moment: datetime) -> str:
    """A time as the filters write it: to the minute, in the active zone."""
    return timezone.localtime(moment).strftime(FORMATS[0])


def in_words(filters: Filters) -> list[tuple[str, str]]:
    """The filters that are set, as label and value."""
    said: Iterable[tuple[str, Any]] = filters.cleaned_data.items()
    found = []
    for name, value in said:
        if not value:
            continue
        if name == "phase":
            shown = _("Needs a human") if value == HUMAN else str(PHASES.get(value, value))
        elif isinstance(value, datetime):
            local = timezone.localtime(value)
            shown = f"{local:%Y-%m-%d %H:%M} {local.tzname()}"
        else:
            shown = str(value)
        found.append((str(filters.fields[name].label), shown))
    return found
