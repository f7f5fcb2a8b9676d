"""The viewsets: for `durable_jobs.rest.urls`, or for the project's own router.

Authentication and throttling are the project's own, as set for Django REST framework; its permissions are asked
before those of the model `Job`. Nothing that a caller writes names a scope: see `durable_jobs.access`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, ClassVar
from uuid import UUID

from django.db import transaction
from django.db.models import Q
from django.http import Http404, HttpResponse
from django.utils.cache import patch_vary_headers
from django.utils.http import parse_etags
from rest_framework import exceptions, serializers, status
from rest_framework.decorators import action
from rest_framework.permissions import BasePermission, DjangoModelPermissions, IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.versioning import QueryParameterVersioning
from rest_framework.viewsets import ViewSet

from durable_jobs import access, candidates, database, explain, kinds, overview, service, store
from durable_jobs.candidates import CandidateQuery
from durable_jobs.exceptions import (
    Busy,
    DurableJobsError,
    HookFailed,
    InvalidInput,
    LockKeyHeld,
    NotFound,
    Refusal,
)
from durable_jobs.explain import Phase
from durable_jobs.models import Job, JobEvent, Pause, Scope, Status, as_uuid
from durable_jobs.receipts import ExecutionContext
from durable_jobs.rest import filters, paging, starting
from durable_jobs.rest.filters import JobFilter
from durable_jobs.rest.paging import Place, Reading
from durable_jobs.rest.parsers import JSONParser
from durable_jobs.rest.permissions import (
    CanOperate,
    CanPause,
    CanStart,
    CanView,
    CanViewPayload,
    may_force,
    may_see_payload,
)
from durable_jobs.rest.serializers import (
    CancelBody,
    CandidatePageSerializer,
    CountsSerializer,
    ExplanationSerializer,
    HealthSerializer,
    JobDetailSerializer,
    JobEventSerializer,
    JobSerializer,
    JobStatusSerializer,
    KindSerializer,
    PauseBody,
    PauseSerializer,
    RedriveBody,
    Seen,
    StartBody,
    UnpauseBody,
    WorkerSerializer,
    listed,
)
from durable_jobs.selection import LARGE_COLUMNS, Look

IDEMPOTENCY_KEY_LENGTH = 200
MOST_WORKERS = 500
MOST_COUNTED = 1_000
CANDIDATE_SECONDS = 5.0
POLL_RUNNING, POLL_WAITING, POLL_STANDING = 1, 2, 15
"""Seconds after which it is worth asking again: what runs, what is due, what waits for a person."""
LONGEST_POLL = 60


class JobsViewSet(ViewSet):
    """What all of them share: who may, which parameters exist, and how refusals are told."""

    parser_classes = (JSONParser,)
    permissions: ClassVar[dict[str, type[BasePermission]]] = {}
    """The permission that each action asks for, besides the project's own."""
    parameters: dict[str, set[str]] = {}
    """The parameters that each action knows."""

    def get_permissions(self) -> list[Any]:
        """The project's permissions, then ours.

        Those that Django REST framework derives from a model are left out: they ask for the right to add, change
        or delete rows, which nobody has on `Job`; ours ask for the rights that exist.
        """
        given = [
            permission
            for permission in self.permission_classes
            if not (inspect.isclass(permission) and issubclass(permission, DjangoModelPermissions))
        ]
        ours = self.permissions.get(self.action or "", IsAuthenticated)
        return [permission() for permission in (*given, ours)]

    def get_authenticate_header(self, request: Request) -> str:
        """The scheme of a 401: of the first authentication class that names one, else the session's.

        Django REST framework answers 403 to strangers when the first class, such as SessionAuthentication, names
        none; but who is unknown and who lacks a right are two things.
        """
        named = (authenticator.authenticate_header(request) for authenticator in self.get_authenticators())
        return next((header for header in named if header), 'Session realm="durable_jobs"')

    def perform_content_negotiation(self, request: Request, force: bool = False) -> Any:
        """As ever, but a format that does not exist is a wrong parameter, not a missing page."""
        try:
            return super().perform_content_negotiation(request, force)
        except Http404:
            name = str(api_settings.URL_FORMAT_OVERRIDE)
            raise serializers.ValidationError({name: ["There is no such format."]}) from None

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """After the caller is known to be allowed: refuse parameters that mean nothing here."""
        super().initial(request, *args, **kwargs)
        if self.action is None:  # a method that does not exist here, which is what will be told
            return
        known = set(self.parameters.get(self.action, ()))
        general = {api_settings.URL_FORMAT_OVERRIDE}
        if self.versioning_class is not None and issubclass(self.versioning_class, QueryParameterVersioning):
            general.add(self.versioning_class.version_param)
        given = request.query_params.copy()
        for name in general - {None}:
            given.pop(name, None)
        wrong = {name: [problem] for name, problem in filters.problems(given, known)}
        if wrong:
            raise serializers.ValidationError(wrong)

    def handle_exception(self, exc: Exception) -> Response:
        """Refusals of the service as answers; what is left is Django REST framework's."""
        if isinstance(exc, InvalidInput):
            exc = serializers.ValidationError({exc.field: [f"This {exc.problem}. {exc.way_out}"]})
        elif isinstance(exc, NotFound):
            exc = exceptions.NotFound()
        elif isinstance(exc, Refusal | HookFailed):
            return self._refused(exc)
        response: Response = super().handle_exception(exc)
        return response

    def _refused(self, refusal: DurableJobsError) -> Response:
        job_id = getattr(refusal, "job_id", None) or as_uuid(self.kwargs.get("pk"))
        now = None
        if self.detail and isinstance(job_id, UUID):
            now = (
                Job.objects.using(database.alias()).filter(id=job_id).values_list("status", flat=True).first()
            )
        held_by = refusal.held_by if isinstance(refusal, LockKeyHeld) else None
        body = {"code": refusal.code, "detail": str(refusal), "status": now, "held_by": held_by}
        response = Response(body, status=status.HTTP_409_CONFLICT)
        if isinstance(refusal, Busy):
            response["Retry-After"] = "1"
        response.exception = True
        return response

    def scopes(self) -> access.Scopes:
        """The scopes that the caller may look at and act in; an error when there are none."""
        scopes = access.scopes_of(self.request)
        if scopes == ():
            raise exceptions.PermissionDenied("Your account belongs to no scope of jobs.")
        return scopes

    def own_scope(self) -> Scope:
        """The scope that the caller starts jobs in; an error when there is none."""
        scope = access.scope_of(self.request)
        if scope is None:
            raise exceptions.PermissionDenied("Your account belongs to no scope of jobs.")
        return scope

    def body(self, serializer: type[serializers.Serializer]) -> dict[str, Any]:
        """The values of the request's body; no body is an empty one."""
        checked = serializer(data=self.request.data)
        checked.is_valid(raise_exception=True)
        return dict(checked.validated_data)


