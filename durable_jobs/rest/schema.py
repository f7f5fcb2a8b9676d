"""What drf-spectacular cannot see by itself; loaded only where it is installed."""

from __future__ import annotations

import re
from typing import Any

from django import forms
from drf_spectacular.extensions import (
    OpenApiSerializerExtension,
    OpenApiSerializerFieldExtension,
    OpenApiViewExtension,
)
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import (
    OpenApiParameter,
    OpenApiResponse,
    extend_schema,
    extend_schema_serializer,
    extend_schema_view,
)
from rest_framework import serializers

from durable_jobs import candidates
from durable_jobs.explain import Phase
from durable_jobs.models import Status
from durable_jobs.rest import paging, starting
from durable_jobs.rest import serializers as ours
from durable_jobs.rest.filters import JobFilter

NO_NUL = "^[^\\x00]*$"
EMPTY_OR_NOT_BLANK = "^$|^[^\\x00]*[^\\s\\x00][^\\x00]*$"
NOT_BLANK = "^[^\\x00]*[^\\s\\x00][^\\x00]*$"
INSTANT_FILTERS = ("created_since", "created_before", "finished_since", "finished_before")

_PROBLEM = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
_WRONG = {"type": "object", "additionalProperties": True}


def _told(description: str, shape: dict[str, Any]) -> OpenApiResponse:
    return OpenApiResponse(shape, description=description)


WRONG = {400: _told("A parameter or a field of the body is wrong; the answer names it.", _WRONG)}
DENIED = {
    401: _told("Who asks is not known.", _PROBLEM),
    403: _told("Who asks may not do this.", _PROBLEM),
}
ABSENT = {404: _told("The caller's scopes hold no such job.", _PROBLEM)}
REFUSED = {409: OpenApiResponse(ours.RefusalSerializer, description="Refused; nothing was changed.")}
UNREADABLE = {
    413: _told("The body is too large.", _PROBLEM),
    415: _told("The body is not declared as JSON.", _PROBLEM),
}
LOOKED = {**WRONG, **DENIED}
ACTED = {**WRONG, **DENIED, **UNREADABLE}

ID = OpenApiParameter("id", OpenApiTypes.UUID, OpenApiParameter.PATH, description="The job.")
SIZE = OpenApiParameter(
    "page_size",
    {"type": "integer", "minimum": 1, "maximum": paging.LARGEST_PAGE, "default": paging.PAGE_SIZE},
)
ETAG = OpenApiParameter(
    "ETag", str, OpenApiParameter.HEADER, description="Changes when the answer does.", response=[200, 304]
)
RETRY_AFTER = OpenApiParameter(
    "Retry-After",
    int,
    OpenApiParameter.HEADER,
    description="Seconds; absent when the job has ended.",
    response=[200, 304],
)


def _cursor(pattern: str) -> OpenApiParameter:
    return OpenApiParameter(
        "cursor",
        {"type": "string", "pattern": pattern},
        description="A place in the list, from `next` or `previous`.",
    )


def _page(name: str, item: type[serializers.Serializer]) -> Any:
    address = {"allow_null": True, "required": True}
    fields = {
        "next": serializers.URLField(**address),
        "previous": serializers.URLField(**address),
        "results": item(many=True),
    }
    return type(name, (serializers.Serializer,), fields)


def _filters() -> list[OpenApiParameter]:
    found = []
    for name, one in JobFilter.base_filters.items():
        if name in INSTANT_FILTERS:
            shape: dict[str, Any] = {"type": "string", "format": "date-time"}
        elif name == "status":
            shape = {"type": "string", "enum": list(Status.values)}
        elif name == "phase":
            shape = {"type": "string", "enum": [phase.value for phase in Phase]}
        else:
            shape = {
                "type": "string",
                "minLength": 1,
                "maxLength": one.extra["max_length"],
                "pattern": NO_NUL,
            }
        found.append(OpenApiParameter(name, shape))
    return found


