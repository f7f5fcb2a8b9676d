"""What goes over the wire. Within one version fields are only added.

Ids are texts, so that no client rounds them; counts are whole numbers; times are UTC by ISO 8601.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from typing import Any

from rest_framework import serializers

from durable_jobs import explain, kinds, selection
from durable_jobs.explain import Phase, Redrivable
from durable_jobs.kinds import Kind
from durable_jobs.models import Job, JobEvent, Status, Verdict
from durable_jobs.rest.starting import is_startable
from durable_jobs.selection import Look
from durable_jobs.service import KEY_LENGTH, QUEUE_LENGTH, REASON_LENGTH, SCOPE_LENGTH

HISTORIC_PAYLOADS = ("input", "checkpoint", "result")
"""Names under which an event's data may hold the job's payload as text."""


@dataclass(frozen=True)
class Seen:
    """A job as it was at a moment of the database's clock, with all that is judged of it."""

    job: Job
    look: Look
    holder: Job | None = None

    @classmethod
    def all(cls, jobs: Sequence[Job], look: Look) -> list[Seen]:
        """Several, with one query for what holds their lock keys."""
        held_by = selection.holders([job for job in jobs if job.status == Status.FAILED])
        return [cls(job, look, held_by.get((job.lock_key, job.scope))) for job in jobs]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.job, name)

    @cached_property
    def phase(self) -> Phase:
        return self.look.phase(self.job)

    @property
    def redrivable(self) -> Redrivable:
        return explain.redrivable(self.job, self.look.now, self.holder)

    @property
    def stuck(self) -> bool:
        return self.phase is Phase.STUCK

    @property
    def finished(self) -> bool:
        return self.job.finished_at is not None

    @cached_property
    def pace(self) -> explain.Pace:
        return explain.pace(self.job, self.look.now)

    @property
    def rate(self) -> float | None:
        return self.pace.rate

    @property
    def eta_seconds(self) -> int | None:
        return self.pace.eta_seconds

    @property
    def public_message(self) -> str:
        return explain.public_message(self.job, self.phase)

    @property
    def known(self) -> Kind | None:
        return kinds.find(self.job.kind)

    @property
    def public_result(self) -> Any:
        """The result, for the user who started the job: when the kind says so, without what it masks."""
        kind = self.known
        if kind is None or not kind.public_result or self.job.status != Status.COMPLETED:
            return None
        return kinds.mask(kind, self.job.result)


# --- fields ---------------------------------------------------------------------------------------------


class Moment(serializers.DateTimeField):
    """A time in UTC, whatever the project's zone and format."""

    def to_representation(self, value: datetime) -> str:
        """By ISO 8601, with Z for the offset."""
        return value.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"


class Shown(serializers.Serializer):
    """What is only shown. Reads each field straight from the object: a page has hundreds of fields."""

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """The fields by name."""
        made: dict[str, Any] = {}
        for name, source, represent in self._shown:
            value = instance if source == "*" else getattr(instance, source)
            made[name] = None if value is None else represent(value)
        return made

    @cached_property
    def _shown(self) -> list[tuple[str, str, Callable[[Any], Any]]]:
        return [
            (str(field.field_name), str(field.source), field.to_representation)
            for field in self._readable_fields
        ]


class Key(serializers.CharField):
    """A key of a row as text: a client that counts in floats would round a large one."""


class StrictText(serializers.CharField):
    """A text that came as one. Blanks count."""

    def __init__(self, **options: Any) -> None:
        super().__init__(trim_whitespace=False, **options)

    def to_internal_value(self, data: Any) -> str:
        """The text itself."""
        if not isinstance(data, str):
            self.fail("invalid")
        return str(super().to_internal_value(data))