class JobViewSet(JobsViewSet):
    """Jobs: looked at, started, cancelled, redriven."""

    lookup_value_regex = "[^/]+"
    filterset_class = JobFilter
    permissions = {
        "list": CanView,
        "retrieve": CanView,
        "events": CanView,
        "counts": CanView,
        "explain": CanView,
        "create": CanStart,
        "cancel": CanOperate,
        "redrive": CanOperate,
    }
    parameters = {"events": {"cursor", "page_size"}}

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """The list knows the filters as well."""
        self.parameters = {
            **self.parameters,
            "list": {"cursor", "page_size", *self.filterset_class.base_filters},
        }
        super().initial(request, *args, **kwargs)

    def list(self, request: Request, **kwargs: Any) -> Response:
        """Jobs of the caller's scopes, newest first, a page at a time, without their payload.

        A page may be short, or empty, although there are more: `next` alone says whether to go on.
        """
        scopes = self.scopes()
        size = filters.whole(request.query_params, "page_size", 1, paging.LARGEST_PAGE, paging.PAGE_SIZE)
        cursor = request.query_params.get("cursor")
        place = Place.parse(cursor) if cursor else None
        visible = _jobs().filter(access.condition(scopes)).defer(*LARGE_COLUMNS)
        chosen = self.filterset_class.checked(request.query_params, visible, request=request)
        look = Look.take()
        page = _reading(chosen, visible, scopes, look).page(place, size)
        results = listed(Seen.all(page.jobs, look))
        return Response(paging.answer(request, results, page.previous, page.next))

    def retrieve(self, request: Request, pk: str = "", **kwargs: Any) -> Response:
        """A job with everything, and what is to be known about it."""
        job = self._found(pk)
        (seen,) = Seen.all([job], Look.take())
        return Response(JobDetailSerializer(seen, context={"payload": may_see_payload(request)}).data)

    def create(self, request: Request, **kwargs: Any) -> Response:
        """Start a job of a kind that says what its input must be.

        With the header `Idempotency-Key` a repeated request gives the same job (200), and another input under
        the same key is refused (409). Keys count for one user and one kind.
        """
        key = _idempotency_key(request)
        body = self.body(StartBody)
        kind = kinds.find(body["kind"])
        if kind is None or not starting.is_startable(kind):
            raise serializers.ValidationError({"kind": ["No kind of this name can be started here."]})
        _require_permissions(request, kind)
        context = {"request": request, "view": self}
        started = starting.start(
            kind, body.get("input"), key=key, scope=self.own_scope(), user=request.user, context=context
        )
        (seen,) = Seen.all([started.job], Look.take())
        response = Response(
            JobStatusSerializer(seen).data,
            status=status.HTTP_201_CREATED if started.created else status.HTTP_200_OK,
        )
        response["Location"] = self.reverse_action("status", kwargs={**kwargs, "pk": str(started.job.id)})
        return response

    @action(detail=True, methods=["get"])
    def status(self, request: Request, pk: str = "", **kwargs: Any) -> HttpResponse:
        """A job for the user who started it, who needs no permission for that.

        With `If-None-Match` the answer is 304 while nothing has changed. `Retry-After` says when it is worth
        asking again; a job that has ended has none.
        """
        owned = Q(created_by=request.user.pk) & access.condition((self.own_scope(),))
        (seen,) = Seen.all([self._one(pk, owned)], Look.take())
        body = JobStatusSerializer(seen).data
        response: HttpResponse = Response(body)
        etag = _etag({name: value for name, value in body.items() if name != "eta_seconds"})
        known = parse_etags(request.headers.get("If-None-Match", ""))
        if "*" in known or etag in [tag.removeprefix("W/") for tag in known]:
            response = HttpResponse(status=status.HTTP_304_NOT_MODIFIED)
            del response["Content-Type"]
        response["ETag"] = f"W/{etag}"
        response["Cache-Control"] = "private, no-cache"
        patch_vary_headers(response, ("Cookie", "Authorization", "Accept-Language"))
        again = _ask_again(seen)
        if again is not None:
            response["Retry-After"] = str(again)
        return response

    @action(detail=True, methods=["get"])
    def events(self, request: Request, pk: str = "", **kwargs: Any) -> Response:
        """The job's history, newest first, a page at a time."""
        size = filters.whole(request.query_params, "page_size", 1, paging.LARGEST_PAGE, paging.PAGE_SIZE)
        job = self._found(pk, light=True)
        payload = may_see_payload(request)
        rows = JobEvent.objects.using(database.alias()).filter(job_id=job.id)
        rows = rows if payload else rows.defer("data")
        events, previous, next = paging.event_page(rows, request.query_params.get("cursor"), size)
        context = {"payload": payload, "kind": job.kind}
        results = JobEventSerializer(events, many=True, context=context).data
        return Response(paging.answer(request, results, previous, next))

    @action(detail=True, methods=["get"])
    def explain(self, request: Request, pk: str = "", **kwargs: Any) -> Response:
        """Why the job does not run, what is wrong with it, and what can be done."""
        job = self._found(pk)
        body = {
            "id": job.id,
            "kind": job.kind,
            "phase": Look.take().phase(job),
            "reasons": explain.explain(job),
        }
        return Response(ExplanationSerializer(body).data)

    @action(detail=False, methods=["get"])
    def counts(self, request: Request, **kwargs: Any) -> Response:
        """How many jobs of the caller's scopes do what; each number stops at 1,000."""
        return Response(
            CountsSerializer(overview.counts(access.condition(self.scopes()), most=MOST_COUNTED)).data
        )

    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, pk: str = "", **kwargs: Any) -> Response:
        """Ask for the job's end: `cancelled` (200), or `cancelling` (202) while a worker has it.

        Asking again while it is being cancelled is answered the same way; a job that has ended is refused (409).
        """
        job = self._found(pk, light=True)
        body = self.body(CancelBody)
        now = service.cancel(job.id, actor=request.user, reason=body.get("reason", ""), scope=job.scope)
        if now.status == "cancelled":
            return self._outcome("cancelled", now, status.HTTP_200_OK)
        return self._outcome("cancelling", now, status.HTTP_202_ACCEPTED)

    @action(detail=True, methods=["post"])
    def redrive(self, request: Request, pk: str = "", **kwargs: Any) -> Response:
        """Run the job again from its checkpoint, or say why not (409). Forcing needs a permission of its own."""
        job = self._found(pk, light=True)
        body = self.body(RedriveBody)
        if body.get("force") and not may_force(request):
            raise exceptions.PermissionDenied("You do not have permission to force a redrive.")
        kind = kinds.find(job.kind)
        if kind is not None:
            _require_permissions(request, kind)
        now = service.redrive(
            job.id,
            actor=request.user,
            reason=body.get("reason", ""),
            force=body.get("force", False),
            restart=body.get("restart", False),
            scope=job.scope,
        )
        return self._outcome("redriven", now, status.HTTP_200_OK)

    def _outcome(self, result: str, job: Job, code: int) -> Response:
        (seen,) = Seen.all([job], Look.take())
        return Response({"result": result, "job": JobSerializer(seen).data}, status=code)

    def _found(self, pk: str, *, light: bool = False) -> Job:
        return self._one(pk, access.condition(self.scopes()), light=light)

    def _one(self, pk: str, where: Q, *, light: bool = False) -> Job:
        """The job of this id among those that the caller may see; a foreign id and a missing one are the same."""
        job_id = as_uuid(pk)
        if job_id is None:
            raise exceptions.NotFound
        rows = _jobs().filter(where, id=job_id)
        job: Job | None = (rows.defer(*LARGE_COLUMNS) if light else rows).first()
        if job is None:
            raise exceptions.NotFound
        return job


