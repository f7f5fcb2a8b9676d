"""The screens. `JobAdminMixin` holds all that concerns jobs, so that other themes and admin sites can use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import update_wrapper
from typing import Any, Final
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.http import require_safe

from durable_jobs import database, explain, kinds, overview, selection, service, store
from durable_jobs.admin import access, acts, charts, forms, listing
from durable_jobs.admin import job as job_page
from durable_jobs.admin.acts import ACTS, Act, Bulk
from durable_jobs.admin.listing import Filters
from durable_jobs.exceptions import DurableJobsError, InvalidInput
from durable_jobs.models import Job, JobEvent, Pause, Scope, WorkerProcess, as_uuid
from durable_jobs.selection import LARGE_COLUMNS, Look, Selection
from durable_jobs.templatetags.durable_jobs import PHASES, number, span

looks = method_decorator(require_safe)
"""A screen that only shows: GET and HEAD."""

TEMPLATES: Final = "admin/durable_jobs"
STUCK_SHOWN: Final = 20
FAILURES_SHOWN: Final = 30
HELD_SHOWN: Final = 5


class ReadOnly:
    """No engine row is added, changed or deleted through the admin."""

    actions: Any = None

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return access.may(request, access.VIEW)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        return {}


class Screens(ReadOnly):
    """What the screens share: the banner of pauses, the way to each other, the words of a refusal."""

    admin_site: Any
    model: Any
    opts: Any

    def screen(
        self, request: HttpRequest, template: str, title: str, context: dict[str, Any], status: int = 200
    ) -> TemplateResponse:
        request.current_app = self.admin_site.name
        shared = {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "jobs_pauses": self._pauses(request),
            "may_start": access.may(request, access.START)
            and any(kind.input_form for kind in kinds.all_kinds()),
            "may_pause": access.may(request, access.PAUSE),
            "has_view_permission": True,
        }
        return TemplateResponse(request, f"{TEMPLATES}/{template}", {**shared, **context}, status=status)

    def _pauses(self, request: HttpRequest) -> list[tuple[Pause, str, bool]]:
        """Each pause that concerns the user, in words, and whether they may end it."""
        pauses = Pause.objects.using(database.alias()).order_by("id")
        return [
            (pause, forms.pause_in_words(pause), access.may_pause(request, pause.tenant_id))
            for pause in pauses
            if access.is_visible(request, pause)
        ]

    def go(self, name: str, *args: Any, query: str = "") -> HttpResponseRedirect:
        url = reverse(f"{self.admin_site.name}:{name}", args=args)
        return HttpResponseRedirect(f"{url}?{query}" if query else url)

    def require(self, request: HttpRequest, *permissions: str) -> None:
        if not all(access.may(request, permission) for permission in (access.VIEW, *permissions)):
            raise PermissionDenied


class JobAdminMixin(Screens):
    """Overview, list, job page, confirmations, start page: everything about jobs in an admin.

    For another theme: unregister `Job`, and register it with `class JobAdmin(JobAdminMixin, theme.ModelAdmin)`.
    """

    def get_queryset(self, request: HttpRequest) -> Any:
        return job_page.for_user(request)

    def get_urls(self) -> list[URLPattern]:
        own: list[tuple[str, Callable[..., HttpResponse], str]] = [
            ("overview/", self.overview_view, "overview"),
            ("start/", self.start_view, "start"),
            ("start/<str:kind>/", self.start_kind_view, "start_kind"),
            ("pause/", self.pause_view, "pause"),
            ("unpause/<int:pause_id>/", self.unpause_view, "unpause"),
            ("many/", self.many_view, "many"),
            ("<uuid:job_id>/live/", self.live_view, "live"),
            ("<uuid:job_id>/act/<str:act>/", self.act_view, "act"),
        ]
        # Outside any transaction of the request: each job has one of its own, and locks nothing longer.
        bulk = path(
            "bulk/",
            transaction.non_atomic_requests(self.admin_site.admin_view(self.bulk_view)),
            name="durable_jobs_job_bulk",
        )
        return [
            *(path(route, self._wrapped(view), name=f"durable_jobs_job_{name}") for route, view, name in own),
            bulk,
            *super().get_urls(),  # type: ignore[misc]
        ]

    def _wrapped(self, view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
        def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            answer: HttpResponse = self.admin_site.admin_view(view)(request, *args, **kwargs)
            return answer

        return update_wrapper(wrapper, view)

    # --- overview ---------------------------------------------------------------------------------------

    @looks
    def overview_view(self, request: HttpRequest) -> HttpResponse:
        """Is it moving, what is stuck, what needs a human."""
        self.require(request)
        look, among = Look.take(), access.among(request)
        workers = explain.live_workers(look.now)
        live = overview.live(look.now, among)
        stuck = overview.stuck_jobs(look.now, limit=STUCK_SHOWN, where=among)
        recent = overview.recent(look.now, among)
        return self.screen(
            request,
            "overview.html",
            _("Overview"),
            {
                "now": look.now,
                "tiles": self._tiles(live),
                "queues": overview.queues(look.now, workers, among),
                "workers": self._workers(request, look.now),
                "stuck": listing.rows_of(stuck, look, self.admin_site),
                "stuck_more": len(stuck) == STUCK_SHOWN,
                "throughput": _throughput(recent),
                "waiting": _waiting(recent),
                "failed": _failed_by_hour(recent),
                "recent": recent,
                "failures": self._failures(recent, look.now),
                "failures_more": len(recent.failures) > FAILURES_SHOWN,
                "windows": list(overview.WINDOWS),
                "hours": [
                    (bar, self._ended_between(bar.since, bar.until)) for bar in recent.hours if bar.failed
                ],
            },
        )

    def _tiles(self, live: dict[str, overview.Bounded]) -> list[dict[str, Any]]:
        return [
            {
                "phase": phase,
                "count": count,
                "query": urlencode({"phase": phase}),
                "tone": "alarm" if phase in ("stuck", "failed", "parked") and count.number else "",
            }
            for phase, count in live.items()
        ]

    def _failures(self, recent: overview.Recent, now: datetime) -> list[dict[str, Any]]:
        rows = []
        for group in recent.failures[:FAILURES_SHOWN]:
            cells = []
            for label, window in overview.WINDOWS.items():
                query = {
                    "phase": listing.HUMAN,
                    "kind": group.kind,
                    "finished_from": listing.minute(now - window),
                }
                if group.error_type:
                    query["error_type"] = group.error_type
                cells.append((label, group.windows[label], urlencode(query)))
            rows.append({"group": group, "cells": cells})
        return rows

    def _ended_between(self, since: datetime, until: datetime) -> str:
        return urlencode(
            {
                "phase": listing.HUMAN,
                "finished_from": listing.minute(since),
                "finished_to": listing.minute(until - timedelta(minutes=1)),
            }
        )

    def _workers(self, request: HttpRequest, now: datetime) -> list[dict[str, Any]]:
        workers = list(WorkerProcess.objects.using(database.alias()).order_by("-beat_at")[:50])
        held: dict[str, list[Job]] = {}
        running = (
            job_page.for_user(request).filter(status="running", lease_owner__isnull=False).order_by("id")
        )
        for job in running.defer(*LARGE_COLUMNS)[: 50 * HELD_SHOWN]:
            # The owner of a lease is the process and the thread within it.
            held.setdefault(str(job.lease_owner), []).append(job)
        alive = {worker.pk for worker in explain.live_workers(now)}
        return [
            {
                "worker": worker,
                "queues": worker.queue_names,
                "kinds": worker.kind_names,
                "alive": worker.pk in alive,
                "held": [
                    job
                    for owner, jobs in held.items()
                    if owner == worker.owner or owner.startswith(f"{worker.owner}:")
                    for job in jobs
                ][:HELD_SHOWN],
            }
            for worker in workers
        ]

    # --- list -------------------------------------------------------------------------------------------

    @looks
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The list of jobs, newest first."""
        self.require(request)
        filters = Filters(request)
        page = listing.read(request, filters, self.admin_site)
        query = listing.address(request)
        following = ""
        if page.next is not None:
            following = (
                listing.address(request) + ("&" if query else "") + urlencode({"after": str(page.next)})
            )
        return self.screen(
            request,
            "list.html",
            _("Jobs"),
            {
                "filters": filters,
                "set": listing.in_words(filters),
                "page": page,
                "rows": page.rows,
                "now": page.look.now,
                "query": query,
                "next": following,
                "is_first": not request.GET.get("after"),
                "acts": [act for act in ACTS.values() if act.in_bulk and act.allowed(request)],
                "tabs": self._tabs(request, filters),
                **(extra_context or {}),
            },
        )

    def _tabs(self, request: HttpRequest, filters: Filters) -> list[dict[str, Any]]:
        current = filters.cleaned_data.get("phase", "") or ""
        names = {"": _("All"), listing.HUMAN: _("Needs a human")}
        shown = (
            "",
            listing.HUMAN,
            "stuck",
            "running",
            "waiting",
            "retrying",
            "paused",
            "completed",
            "cancelled",
        )
        return [
            {
                "name": names.get(phase) or PHASES[phase],
                "query": listing.address(request, "phase", **({"phase": phase} if phase else {})),
                "current": phase == current,
            }
            for phase in shown
        ]

    # --- one job ----------------------------------------------------------------------------------------

    @looks
    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """The page of a job."""
        self.require(request)
        shows_payload = access.may(request, access.PAYLOAD)
        jobs = job_page.for_user(request) if shows_payload else job_page.without_payload(request)
        job = self._found(jobs.select_related("created_by", "cancelled_by"), object_id)
        if job is None:
            return self._missing(request, object_id)
        live = job_page.live(request, job, self.admin_site)
        return self.screen(
            request,
            "job.html",
            _("Job %(kind)s") % {"kind": job.kind},
            {
                "live": live,
                "job": job,
                "kind": live.kind,
                "now": live.now,
                "object_id": str(job.pk),
                "history": job_page.history(job),
                "limits": job_page.limits(job, live.kind),
                "shows_payload": shows_payload,
                "payloads": list(job_page.payloads(job)) if shows_payload else [],
                "technical": job_page.technical(job),
                **(extra_context or {}),
            },
        )

    def live_view(self, request: HttpRequest, job_id: UUID) -> HttpResponse:
        """The part of a job's page that changes, for the script that refreshes it."""
        self.require(request)
        job = self._found(job_page.without_payload(request), job_id)
        if job is None:
            return HttpResponse(status=404)
        live = job_page.live(request, job, self.admin_site)
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request, f"{TEMPLATES}/live.html", {"live": live, "job": job, "now": live.now, "kind": live.kind}
        )

    def _found(self, jobs: Any, job_id: Any) -> Job | None:
        known = as_uuid(job_id)
        found: Job | None = jobs.filter(pk=known).first() if known is not None else None
        return found

    def _missing(self, request: HttpRequest, job_id: Any) -> HttpResponse:
        """The same answer for what is not there and what is not the user's to see."""
        messages.warning(request, _("There is no job %(id)s.") % {"id": str(job_id)[:100]})
        return self.go("durable_jobs_job_changelist")

    def act_view(self, request: HttpRequest, job_id: UUID, act: str) -> HttpResponse:
        """Ask whether to act on a job (GET), and do it (POST)."""
        chosen = self._act(request, act)
        job = self._found(job_page.without_payload(request), job_id)
        if job is None:
            return self._missing(request, job_id)
        if request.method == "POST":
            return self._act_on(request, chosen, job)
        if request.method not in ("GET", "HEAD"):
            return HttpResponseNotAllowed(["GET", "POST"])
        return self._ask(request, chosen, job, forms.Confirmation(chosen, one=True))

    def _act(self, request: HttpRequest, name: str) -> Act:
        act = ACTS.get(name)
        if act is None or not act.allowed(request):
            raise PermissionDenied
        return act

    def _ask(self, request: HttpRequest, act: Act, job: Job, form: forms.Confirmation) -> HttpResponse:
        now = store.now()
        kind = kinds.find(job.kind)
        holder = None
        if job.lock_key is not None and isinstance(act, acts.Redrive):
            holder = store.by_lock_key(job.lock_key, job.scope)
        refusal = act.refusal(job, now, holder)
        forbidden = not access.may_act_on(request, kind)
        return self.screen(
            request,
            "confirm.html",
            str(act.question),
            {
                "act": act,
                "job": job,
                "kind": kind,
                "now": now,
                "phase": explain.phase(job, now),
                "refusal": refusal,
                "forbidden": forbidden,
                "holder": holder if refusal and refusal.code == "lock_key_held" else None,
                "hint": acts.hint(act, job, now),
                "form": form,
                "version": act.version(job),
                "subject": listing.subject_of(job, self.admin_site),
            },
        )

    def _act_on(self, request: HttpRequest, act: Act, job: Job) -> HttpResponse:
        form = forms.Confirmation(act, request.POST, one=True)
        if not form.is_valid():
            return self._ask(request, act, job, form)
        back = self.go("durable_jobs_job_change", job.pk)
        if request.POST.get("version") != act.version(job):
            text = _("The job has changed since the page was shown: it is %(status)s now. Nothing was done.")
            messages.error(request, text % {"status": job.status})
            return back
        said: dict[str, Any] = {"reason": form.cleaned_data["reason"]}
        if isinstance(act, acts.Redrive) and job.finished_at is not None:
            # The statement itself holds the page's word: what failed later than shown is left alone.
            said["failed_before"] = job.finished_at + timedelta(microseconds=1)
        answer = acts.on_one(request, act, job, **said)
        if answer.job is None:
            messages.error(request, answer.sentence)
        else:
            messages.success(request, _one_done(act, answer.job))
        return back

    # --- many jobs --------------------------------------------------------------------------------------

    def many_view(self, request: HttpRequest) -> HttpResponse:
        """Show what an act on the ticked jobs, or on all that the filters choose, would do. Changes nothing."""
        if request.method != "POST":
            self.require(request)
            return self.go("durable_jobs_job_changelist", query=request.GET.urlencode())
        act = self._act(request, request.POST.get("act", ""))
        if not act.in_bulk:
            raise PermissionDenied
        query = request.GET.urlencode()
        chosen = self._chosen(request)
        if chosen is None:
            messages.warning(request, _("Tick the jobs to act on, or choose all that match."))
            return self.go("durable_jobs_job_changelist", query=query)
        look = Look.take()
        meant = acts.meant(request, act, chosen, look.now)
        summary = selection.summarize(meant, look)
        looked, foreseen = selection.foresee(
            meant, look, lambda job, holder: self._foreseen(request, act, job, look.now, holder)
        )
        bulk = Bulk.begin(request, act, chosen, look, summary.jobs, summary.more)
        closed = acts.closed_jobs(request, act, chosen, look)
        return self.screen(
            request,
            "confirm_many.html",
            str(act.question),
            {
                "act": act,
                "summary": summary,
                "looked": looked,
                "foreseen": foreseen,
                "refused": (refused := sum(one.jobs for one in foreseen)),
                "would_change": summary.jobs - refused,
                "closed": closed,
                "notes": [kind for kind in {kinds.find(group.kind) for group in summary.groups} if kind],
                "form": forms.Confirmation(act),
                "token": bulk.sign(),
                "query": query,
                "now": look.now,
                "filters": listing.in_words(Filters(request)) if chosen.ids is None else [],
                "rows": listing.rows_of(summary.sample, look, self.admin_site),
            },
        )

    def _foreseen(
        self, request: HttpRequest, act: Act, job: Job, now: datetime, holder: Job | None
    ) -> explain.Reason | None:
        if not access.may_act_on(request, kinds.find(job.kind)):
            return explain.Reason("forbidden", _("You lack a permission that the kind asks for."))
        return act.refusal(job, now, holder)

    def _chosen(self, request: HttpRequest) -> Selection | None:
        if request.POST.get("all"):
            return Filters(request).selection(request)
        ticked = map(as_uuid, request.POST.getlist("ids")[: 2 * listing.PAGE])
        ids = tuple(job_id for job_id in ticked if job_id is not None)
        return Selection(ids=ids) if ids else None

    def bulk_view(self, request: HttpRequest) -> HttpResponse:
        """Carry out a confirmed act on many jobs: a part of it with each POST."""
        if request.method != "POST":
            self.require(request)
            return self.go("durable_jobs_job_changelist", query=request.GET.urlencode())
        query = request.GET.urlencode()
        bulk = Bulk.read(request, request.POST.get("token", ""))
        act = self._act(request, bulk.act if bulk else request.POST.get("act", ""))
        if bulk is None:
            messages.error(request, _("This confirmation does not hold any more. Choose the jobs again."))
            return self.go("durable_jobs_job_changelist", query=query)
        if not bulk.taken and "reason" in request.POST:
            form = forms.Confirmation(act, request.POST)
            if not form.is_valid():
                messages.error(
                    request, " ".join(str(text) for errors in form.errors.values() for text in errors)
                )
                return self.go("durable_jobs_job_changelist", query=query)
            bulk = replace(bulk, reason=form.cleaned_data["reason"], spread=form.spread)
        step = acts.step(request, bulk)
        context = {
            "act": act,
            "step": step,
            "bulk": step.bulk,
            "token": step.bulk.sign(),
            "query": query,
            "skipped": sorted(step.bulk.skipped.items(), key=lambda item: -item[1]),
            "sentence": _many_done(act, step),
        }
        if step.finished:
            level = messages.WARNING if step.bulk.skipped_number else messages.SUCCESS
            messages.add_message(request, level, _many_done(act, step))
            for job_id, sentence in step.bulk.named:
                messages.warning(request, f"{job_id}: {sentence}")
            return self.go("durable_jobs_job_changelist", query=query)
        return self.screen(request, "bulk.html", str(act.label), context)

    # --- start ------------------------------------------------------------------------------------------

    def start_view(self, request: HttpRequest) -> HttpResponse:
        """Choose a kind that has a form."""
        self.require(request, access.START)
        offered = [kind for kind in kinds.all_kinds() if kind.input_form and access.may_act_on(request, kind)]
        return self.screen(request, "start.html", _("Start a job"), {"kinds": offered})

    def start_kind_view(self, request: HttpRequest, kind: str) -> HttpResponse:
        """Fill the kind's form, and start."""
        self.require(request, access.START)
        found = kinds.find(kind)
        if found is None or found.input_form is None or not access.may_act_on(request, found):
            messages.warning(request, _("There is no form for the kind %(kind)s.") % {"kind": kind[:200]})
            return self.go("durable_jobs_job_start")
        form_class: Any = found.input_form
        scope = forms.ScopeChoice(request, request.POST if request.method == "POST" else None)
        if request.method == "POST":
            form = form_class(request.POST, request.FILES)
            if form.is_valid() and scope.is_valid():
                job = self._start(request, found, form, scope)
                if job is not None:
                    return self.go("durable_jobs_job_change", job.pk)
        else:
            form = form_class()
        title = _("Start %(kind)s") % {"kind": found.name}
        return self.screen(request, "start_kind.html", title, {"kind": found, "form": form, "scope": scope})

    def _start(self, request: HttpRequest, kind: Any, form: Any, scope: forms.ScopeChoice) -> Job | None:
        try:
            # The form's own row, its job and the line in the history are there together, or not at all.
            with database.joined(database.alias()):
                started = forms.start(request, kind, form, scope)
                acts.log_entry(request, Job, str(started.job.pk), str(started.job), _("Started"))
        except InvalidInput as error:
            form.add_error(None, str(error))
        except (DurableJobsError, ValidationError) as error:
            form.add_error(
                None,
                "; ".join([str(text) for text in error.messages])
                if isinstance(error, ValidationError)
                else str(error),
            )
        else:
            if started.created:
                messages.success(request, _("The job was started."))
            else:
                messages.info(request, _("It was started before with the same key; this is that job."))
            return started.job
        return None

    # --- pauses -----------------------------------------------------------------------------------------

    def pause_view(self, request: HttpRequest) -> HttpResponse:
        """Pause a queue, a kind, a tenant, or everything."""
        self.require(request, access.PAUSE)
        form = forms.PauseForm(request, request.POST if request.method == "POST" else None)
        if request.method == "POST" and form.is_valid():
            said = form.cleaned_data
            if not access.may_pause(request, said["tenant"]):
                raise PermissionDenied
            what = {name: said[name] for name in ("queue", "kind", "tenant")}
            try:
                with database.joined(database.alias()):
                    service.pause(**what, reason=said["reason"], actor=request.user)
                    pause = self._pause_of(what)
                    words = forms.what_in_words(pause) if pause else ""
                    acts.log_entry(
                        request,
                        Pause,
                        str(pause.pk if pause else ""),
                        words,
                        f"{_('Paused')}: {said['reason']}",
                    )
            except DurableJobsError as error:
                form.add_error(None, str(error))
            else:
                messages.success(
                    request,
                    _("Paused: %(what)s. Running work is asked to stop at its next boundary.")
                    % {"what": words},
                )
                return self.go("durable_jobs_job_overview")
        return self.screen(request, "pause.html", _("Pause work"), {"form": form})

    def _pause_of(self, what: dict[str, str]) -> Pause | None:
        columns = {"queue_name": what["queue"], "kind": what["kind"], "tenant_id": what["tenant"]}
        found: Pause | None = Pause.objects.using(database.alias()).filter(**columns).first()
        return found

    def unpause_view(self, request: HttpRequest, pause_id: int) -> HttpResponse:
        """Ask whether to end a pause (GET), and end it (POST)."""
        self.require(request, access.PAUSE)
        pauses = Pause.objects.using(database.alias())
        pause = pauses.filter(pk=pause_id).first() if pause_id < 2**63 else None
        if pause is None or not access.is_visible(request, pause):
            messages.info(request, _("This pause has been ended already."))
            return self.go("durable_jobs_job_overview")
        if not access.may_pause(request, pause.tenant_id):
            raise PermissionDenied
        if request.method == "POST":
            with database.joined(database.alias()):
                ended = service.unpause(
                    queue=pause.queue_name, kind=pause.kind, tenant=pause.tenant_id, actor=request.user
                )
                if ended:
                    acts.log_entry(
                        request, Pause, str(pause.pk), forms.what_in_words(pause), str(_("Unpaused"))
                    )
            if ended:
                messages.success(request, _("Unpaused: %(what)s.") % {"what": forms.what_in_words(pause)})
            else:
                messages.info(request, _("This pause has been ended already."))
            return self.go("durable_jobs_job_overview")
        return self.screen(
            request,
            "unpause.html",
            _("End this pause?"),
            {"pause": pause, "what": forms.what_in_words(pause)},
        )