class StrictBoolean(serializers.Field):
    """True or false, as JSON has them: no "true", no 1."""

    default_error_messages = {"invalid": "Give true or false."}

    def to_internal_value(self, data: Any) -> bool:
        """The truth value itself."""
        if not isinstance(data, bool):
            self.fail("invalid")
        return bool(data)

    def to_representation(self, value: Any) -> bool:
        """The same."""
        return bool(value)


class Body(serializers.Serializer):
    """The body of a request. A name that it does not know is an error: a misspelt option must not be none."""

    def to_internal_value(self, data: Any) -> Any:
        """The values; raises a ValidationError that names every field that is wrong or unknown."""
        if isinstance(data, dict):
            unknown = [name for name in data if name not in self.fields]
            if unknown:
                listed = ", ".join(self.fields)
                raise serializers.ValidationError(
                    {name: [f"There is no such field. Known here: {listed}."] for name in unknown}
                )
        return super().to_internal_value(data)


# --- jobs -----------------------------------------------------------------------------------------------


class JobSerializer(Shown):
    """A job in a list: no input, checkpoint, result, message or traceback."""

    id = serializers.UUIDField()
    kind = serializers.CharField()
    status = serializers.ChoiceField(choices=Status.values)
    phase = serializers.ChoiceField(choices=[phase.value for phase in Phase])
    redrivable = serializers.ChoiceField(choices=[choice.value for choice in Redrivable])
    stuck = serializers.BooleanField()
    queue = serializers.CharField(source="queue_name")
    priority = serializers.IntegerField()
    tenant = serializers.CharField(source="tenant_id")
    organization = serializers.CharField(source="organization_id", allow_null=True)
    subject_type = serializers.CharField(allow_null=True)
    subject_id = serializers.CharField(allow_null=True)
    lock_key = serializers.CharField(allow_null=True)
    created_by = Key(source="created_by_id", allow_null=True)
    created_at = Moment()
    updated_at = Moment()
    due_at = Moment(source="next_run_at", allow_null=True)
    started_at = Moment(allow_null=True)
    claimed_at = Moment(allow_null=True)
    last_committed_at = Moment(allow_null=True)
    cancel_requested_at = Moment(allow_null=True)
    parked_at = Moment(allow_null=True)
    finished_at = Moment(allow_null=True)
    lease_owner = serializers.CharField(allow_null=True)
    lease_expires_at = Moment(allow_null=True)
    heartbeat_at = Moment(allow_null=True)
    attempts = serializers.IntegerField()
    redrives = serializers.IntegerField()
    consecutive_failures = serializers.IntegerField()
    interruptions = serializers.IntegerField()
    verdict = serializers.ChoiceField(choices=Verdict.values, allow_null=True)
    error_class = serializers.CharField(allow_null=True)
    error_code = serializers.CharField(allow_null=True)
    error_type = serializers.CharField(allow_null=True)
    processed = serializers.IntegerField(source="processed_count")
    total = serializers.IntegerField(source="total_count", allow_null=True)
    percent = serializers.FloatField(allow_null=True)
    rate = serializers.FloatField(allow_null=True)
    eta_seconds = serializers.IntegerField(allow_null=True)
    progress_message = serializers.CharField(allow_null=True)


@cache
def _of_a_list() -> JobSerializer:
    return JobSerializer()


def listed(jobs: Sequence[Seen]) -> list[dict[str, Any]]:
    """Jobs in a list, by one serializer that is kept: to make its fields takes as long as to show a page."""
    represent = _of_a_list().to_representation
    return [represent(seen) for seen in jobs]


class ReasonSerializer(serializers.Serializer):
    """One thing to know about a job: a code for programs, a sentence, and the way out."""

    code = serializers.CharField()
    sentence = serializers.CharField()
    way_out = serializers.CharField(allow_blank=True)


PAYLOAD_FIELDS = ("input", "input_sha256", "checkpoint", "result")