class CandidateViewSet(JobsViewSet):
    """Jobs to choose from, with their content: what a domain service reads before it claims or retries one."""

    permissions = {"list": CanViewPayload}
    parameters = {"list": {"kind", "status", "limit", "max_payload_bytes", "cursor"}}

    @classmethod
    def as_view(cls, *args: Any, **kwargs: Any) -> Any:
        """Outside ATOMIC_REQUESTS: the page is read in a bounded transaction of its own."""
        view = super().as_view(*args, **kwargs)
        return transaction.non_atomic_requests(using=database.alias())(view)

    def list(self, request: Request, **kwargs: Any) -> Response:
        """A page of one kind in the caller's own scope, oldest first, whole or not at all.

        A row with more bytes than `max_payload_bytes` refuses the page (409), and so does a cursor of another query.
        """
        given = request.query_params
        kind = filters.required(given, "kind", 200)
        status_wanted = filters.one_of(given, "status", Status.values)
        cursor = given.get("cursor")
        if cursor is not None and not re.fullmatch(paging.SIGNED_CURSOR, cursor):
            raise serializers.ValidationError({"cursor": ["Take it from an earlier answer, as it was."]})
        scope, actor = self.own_scope(), f"user:{request.user.pk} {request.user.get_username()}"
        query = CandidateQuery(
            kind=kind,
            actor=actor,
            scope=scope,
            status=status_wanted,
            limit=filters.whole(given, "limit", 1, candidates.LARGEST_PAGE, 25),
            max_payload_bytes=filters.whole(
                given, "max_payload_bytes", 1, candidates.LARGEST_PAYLOAD, CandidateQuery.max_payload_bytes
            ),
            cursor=cursor,
        )
        context = ExecutionContext(
            scope, actor, kind, idempotency_key=None, deadline=time.monotonic() + CANDIDATE_SECONDS
        )
        try:
            page = service.candidates(query, context)
        except InvalidInput as error:
            if error.field == "max_payload_bytes":
                return self._refused(error)
            raise
        return Response(CandidatePageSerializer(page).data)


