"""Starting a kind's jobs over HTTP: what it takes, and how its own form starts it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils.module_loading import import_string
from rest_framework import serializers

from durable_jobs import kinds, service
from durable_jobs.kinds import Kind
from durable_jobs.models import Scope
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
                return service.start_by(
                    lambda: form.start(created_by=user, scope=scope),
                    kind=type(kind),
                    request=kinds.input_of(form),
                    scope=scope,
                    idempotency_key=key,
                    created_by=user,
                )
            input = kinds.input_of(form)
    except serializers.ValidationError as error:
        raise serializers.ValidationError({"input": error.detail}) from error
    except ValidationError as error:
        raise serializers.ValidationError({"input": [str(told) for told in error.messages]}) from error
    return service.start(type(kind), input, scope=scope, idempotency_key=key, created_by=user)


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
