"""Who may see which jobs, and who may do what with them. Every screen and every act asks here, on the server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from django.db.models import Q
from django.http import HttpRequest
from django.utils.module_loading import import_string

from durable_jobs import kinds, selection
from durable_jobs.access import (
    FORCE,
    OPERATE,
    PAUSE,
    PAYLOAD,
    SETTLE,
    START,
    VIEW,
    scopes_of,
    sees_everything,
)
from durable_jobs.conf import config
from durable_jobs.kinds import Kind
from durable_jobs.models import Pause, Scope
from durable_jobs.service import AllScopes

__all__ = [
    "FORCE",
    "OPERATE",
    "PAUSE",
    "PAYLOAD",
    "SETTLE",
    "START",
    "VIEW",
    "among",
    "among_events",
    "closed_kinds",
    "is_visible",
    "labels",
    "may",
    "may_act_on",
    "may_pause",
    "parts",
    "scopes",
    "written",
]

_CACHED: Final = "_durable_jobs_scopes"


def may(request: HttpRequest, permission: str) -> bool:
    """Whether the user has the permission, and may see jobs at all."""
    user: Any = request.user
    return bool(user.is_active and user.has_perm(VIEW) and user.has_perm(permission))


def may_act_on(request: HttpRequest, kind: Kind | None) -> bool:
    """Whether the user has what the kind requires besides the general permissions."""
    required = list(kind.required_permissions) if kind is not None else []
    return bool(request.user.has_perms(required))


def closed_kinds(request: HttpRequest) -> tuple[str, ...]:
    """The names of the kinds whose own permissions the user lacks."""
    return tuple(
        name for kind in kinds.all_kinds() if not may_act_on(request, kind) for name in kind.all_names
    )


def scopes(request: HttpRequest) -> tuple[Scope, ...] | None:
    """The scopes whose jobs the user may see; None for all of them. The project's function is asked once."""
    if not hasattr(request, _CACHED):
        setattr(request, _CACHED, scopes_of(request))
    found = getattr(request, _CACHED)
    return None if isinstance(found, AllScopes) else tuple(found)


def among(request: HttpRequest) -> Q:
    """The condition that rows of jobs must hold for the user to see them."""
    allowed = scopes(request)
    return Q() if allowed is None else selection.in_scopes(allowed)


def among_events(request: HttpRequest) -> Q:
    """The same for the history, whose pauses concern a tenant, or all of them."""
    allowed = scopes(request)
    if allowed is None:
        return Q()
    tenants = {"", *(scope.tenant for scope in allowed)}
    return selection.in_scopes(allowed) | Q(job_id__isnull=True, tenant_id__in=tenants)


def is_visible(request: HttpRequest, pause: Pause) -> bool:
    """Whether a pause concerns the user: it stands for all tenants, or for one of theirs."""
    allowed = scopes(request)
    return allowed is None or not pause.tenant_id or any(scope.tenant == pause.tenant_id for scope in allowed)


def may_pause(request: HttpRequest, tenant: str) -> bool:
    """Whether the user may pause and unpause this tenant's work; blank is everybody's."""
    if sees_everything(request):
        return may(request, PAUSE)
    own = {scope.tenant for scope in scopes(request) or ()}
    return may(request, PAUSE) and bool(tenant) and tenant in own


def labels(wanted: Iterable[Scope]) -> dict[Scope, str]:
    """A name for each scope: the project's own, or tenant and organization. One call a page."""
    unique = list(dict.fromkeys(wanted))
    named_by = config.SCOPE_LABELS
    own: Any = import_string(named_by) if isinstance(named_by, str) else named_by
    named = dict(own(unique)) if own is not None and unique else {}
    return {scope: str(named.get(scope) or _label(scope)) for scope in unique}


def written(scope: Scope) -> str:
    """A scope as filters and forms take it: `tenant`, or `tenant/organization`."""
    return scope.tenant if scope.organization is None else f"{scope.tenant}/{scope.organization}"


def parts(text: str) -> tuple[str | None, str | None]:
    """Tenant and organization of what was written so; None for what is missing."""
    tenant, _, organization = (part.strip() for part in text.partition("/"))
    return tenant or None, organization or None


def _label(scope: Scope) -> str:
    return scope.tenant if scope.organization is None else f"{scope.tenant} / {scope.organization}"