class KindViewSet(JobsViewSet):
    """The kinds that are registered in the process that answers."""

    permissions = {"list": CanView}

    def list(self, request: Request, **kwargs: Any) -> Response:
        """Every kind, by name."""
        return Response(KindSerializer(kinds.all_kinds(), many=True).data)


class WorkerViewSet(JobsViewSet):
    """The worker processes that have shown themselves lately."""

    permissions = {"list": CanView}

    def list(self, request: Request, **kwargs: Any) -> Response:
        """Every live worker, at most 500."""
        workers = explain.live_workers(store.now())[:MOST_WORKERS]
        return Response(WorkerSerializer(workers, many=True).data)


class HealthViewSet(JobsViewSet):
    """Whether work is being done."""

    permissions = {"list": CanView}

    def list(self, request: Request, **kwargs: Any) -> Response:
        """Whether all is well, and what was looked at. Who does not see all scopes gets no sentences."""
        health = overview.health()
        told = access.sees_everything(request)
        checks = [
            {
                "name": check.name,
                "ok": check.ok,
                "sentence": check.sentence if told else "",
                "way_out": check.way_out if told else "",
            }
            for check in health.checks
        ]
        return Response(HealthSerializer({"healthy": health.ok, "checks": checks}).data)


class PauseViewSet(JobsViewSet):
    """Pauses: they stop work of all scopes, so setting one needs to see all scopes."""

    permissions = {"list": CanView, "pause": CanPause, "unpause": CanPause}

    def list(self, request: Request, **kwargs: Any) -> Response:
        """The pauses that are set, oldest first; of tenants only the caller's own."""
        pauses = Pause.objects.using(database.alias()).order_by("id")
        scopes = self.scopes()
        if not access.sees_everything(request) and isinstance(scopes, tuple):
            pauses = pauses.filter(tenant_id__in=["", *(scope.tenant for scope in scopes)])
        return Response(PauseSerializer(pauses, many=True).data)

    @action(detail=False, methods=["post"])
    def pause(self, request: Request, **kwargs: Any) -> Response:
        """Stop new claims of a queue, a kind, a tenant, or (none named) of everything, until it is unpaused."""
        self._require_everything()
        body = self.body(PauseBody)
        service.pause(
            queue=body.get("queue", ""),
            kind=body.get("kind", ""),
            tenant=body.get("tenant", ""),
            reason=body["reason"],
            actor=request.user,
        )
        pauses = Pause.objects.using(database.alias()).filter(
            queue_name=body.get("queue", ""), kind=body.get("kind", ""), tenant_id=body.get("tenant", "")
        )
        return Response(PauseSerializer(pauses.get()).data)

    @action(detail=False, methods=["post"])
    def unpause(self, request: Request, **kwargs: Any) -> Response:
        """Take away the pause of exactly this queue, kind and tenant; `unpaused` is false when there was none."""
        self._require_everything()
        body = self.body(UnpauseBody)
        ended = service.unpause(
            queue=body.get("queue", ""),
            kind=body.get("kind", ""),
            tenant=body.get("tenant", ""),
            actor=request.user,
        )
        return Response({"unpaused": ended})

    def _require_everything(self) -> None:
        if not access.sees_everything(self.request):
            raise exceptions.PermissionDenied(
                "Pausing stops work of all scopes, and you do not see all of them."
            )


