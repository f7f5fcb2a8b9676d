"""Whose jobs are whose on the demo site: the members of a group share a scope, everybody else the one without."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from durable_jobs.models import Scope


def scope_of_request(request: HttpRequest) -> Scope:
    """The scope of whoever asks; named by DURABLE_JOBS["SCOPE_FROM_REQUEST"]."""
    return scope_of_user(request.user)


def scope_of_user(user: Any) -> Scope:
    """The scope of a user's first group, by name."""
    group = user.groups.order_by("pk").first() if user is not None and user.is_authenticated else None
    return Scope(organization=group.name[:64] if group is not None else None)