class JobDetailSerializer(JobSerializer):
    """A job with everything. Payload fields are there only with `view_job_payload`, and masked by the kind."""

    idempotency_key = serializers.CharField(allow_null=True)
    progress_job_id = serializers.UUIDField(allow_null=True)
    cancelled_by = Key(source="cancelled_by_id", allow_null=True)
    checkpoint_at = Moment(allow_null=True)
    pending_since = Moment(allow_null=True)
    domain_mirrored_at = Moment(allow_null=True)
    lease_epoch = serializers.IntegerField()
    continuation_seq = serializers.IntegerField()
    queue_job_id = serializers.CharField(allow_null=True)
    orphanings = serializers.IntegerField(source="redrives_since_commit")
    lost_deliveries = serializers.IntegerField()
    mirror_attempts = serializers.IntegerField()
    error_message = serializers.CharField(allow_null=True)
    description = serializers.SerializerMethodField()
    operator_note = serializers.SerializerMethodField()
    runbook_url = serializers.SerializerMethodField()
    reasons = serializers.SerializerMethodField()
    meta = serializers.SerializerMethodField()
    input = serializers.SerializerMethodField(required=False)
    input_sha256 = serializers.CharField(allow_null=True, required=False)
    checkpoint = serializers.SerializerMethodField(required=False)
    result = serializers.SerializerMethodField(required=False)

    def get_fields(self) -> dict[str, Any]:
        """All fields, or those without the payload."""
        fields: dict[str, Any] = super().get_fields()
        if not self.context.get("payload", True):
            for name in PAYLOAD_FIELDS:
                del fields[name]
        return fields

    def get_description(self, seen: Seen) -> str:
        return str(seen.known.description) if seen.known else ""

    def get_operator_note(self, seen: Seen) -> str:
        return str(seen.known.operator_note) if seen.known else ""

    def get_runbook_url(self, seen: Seen) -> str:
        return seen.known.runbook_url if seen.known else ""

    def get_reasons(self, seen: Seen) -> list[dict[str, str]]:
        return [vars(reason) for reason in explain.explain(seen.job)]

    def get_meta(self, seen: Seen) -> Any:
        return kinds.mask(seen.known, seen.job.meta)

    def get_input(self, seen: Seen) -> Any:
        return kinds.mask(seen.known, seen.job.input)

    def get_checkpoint(self, seen: Seen) -> Any:
        return kinds.mask(seen.known, seen.job.checkpoint)

    def get_result(self, seen: Seen) -> Any:
        return kinds.mask(seen.known, seen.job.result)


class JobStatusSerializer(Shown):
    """A job for the user who started it: how far it is, in words and numbers, and what came of it."""

    id = serializers.UUIDField()
    kind = serializers.CharField()
    phase = serializers.ChoiceField(choices=[phase.value for phase in Phase])
    finished = serializers.BooleanField()
    percent = serializers.FloatField(allow_null=True)
    processed = serializers.IntegerField(source="processed_count")
    total = serializers.IntegerField(source="total_count", allow_null=True)
    eta_seconds = serializers.IntegerField(allow_null=True)
    public_message = serializers.CharField()
    result = serializers.SerializerMethodField()
    created_at = Moment()
    started_at = Moment(allow_null=True)
    finished_at = Moment(allow_null=True)

    def get_result(self, seen: Seen) -> Any:
        return seen.public_result


class ExplanationSerializer(serializers.Serializer):
    """Why a job does not run, what is wrong with it, and what can be done."""

    id = serializers.UUIDField()
    kind = serializers.CharField()
    phase = serializers.ChoiceField(choices=[phase.value for phase in Phase])
    reasons = ReasonSerializer(many=True)