# --- inside -----------------------------------------------------------------------------------------------


def _jobs() -> Any:
    return Job.objects.using(database.alias())


def _reading(chosen: JobFilter, visible: Any, scopes: access.Scopes, look: Look) -> Reading:
    given, phase = chosen.given, chosen.asked_phase
    tenants = {scope.tenant for scope in scopes} if isinstance(scopes, tuple) else set()
    by_time = "tenant" in given or len(tenants) == 1
    rows, within, judge = chosen.qs, None, None
    if phase is not None:
        rows = rows.filter(explain.among(phase, look.now, look.pauses))
        if phase not in (Phase.FAILED, Phase.PARKED, Phase.COMPLETED, Phase.CANCELLED):
            judge = lambda job: look.phase(job) is phase  # noqa: E731
    if set(given) - {"tenant", "organization"} and not chosen.is_indexed:
        within = visible.filter(tenant_id=given["tenant"]) if "tenant" in given else visible
        if by_time:
            # What ended before a moment was made before it; so the search need not begin at the newest row.
            ends = [given[name] for name in ("created_before", "finished_before") if name in given]
            if ends:
                rows, within = rows.filter(created_at__lt=min(ends)), within.filter(created_at__lt=min(ends))
    return Reading(rows, within, by_time, judge)


def _require_permissions(request: Request, kind: kinds.Kind) -> None:
    missing = [name for name in kind.required_permissions if not request.user.has_perm(name)]
    if missing:
        raise exceptions.PermissionDenied(f"Jobs of this kind need also: {', '.join(missing)}.")