# --- words ----------------------------------------------------------------------------------------------


def _one_done(act: Act, job: Job) -> str:
    if act is acts.CANCEL:
        if job.status == "cancelled":
            return _("The job is cancelled.")
        if job.mirror_attempts and job.lease_owner is None:
            return _("The cancel was requested, but a hook failed; the reconciler tries again.")
        return _("The cancel was requested; the job stops at its next boundary.")
    if act is acts.SETTLE:
        return _("The job is %(status)s; its hooks did not run.") % {"status": job.status}
    return _("The job runs again: it waits for a worker.")


def _many_done(act: Act, step: acts.Step) -> str:
    bulk = step.bulk
    total = f"{number(bulk.total)}{'+' if bulk.more else ''}"
    said = ngettext(
        "%(act)s: changed %(done)s of %(total)s job",
        "%(act)s: changed %(done)s of %(total)s jobs",
        bulk.total,
    ) % {"act": act.label, "done": number(step.done), "total": total}
    if bulk.skipped_number:
        codes = ", ".join(f"{code} {count}" for code, count in Counter(bulk.skipped).most_common())
        said += _(", skipped %(number)s (%(codes)s)") % {
            "number": number(bulk.skipped_number),
            "codes": codes,
        }
    return f"{said}."


def _clock(moment: datetime) -> str:
    return timezone.localtime(moment).strftime("%H:%M")


