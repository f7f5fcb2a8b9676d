"""Who may do what: the permissions of the model `Job`, asked after those that the project asks everywhere."""

from __future__ import annotations

from typing import Any, ClassVar

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from durable_jobs import access


class HasPermission(BasePermission):
    """The signed-in user has one permission of the model `Job`."""

    permission: ClassVar[str]
    message = "You do not have permission to do this."

    def has_permission(self, request: Request, view: Any) -> bool:
        """Whether the user has it."""
        user = request.user
        return bool(user and user.is_authenticated and user.has_perm(self.permission))


class CanView(HasPermission):
    """May look at jobs, kinds, workers and pauses."""

    permission = access.VIEW


class CanViewPayload(CanView):
    """May look at jobs, and at what they hold."""

    def has_permission(self, request: Request, view: Any) -> bool:
        """Whether the user has both."""
        return super().has_permission(request, view) and may_see_payload(request)


class CanStart(HasPermission):
    """May start jobs."""

    permission = access.START


class CanOperate(HasPermission):
    """May cancel and redrive."""

    permission = access.OPERATE


class CanPause(HasPermission):
    """May pause and unpause."""

    permission = access.PAUSE


def may_see_payload(request: Request) -> bool:
    """Whether input, checkpoint and result are shown."""
    return bool(request.user.has_perm(access.PAYLOAD))


def may_force(request: Request) -> bool:
    """Whether a redrive may be forced."""
    return bool(request.user.has_perm(access.FORCE))