# Answers of `list` that are one object.
once = extend_schema_serializer(many=False)
JobPage = once(_page("JobPage", ours.JobSerializer))
JobEventPage = once(_page("JobEventPage", ours.JobEventSerializer))
once(ours.HealthSerializer)
once(ours.CandidatePageSerializer)


def _described(target: Any, **actions: Any) -> type[Any]:
    """The target class (loaded from its path by then) with what is said of its actions; itself it stays as it is."""
    described: type[Any] = extend_schema_view(**actions)(type("Described", (target,), {}))
    return described


class JobViews(OpenApiViewExtension):
    target_class = "durable_jobs.rest.views.JobViewSet"
    match_subclasses = True

    def view_replacement(self) -> type[Any]:
        """The viewset with what its code alone does not say."""
        one: dict[str, Any] = {"tags": ["jobs"], "parameters": [ID]}
        starting: dict[str, Any] = {
            "request": StartBody,
            "responses": {**ACTED, **REFUSED, 200: ours.JobStatusSerializer, 201: ours.JobStatusSerializer},
        }

        return _described(
            self.target_class,
            list=extend_schema(
                tags=["jobs"],
                parameters=[*_filters(), _cursor(paging.CURSOR), SIZE],
                responses={**LOOKED, 200: JobPage},
                filters=False,
            ),
            retrieve=extend_schema(**one, responses={**LOOKED, **ABSENT, 200: ours.JobDetailSerializer}),
            create=extend_schema(
                tags=["jobs"],
                parameters=[
                    OpenApiParameter(
                        "Idempotency-Key",
                        {"type": "string", "pattern": "^[!-~]{1,200}$"},
                        OpenApiParameter.HEADER,
                        description="The same key from the same user gives the same job.",
                    )
                ],
                **starting,
            ),
            status=extend_schema(
                tags=["jobs"],
                parameters=[
                    ID,
                    OpenApiParameter("If-None-Match", {"type": "string"}, OpenApiParameter.HEADER),
                    ETAG,
                    RETRY_AFTER,
                ],
                responses={
                    **LOOKED,
                    **ABSENT,
                    200: ours.JobStatusSerializer,
                    304: OpenApiResponse(description="Nothing has changed."),
                },
            ),
            events=extend_schema(
                tags=["jobs"],
                parameters=[ID, _cursor(paging.EVENT_CURSOR), SIZE],
                responses={**LOOKED, **ABSENT, 200: JobEventPage},
                filters=False,
            ),
            explain=extend_schema(**one, responses={**LOOKED, **ABSENT, 200: ours.ExplanationSerializer}),
            counts=extend_schema(tags=["jobs"], responses={**LOOKED, 200: ours.CountsSerializer}),
            cancel=extend_schema(
                **one,
                request=ours.CancelBody,
                responses={
                    **ACTED,
                    **ABSENT,
                    **REFUSED,
                    200: ours.OutcomeSerializer,
                    202: ours.OutcomeSerializer,
                },
            ),
            redrive=extend_schema(
                **one,
                request=ours.RedriveBody,
                responses={**ACTED, **ABSENT, **REFUSED, 200: ours.OutcomeSerializer},
            ),
        )


class CandidateViews(OpenApiViewExtension):
    target_class = "durable_jobs.rest.views.CandidateViewSet"
    match_subclasses = True

    def view_replacement(self) -> type[Any]:
        """One page, and what it is asked by."""

        def number(name: str, most: int, usual: int) -> OpenApiParameter:
            return OpenApiParameter(
                name, {"type": "integer", "minimum": 1, "maximum": most, "default": usual}
            )

        listed = extend_schema(
            tags=["jobs"],
            parameters=[
                OpenApiParameter(
                    "kind", {"type": "string", "maxLength": 200, "pattern": NOT_BLANK}, required=True
                ),
                OpenApiParameter("status", {"type": "string", "enum": list(Status.values)}),
                number("limit", candidates.LARGEST_PAGE, 25),
                number("max_payload_bytes", candidates.LARGEST_PAYLOAD, 262_144),
                _cursor(paging.SIGNED_CURSOR.replace("\\Z", "$")),
            ],
            responses={**LOOKED, **REFUSED, 200: ours.CandidatePageSerializer},
            filters=False,
        )
        return _described(self.target_class, list=listed)


