"""Starting a kind's jobs over HTTP: what it takes, and how its own form starts it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils.module_loading import import_string
from rest_framework import serializers

from durable_jobs import database, jsontext, kinds, service, store
from durable_jobs.conf import config
from durable_jobs.exceptions import DurableJobsError, IdempotencyConflict
from durable_jobs.kinds import Kind
from durable_jobs.models import Job, JobEvent, Scope
from durable_jobs.service import Started


def is_startable(kind: Kind) -> bool:
    """Whether people may start jobs of a kind: it says what its input must be, and has or makes the row it needs."""
    if _starts_by_its_form(kind):
        return True
    return (kind.input_serializer is not None or kind.input_form is not None) and kind.mirror is None


def _starts_by_its_form(kind: Kind) -> bool:
    return kind.input_serializer is None and callable(getattr(kind.input_form, "start", None))


def startable() -> list[Kind]:
    """The kinds that may be started over HTTP."""
    return [kind for kind in kinds.all_kinds() if is_startable(kind)]


def start(
    kind: Kind, given: Any, *, key: str | None, scope: Scope, user: Any, context: dict[str, Any]
) -> Started:
    """Start a job of a kind with this input; raises a ValidationError below `input`, or the service's refusal.

    With a key the same request gives the same job, and another one under it is an `IdempotencyConflict`.
    """
    try:
        if kind.input_serializer is not None:
            input = _by_serializer(kind.input_serializer, given, context)
        else:
            form = _form_of(kind, given)
            if _starts_by_its_form(kind):
                return _by_its_form(kind, form, key, scope, user)
            input = kinds.input_of(form)
    except serializers.ValidationError as error:
        raise serializers.ValidationError({"input": error.detail}) from error
    return service.start(type(kind), input, scope=scope, idempotency_key=key, created_by=user)


class _KeyIsTaken(Exception):
    """Somebody else has started a job under the key meanwhile: what was begun here is rolled back."""


def _by_its_form(kind: Kind, form: Any, key: str | None, scope: Scope, user: Any) -> Started:
    """The form makes its own row and job. The key is written on the job afterwards, in the same transaction.

    The job's input names that row, so it cannot tell a repeated request from another one: the request's own hash
    is kept in the history.
    """
    asked = jsontext.encode(kinds.input_of(form), field="input", limit=config.MAX_INPUT_BYTES)
    facts = {"request_sha256": jsontext.sha256(asked)}
    if key is not None and (earlier := _under(kind, key, scope)) is not None:
        return _repeated(earlier, key, facts)
    try:
        with database.joined(database.alias()):
            answer = form.start(created_by=user, scope=scope)
            started = answer if isinstance(answer, Started) else Started(answer, True)
            if started.created:
                if key is not None and not store.set_idempotency_key(started.job.id, key):
                    raise _KeyIsTaken
                store.add_event(started.job, "started", actor=service.actor_text(user), data=facts)
            return started
    except ValidationError as error:
        raise serializers.ValidationError([str(message) for message in error.messages]) from error
    except (DurableJobsError, _KeyIsTaken):
        # The same request, sent twice at once, may have met itself: at its key, or at its job's lock.
        if key is None or (earlier := _under(kind, key, scope)) is None:
            raise
        return _repeated(earlier, key, facts)


def _under(kind: Kind, key: str, scope: Scope) -> Job | None:
    found = (store.by_idempotency_key(name, key, scope) for name in (kind.name, *kind.aliases))
    return next((job for job in found if job is not None), None)


def _repeated(earlier: Job, key: str, facts: dict[str, Any]) -> Started:
    told = JobEvent.objects.using(database.alias()).filter(job_id=earlier.id, event="started").order_by("id")
    if told.values_list("data", flat=True).first() != facts:
        raise IdempotencyConflict(key, earlier.id)
    return Started(earlier, False)


def serializer_class(named: Any) -> Any:
    """The serializer of a kind, which may have named it by its path."""
    return import_string(named) if isinstance(named, str) else named


def _by_serializer(named: Any, given: Any, context: dict[str, Any]) -> Any:
    serializer = serializer_class(named)(data=given, context=context)
    if isinstance(given, dict):
        _refuse_unknown(given, getattr(serializer, "fields", given))
    serializer.is_valid(raise_exception=True)
    validated = serializer.validated_data
    return dict(validated) if isinstance(validated, dict) else validated


def _form_of(kind: Kind, given: Any) -> Any:
    """The kind's form, filled and valid."""
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise serializers.ValidationError(["Give an object."])
    assert kind.input_form is not None
    form = kind.input_form(data=given)
    _refuse_unknown(given, form.fields)
    wrong = {
        name: ["This has the wrong type."]
        for name, value in given.items()
        if not _fits(form.fields[name], value)
    }
    if wrong:
        raise serializers.ValidationError(wrong)
    if not form.is_valid():
        raise serializers.ValidationError(
            {name: [str(message) for message in messages] for name, messages in form.errors.items()}
        )
    return form


def _refuse_unknown(given: dict[str, Any], known: Collection[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise serializers.ValidationError({name: ["There is no such field."] for name in unknown})


def _fits(field: forms.Field, value: Any) -> bool:
    """Forms make a text of whatever they are given; JSON has types, which say what was meant."""
    if value is None:
        return not field.required
    if isinstance(field, forms.BooleanField):
        return isinstance(value, bool)
    if isinstance(field, forms.MultipleChoiceField | forms.ModelMultipleChoiceField):
        return isinstance(value, list) and all(isinstance(one, str | int) for one in value)
    if isinstance(field, forms.IntegerField):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(field, forms.ChoiceField | forms.ModelChoiceField):
        return isinstance(value, str | int) and not isinstance(value, bool)
    return isinstance(value, str)