class JobEventSerializer(Shown):
    """One line of a job's history; `data` only with `view_job_payload`."""

    id = Key()
    created_at = Moment()
    event = serializers.CharField()
    epoch = serializers.IntegerField(allow_null=True)
    seq = serializers.IntegerField(allow_null=True)
    owner = serializers.CharField(allow_blank=True)
    actor = serializers.CharField(allow_blank=True)
    actor_id = serializers.CharField(allow_null=True)
    reason = serializers.CharField(allow_blank=True)
    operation_id = serializers.CharField(allow_null=True)
    code = serializers.CharField(allow_blank=True)
    error_type = serializers.CharField(allow_blank=True)
    message = serializers.CharField(allow_blank=True)
    traceback = serializers.CharField(allow_blank=True)
    release = serializers.CharField(allow_blank=True)
    data = serializers.SerializerMethodField(required=False)

    def get_fields(self) -> dict[str, Any]:
        """All fields, or those without the payload."""
        fields: dict[str, Any] = super().get_fields()
        if not self.context.get("payload", True):
            del fields["data"]
        return fields

    def get_data(self, event: JobEvent) -> Any:
        return masked_data(kinds.find(self.context["kind"]), event.data)


def masked_data(kind: Kind | None, data: Any) -> Any:
    """An event's data without what the kind masks, within payloads that it holds as text, too."""
    if isinstance(data, dict) and kind is not None:
        data = {
            name: _parsed(value) if name in HISTORIC_PAYLOADS and isinstance(value, str) else value
            for name, value in data.items()
        }
    return kinds.mask(kind, data)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class CandidateSerializer(Shown):
    """A job to choose from, with what it holds, masked by the kind."""

    id = serializers.UUIDField()
    kind = serializers.CharField()
    status = serializers.ChoiceField(choices=Status.values)
    created_at = Moment()
    lease_epoch = serializers.IntegerField()
    idempotency_key = serializers.CharField(allow_null=True)
    input = serializers.SerializerMethodField()
    checkpoint = serializers.SerializerMethodField()
    result = serializers.SerializerMethodField()

    def get_input(self, job: Job) -> Any:
        return kinds.mask(kinds.find(job.kind), job.input)

    def get_checkpoint(self, job: Job) -> Any:
        return kinds.mask(kinds.find(job.kind), job.checkpoint)

    def get_result(self, job: Job) -> Any:
        return kinds.mask(kinds.find(job.kind), job.result)


class ScopeSerializer(serializers.Serializer):
    """Whose jobs."""

    tenant = serializers.CharField()
    organization = serializers.CharField(allow_null=True)


class CandidatePageSerializer(serializers.Serializer):
    """One page as of one moment. It owns nothing: whoever acts on it claims first."""

    candidates = CandidateSerializer(many=True)
    scope = ScopeSerializer()
    scanned = serializers.IntegerField()
    has_more = serializers.BooleanField()
    cursor = serializers.CharField(allow_null=True)
    total = serializers.IntegerField(allow_null=True)
    observation = serializers.CharField()
    principal_validation = serializers.CharField()


# --- the whole --------------------------------------------------------------------------------------------


class BoundedSerializer(serializers.Serializer):
    """A number of jobs; `more` says that there are more than this."""

    number = serializers.IntegerField()
    more = serializers.BooleanField()


class CountsSerializer(serializers.Serializer):
    """Jobs that have not ended by what they wait for, and those that ended lately; each number stops at 1,000."""

    now = Moment()
    live = serializers.DictField(child=BoundedSerializer())
    ended = serializers.DictField(child=serializers.DictField(child=BoundedSerializer()))


class KindSerializer(serializers.Serializer):
    """A kind that is registered in the process that answers."""

    name = serializers.CharField()
    aliases = serializers.ListField(child=serializers.CharField())
    queue = serializers.CharField()
    description = serializers.CharField(allow_blank=True)
    operator_note = serializers.CharField(allow_blank=True)
    runbook_url = serializers.CharField(allow_blank=True)
    orphan_policy = serializers.ChoiceField(choices=kinds.ORPHAN_POLICIES)
    lease_seconds = serializers.FloatField()
    slice_seconds = serializers.FloatField()
    max_slice_seconds = serializers.FloatField()
    max_failures = serializers.IntegerField(source="retry.failures")
    max_orphanings = serializers.IntegerField()
    allow_restart = serializers.BooleanField()
    public_result = serializers.BooleanField()
    required_permissions = serializers.ListField(child=serializers.CharField())
    startable = serializers.SerializerMethodField()

    def get_startable(self, kind: Kind) -> bool:
        return is_startable(kind)