def _idempotency_key(request: Request) -> str | None:
    """The key under which the job is kept: of this user alone, and telling nothing of either."""
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not 1 <= len(key) <= IDEMPOTENCY_KEY_LENGTH or not all("!" <= character <= "~" for character in key):
        problem = f"Give 1 to {IDEMPOTENCY_KEY_LENGTH} printable ASCII characters without blanks."
        raise serializers.ValidationError({"Idempotency-Key": [problem]})
    return "rest:" + hashlib.sha256(f"{request.user.pk}\n{key}".encode()).hexdigest()


def _etag(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, default=str)
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'


def _ask_again(seen: Seen) -> int | None:
    """Seconds after which the job's status may be another; None when it has ended."""
    if seen.finished:
        return None
    if seen.phase in (Phase.RUNNING, Phase.STOPPING):
        return POLL_RUNNING
    if seen.phase in (Phase.STUCK, Phase.PAUSED, Phase.HELD):
        return POLL_STANDING
    ahead = (seen.job.next_run_at - seen.look.now).total_seconds() if seen.job.next_run_at else 0.0
    return min(max(math.ceil(ahead), POLL_WAITING), LONGEST_POLL)


def viewsets() -> Sequence[tuple[str, type[JobsViewSet], str]]:
    """Prefix, viewset and basename of each, for a router."""
    return (
        ("jobs", JobViewSet, "job"),
        ("candidates", CandidateViewSet, "candidate"),
        ("kinds", KindViewSet, "kind"),
        ("workers", WorkerViewSet, "worker"),
        ("pauses", PauseViewSet, "pause"),
        ("health", HealthViewSet, "health"),
    )


if find_spec("drf_spectacular") is not None:
    from durable_jobs.rest import schema  # noqa: F401  (registers itself)
