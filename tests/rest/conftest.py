"""Users with rights, clients that are they, and a registry with the kinds of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from rest_framework.test import APIClient

from durable_jobs import kinds
from tests.rest.kinds import KINDS
from tests.slices import own_registry

VIEWER = ("view_job",)
OPERATOR = ("view_job", "start_job", "operate_job", "pause_job", "view_job_payload")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with own_registry():
        for kind in KINDS:
            kinds.register(kind)
        yield


def user(name: str, *rights: str) -> User:
    made = User.objects.create(username=name)
    names = [right.rpartition(".")[2] for right in rights]
    made.user_permissions.set(Permission.objects.filter(codename__in=names))
    return made


def client(who: User | None = None) -> APIClient:
    made = APIClient()
    made.raise_request_exception = True
    if who is not None:
        made.force_login(who)
    return made


@pytest.fixture
def signed_in(db: None) -> Callable[..., Any]:
    """A client signed in as a new user with these rights."""
    number = iter(range(1, 100))

    def sign_in(*rights: str) -> Any:
        who = user(f"user{next(number)}", *rights)
        made: Any = client(who)
        made.user = who
        return made

    return sign_in


@pytest.fixture
def viewer(signed_in: Callable[..., Any]) -> Any:
    return signed_in(*VIEWER)


@pytest.fixture
def operator(signed_in: Callable[..., Any]) -> Any:
    return signed_in(*OPERATOR)
