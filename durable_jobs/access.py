"""Whose jobs a request may see: from the project's own functions, never from what the caller wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q
from django.http import HttpRequest
from django.utils.module_loading import import_string

from durable_jobs.conf import NAME, config
from durable_jobs.exceptions import shown
from durable_jobs.models import Scope
from durable_jobs.selection import in_scopes
from durable_jobs.service import ALL_SCOPES, AllScopes

VIEW: Final = "durable_jobs.view_job"
START: Final = "durable_jobs.start_job"
OPERATE: Final = "durable_jobs.operate_job"
FORCE: Final = "durable_jobs.force_redrive_job"
PAUSE: Final = "durable_jobs.pause_job"
SETTLE: Final = "durable_jobs.settle_job"
PAYLOAD: Final = "durable_jobs.view_job_payload"
VIEW_ALL_SCOPES: Final = "durable_jobs.view_all_scopes"

Scopes = tuple[Scope, ...] | AllScopes


def scope_of(request: HttpRequest) -> Scope | None:
    """The scope that a request starts jobs in and reads its own jobs from; None when it belongs to none."""
    if config.SCOPE_FROM_REQUEST is None:
        return Scope(config.DEFAULT_TENANT)
    scope = _function(config.SCOPE_FROM_REQUEST)(request)
    if scope is None or isinstance(scope, Scope):
        return scope
    raise _wrong("SCOPE_FROM_REQUEST", scope, "a Scope, or None")


def scopes_of(request: HttpRequest) -> Scopes:
    """The scopes that an operator's request may look at and act in; empty when there are none."""
    if config.ADMIN_SCOPES is None:
        if request.user.has_perm(VIEW_ALL_SCOPES):
            return ALL_SCOPES
        own = scope_of(request)
        return () if own is None else (own,)
    scopes = _function(config.ADMIN_SCOPES)(request)
    if isinstance(scopes, AllScopes):
        return scopes
    if isinstance(scopes, Scope) or not isinstance(scopes, Iterable):
        raise _wrong("ADMIN_SCOPES", scopes, "a list of Scope, or ALL_SCOPES")
    listed = tuple(dict.fromkeys(scopes))
    if not all(isinstance(scope, Scope) for scope in listed):
        raise _wrong("ADMIN_SCOPES", scopes, "a list of Scope, or ALL_SCOPES")
    return listed


def condition(scopes: Scopes) -> Q:
    """A condition that holds for the rows of these scopes."""
    return Q() if isinstance(scopes, AllScopes) else in_scopes(scopes)


def sees_everything(request: HttpRequest) -> bool:
    """Whether nothing is hidden from an operator: all scopes, or a project that knows no scopes at all."""
    knows_none = config.SCOPE_FROM_REQUEST is None and config.ADMIN_SCOPES is None
    return knows_none or scopes_of(request) is ALL_SCOPES


def _function(named: Any) -> Any:
    return import_string(named) if isinstance(named, str) else named


def _wrong(setting: str, answer: object, wanted: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(f"{NAME}[{setting!r}] answered {shown(answer)}; it must answer {wanted}.")