def _throughput(recent: overview.Recent) -> charts.Chart:
    bars = recent.bars
    titles = [
        _("%(since)s to %(until)s: %(ended)s ended, %(failed)s of them failed")
        % {"since": _clock(bar.since), "until": _clock(bar.until), "ended": bar.ended, "failed": bar.failed}
        for bar in bars
    ]
    return charts.chart(
        [bar.ended for bar in bars],
        titles,
        parts=[bar.failed for bar in bars],
        top=number(max(bar.ended for bar in bars)),
        first=_clock(bars[0].since),
        last=_clock(bars[-1].until),
    )


def _waiting(recent: overview.Recent) -> charts.Chart:
    bars = recent.bars
    titles = [
        _("%(since)s to %(until)s: %(wait)s")
        % {"since": _clock(bar.since), "until": _clock(bar.until), "wait": span(bar.wait)}
        for bar in bars
    ]
    waits = [bar.wait or 0.0 for bar in bars]
    return charts.chart(
        waits, titles, top=span(max(waits)), first=_clock(bars[0].since), last=_clock(bars[-1].until)
    )


def _failed_by_hour(recent: overview.Recent) -> charts.Chart:
    bars = recent.hours
    titles = [
        _("%(since)s to %(until)s: %(failed)s failed")
        % {"since": _clock(bar.since), "until": _clock(bar.until), "failed": bar.failed}
        for bar in bars
    ]
    numbers = [bar.failed for bar in bars]
    return charts.chart(
        numbers,
        titles,
        parts=numbers,
        top=number(max(numbers)),
        first=_clock(bars[0].since),
        last=_clock(bars[-1].until),
    )