class _Lists(OpenApiViewExtension):
    """A viewset that only lists."""

    match_subclasses = True
    tag: str
    item: Any

    def view_replacement(self) -> type[Any]:
        listed = extend_schema(
            tags=[self.tag], responses={**LOOKED, 200: self.item(many=True)}, filters=False
        )
        return _described(self.target_class, list=listed)


class KindViews(_Lists):
    target_class = "durable_jobs.rest.views.KindViewSet"
    tag, item = "kinds", ours.KindSerializer


class WorkerViews(_Lists):
    target_class = "durable_jobs.rest.views.WorkerViewSet"
    tag, item = "workers", ours.WorkerSerializer


class HealthViews(OpenApiViewExtension):
    target_class = "durable_jobs.rest.views.HealthViewSet"
    match_subclasses = True

    def view_replacement(self) -> type[Any]:
        """One answer, not a list of them."""

        answers = {**LOOKED, 200: ours.HealthSerializer}
        listed = extend_schema(
            tags=["health"], operation_id="health_retrieve", responses=answers, filters=False
        )
        return _described(self.target_class, list=listed)


class PauseViews(OpenApiViewExtension):
    target_class = "durable_jobs.rest.views.PauseViewSet"
    match_subclasses = True

    def view_replacement(self) -> type[Any]:
        """A list, and two acts."""

        return _described(
            self.target_class,
            list=extend_schema(
                tags=["pauses"], responses={**LOOKED, 200: ours.PauseSerializer(many=True)}, filters=False
            ),
            pause=extend_schema(
                tags=["pauses"], request=ours.PauseBody, responses={**ACTED, 200: ours.PauseSerializer}
            ),
            unpause=extend_schema(
                tags=["pauses"], request=ours.UnpauseBody, responses={**ACTED, 200: ours.UnpausedSerializer}
            ),
        )


class StartBody(serializers.Serializer):
    """Stands for one body per kind that may be started."""