class WorkerSerializer(serializers.Serializer):
    """A live worker process; empty lists mean all."""

    owner = serializers.CharField()
    host = serializers.CharField(allow_blank=True)
    pid = serializers.IntegerField()
    queues = serializers.ListField(child=serializers.CharField(), source="queue_names")
    kinds = serializers.ListField(child=serializers.CharField(), source="kind_names")
    concurrency = serializers.IntegerField()
    release = serializers.CharField(allow_blank=True)
    started_at = Moment()
    beat_at = Moment()


class CheckSerializer(serializers.Serializer):
    """One thing that was looked at. Sentences name jobs of all scopes: they are for those who see all of them."""

    name = serializers.CharField()
    ok = serializers.BooleanField()
    sentence = serializers.CharField(allow_blank=True)
    way_out = serializers.CharField(allow_blank=True)


class HealthSerializer(serializers.Serializer):
    """Whether work is being done."""

    healthy = serializers.BooleanField()
    checks = CheckSerializer(many=True)


class PauseSerializer(serializers.Serializer):
    """A pause that is set; a blank field matches everything."""

    queue = serializers.CharField(source="queue_name", allow_blank=True)
    kind = serializers.CharField(allow_blank=True)
    tenant = serializers.CharField(source="tenant_id", allow_blank=True)
    reason = serializers.CharField(allow_blank=True)
    actor = serializers.CharField(allow_blank=True)
    since = Moment()


# --- bodies -----------------------------------------------------------------------------------------------


class CancelBody(Body):
    """Why."""

    reason = StrictText(required=False, allow_blank=True, max_length=REASON_LENGTH)


class RedriveBody(Body):
    """`force` for what failed as unrecoverable; `restart` from the start, where the kind allows it; why."""

    force = StrictBoolean(required=False)
    restart = StrictBoolean(required=False)
    reason = StrictText(required=False, allow_blank=True, max_length=REASON_LENGTH)


class UnpauseBody(Body):
    """Exactly the pause as it was set; nothing is all work."""

    queue = StrictText(required=False, allow_blank=True, max_length=QUEUE_LENGTH)
    kind = StrictText(required=False, allow_blank=True, max_length=KEY_LENGTH)
    tenant = StrictText(required=False, allow_blank=True, max_length=SCOPE_LENGTH)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuses what is blank but not empty: it would name nothing that exists."""
        for name in ("queue", "kind", "tenant"):
            if attrs.get(name) and not attrs[name].strip():
                raise serializers.ValidationError({name: ["This is blank. Leave it out to mean all."]})
        return attrs


class PauseBody(UnpauseBody):
    """What is paused (nothing: all work), and why."""

    reason = StrictText(max_length=REASON_LENGTH)


class StartBody(Body):
    """A kind that may be started so, and its input."""

    kind = StrictText(max_length=200)
    input = serializers.JSONField(required=False, allow_null=True)


class OutcomeSerializer(serializers.Serializer):
    """What became of it, and the job as it now is."""

    result = serializers.CharField()
    job = JobSerializer()


class UnpausedSerializer(serializers.Serializer):
    """Whether there was such a pause."""

    unpaused = serializers.BooleanField()


class RefusalSerializer(serializers.Serializer):
    """Nothing was changed, and why: a code for programs, a sentence, the job's status, who holds the lock key."""

    code = serializers.CharField()
    detail = serializers.CharField()
    status = serializers.ChoiceField(choices=Status.values, allow_null=True)
    held_by = serializers.UUIDField(allow_null=True)