# --- history, pauses, workers ---------------------------------------------------------------------------


class JobEventAdminMixin(Screens):
    """All that happened to all jobs, newest first."""

    def get_queryset(self, request: HttpRequest) -> Any:
        return JobEvent.objects.using(database.alias()).filter(access.among_events(request))

    @looks
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        self.require(request)
        filters = forms.EventFilters(request.GET, auto_id="filter_%s")
        filters.is_valid()
        found, following = forms.events(request, filters, self.get_queryset(request))
        query = listing.address(request)
        if following:
            following = query + ("&" if query else "") + urlencode({"after": following})
        labels = access.labels(event_scope(event) for event in found if event.tenant_id)
        return self.screen(
            request,
            "history.html",
            _("History"),
            {
                "events": [(event, labels.get(event_scope(event), _("all"))) for event in found],
                "filters": filters,
                "next": following,
                "now": store.now(),
                "shows_scopes": len(labels) > 1,
            },
        )

    @looks
    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """An event is shown on its job's page."""
        self.require(request)
        try:
            event = self.get_queryset(request).filter(pk=int(object_id)).only("job_id", "event").first()
        except (ValueError, OverflowError):
            event = None
        if event is None or int(object_id) >= 2**63:
            messages.warning(request, _("There is no such event."))
            return self.go("durable_jobs_jobevent_changelist")
        if event.job_id is None:
            return self.go("durable_jobs_jobevent_changelist", query=urlencode({"event": event.event}))
        return self.go("durable_jobs_job_change", event.job_id)


def event_scope(event: JobEvent) -> Scope:
    return Scope(event.tenant_id, event.organization_id)


class PauseAdminMixin(ReadOnly):
    """The pauses that are set. They are made and ended from the overview."""

    list_display: Any = ("what", "reason", "actor", "since")
    list_display_links: Any = None
    ordering: Any = ("id",)
    list_per_page = 100
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> Any:
        pauses = Pause.objects.using(database.alias())
        allowed = access.scopes(request)
        if allowed is None:
            return pauses
        return pauses.filter(Q(tenant_id="") | Q(tenant_id__in={scope.tenant for scope in allowed}))

    @admin.display(description=gettext_lazy("what"))
    def what(self, pause: Pause) -> str:
        return forms.what_in_words(pause)


class WorkerProcessAdminMixin(ReadOnly):
    """The worker processes that have shown themselves."""

    list_display: Any = (
        "owner",
        "host",
        "pid",
        "queues",
        "kinds",
        "concurrency",
        "release",
        "started_at",
        "beat_at",
    )
    list_display_links: Any = None
    ordering: Any = ("-id",)
    list_per_page = 100
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> Any:
        return WorkerProcess.objects.using(database.alias())