class StartBodies(OpenApiSerializerExtension):
    target_class = "durable_jobs.rest.schema.StartBody"

    def map_serializer(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        """One shape for each kind that may be started: its name, and its input."""
        shapes = []
        for kind in starting.startable():
            named = starting.serializer_class(kind.input_serializer)
            if named is not None:
                given = {**auto_schema._map_serializer(named, direction), "additionalProperties": False}
            else:
                assert kind.input_form is not None
                given = _form(kind.input_form())
            shapes.append(
                {
                    "type": "object",
                    "title": kind.name,
                    "properties": {"kind": _exactly(kind.name), "input": given},
                    "required": ["kind", "input"],
                    "additionalProperties": False,
                }
            )
        if not shapes:
            return {"not": {}, "description": "No kind that is registered here can be started so."}
        # Said once more for all of them: drf-spectacular takes the body for optional otherwise.
        return shapes[0] if len(shapes) == 1 else {"oneOf": shapes, "required": ["kind", "input"]}


def _exactly(name: str) -> dict[str, Any]:
    # Not an enum: drf-spectacular would make one enum of those of all kinds.
    return {"type": "string", "pattern": f"^{re.escape(name)}$", "example": name}


def _form(form: Any) -> dict[str, Any]:
    fields: dict[str, forms.Field] = form.fields
    required = [name for name, field in fields.items() if field.required]
    return {
        "type": "object",
        "properties": {name: _field(field) for name, field in fields.items()},
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def _field(field: forms.Field) -> dict[str, Any]:
    shape: dict[str, Any]
    if isinstance(field, forms.BooleanField):
        shape = {"type": "boolean", **({"enum": [True]} if field.required else {})}
    elif isinstance(field, forms.ModelChoiceField):
        shape = {}
    elif isinstance(field, forms.MultipleChoiceField):
        choices = _choices(field)
        shape = {"type": "array", "items": {"enum": choices}, **({"minItems": 1} if field.required else {})}
    elif isinstance(field, forms.ChoiceField):
        shape = {"enum": [key for key in _choices(field) if key != "" or not field.required]}
    elif isinstance(field, forms.IntegerField):
        limits = {"minimum": field.min_value, "maximum": field.max_value}
        kind = "integer" if type(field) is forms.IntegerField else "number"
        shape = {"type": kind, **{name: value for name, value in limits.items() if value is not None}}
    elif isinstance(field, forms.CharField):
        limits = {"minLength": field.min_length, "maxLength": field.max_length}
        shape = {"type": "string", "pattern": NOT_BLANK if field.required else NO_NUL}
        shape.update({name: value for name, value in limits.items() if value is not None})
    else:
        shape = {"type": "string"}
    if not field.required:
        shape["nullable"] = True
    return {**shape, "description": str(field.help_text)} if field.help_text else shape


def _choices(field: Any) -> list[Any]:
    return [key for key, _ in field.choices]


class StrictTexts(OpenApiSerializerFieldExtension):
    target_class = "durable_jobs.rest.serializers.StrictText"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        """A text without NUL, and with something in it unless it may be blank."""
        shape = {"type": "string", "pattern": NO_NUL if self.target.allow_blank else NOT_BLANK}
        if self.target.max_length is not None:
            shape["maxLength"] = self.target.max_length
        return shape


class StrictBooleans(OpenApiSerializerFieldExtension):
    target_class = "durable_jobs.rest.serializers.StrictBoolean"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        """A truth value."""
        return {"type": "boolean"}


class Bodies(OpenApiSerializerExtension):
    target_class = "durable_jobs.rest.serializers.Body"
    match_subclasses = True

    def map_serializer(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        """The fields, and nothing besides them."""
        shape = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        # drf-spectacular sets an empty text beside every pattern; these patterns hold for it already.
        fields = {name: field.get("oneOf", [field])[0] for name, field in shape.get("properties", {}).items()}
        for name in {"queue", "kind", "tenant"}.intersection(fields):
            fields[name] = {**fields[name], "pattern": EMPTY_OR_NOT_BLANK}
        return {**shape, "properties": fields, "additionalProperties": False}


class Payloads(OpenApiSerializerExtension):
    target_class = "durable_jobs.rest.serializers.JobDetailSerializer"

    def map_serializer(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        """Payload fields may be missing, and hold any JSON."""
        shape = _with_any(auto_schema, self.target, direction, *ours.PAYLOAD_FIELDS, "meta")
        reasons = auto_schema.resolve_serializer(ours.ReasonSerializer, direction)
        shape["properties"]["reasons"] = {"type": "array", "items": reasons.ref, "readOnly": True}
        return shape


class Candidates(OpenApiSerializerExtension):
    target_class = "durable_jobs.rest.serializers.CandidateSerializer"

    def map_serializer(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        """The content is any JSON."""
        return _with_any(auto_schema, self.target, direction, "input", "checkpoint", "result", optional=False)


class EventData(OpenApiSerializerExtension):
    target_class = "durable_jobs.rest.serializers.JobEventSerializer"

    def map_serializer(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        """The data may be missing, and holds any JSON."""
        return _with_any(auto_schema, self.target, direction, "data")


class Results(OpenApiSerializerExtension):
    target_class = "durable_jobs.rest.serializers.JobStatusSerializer"

    def map_serializer(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        """The result is any JSON."""
        return _with_any(auto_schema, self.target, direction, "result", optional=False)


def _with_any(
    auto_schema: Any, target: Any, direction: Any, *names: str, optional: bool = True
) -> dict[str, Any]:
    shape: dict[str, Any] = auto_schema._map_serializer(target, direction, bypass_extensions=True)
    for name in names:
        if name == "input_sha256":
            continue
        shape["properties"][name] = {"nullable": True, "description": "Any JSON.", "readOnly": True}
    if optional:
        missing = {*ours.PAYLOAD_FIELDS, "data"}
        shape["required"] = [name for name in shape["required"] if name not in missing]
    return shape
