"""Kinds that people may start over HTTP, and some that they may not."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from django import forms
from django.contrib.auth.models import Group
from django.core.exceptions import ValidationError
from rest_framework import serializers

from durable_jobs import service
from durable_jobs.kinds import Done, Kind, StatusMirror, register


class EchoInput(serializers.Serializer):
    count = serializers.IntegerField(min_value=0, max_value=1000)
    loud = serializers.BooleanField(required=False)

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, dict) and not isinstance(data.get("loud", False), bool):
            raise serializers.ValidationError({"loud": ["Give true or false."]})
        if isinstance(data, dict) and (isinstance(data.get("count"), bool | str | float)):
            raise serializers.ValidationError({"count": ["Give a whole number."]})
        return super().to_internal_value(data)


class LetterForm(forms.Form):
    address = forms.CharField(max_length=40)
    copies = forms.IntegerField(min_value=1, max_value=9)
    colour = forms.ChoiceField(choices=[("black", "Black"), ("red", "Red")])
    urgent = forms.BooleanField(required=False)


@register
class Echo(Kind):
    name = "rest.echo"
    input_serializer = "tests.rest.kinds.EchoInput"
    public_result = True
    masked_keys = ("token",)
    allow_restart = True
    description = "Says what it is told."
    operator_note = "Harmless."
    runbook_url = "https://wiki.example/echo"

    def step(self, ctx: Any) -> Done:
        return Done({"said": ctx.input, "token": "secret"})


@register
class Letter(Kind):
    name = "rest.letter"
    input_form = LetterForm

    def step(self, ctx: Any) -> Done:
        return Done({"printed": ctx.input["copies"]})


class ParcelForm(forms.Form):
    """Makes a row of its own, whose key is in the job's input, and a lock."""

    weight = forms.IntegerField(min_value=1, max_value=30)
    street = forms.CharField(max_length=80, required=False)

    def start(self, *, created_by: Any, scope: Any) -> Any:
        if self.cleaned_data["weight"] == 13:
            raise ValidationError("Nobody carries thirteen.")
        group = Group.objects.create(name=f"parcel {uuid4()}")
        return service.start(
            "rest.parcel",
            {"group": group.pk},
            subject=group,
            lock_key=self.cleaned_data["street"] or None,
            created_by=created_by,
            scope=scope,
        )


@register
class Parcel(Kind):
    name = "rest.parcel"
    input_form = ParcelForm
    mirror = StatusMirror(
        "auth.Group", field="name", open=("x",), redriven="x", completed="x", failed="x", cancelled="x"
    )

    def step(self, ctx: Any) -> Done:
        return Done()


@register
class Guarded(Kind):
    name = "rest.guarded"
    input_serializer = EchoInput
    required_permissions = ("auth.change_user",)

    def step(self, ctx: Any) -> Done:
        return Done()


@register
class Internal(Kind):
    name = "rest.internal"
    masked_keys = ("token",)

    def step(self, ctx: Any) -> Done:
        return Done()


KINDS = (Echo, Letter, Parcel, Guarded, Internal)
