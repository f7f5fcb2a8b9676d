"""Users with the permissions of the screens, and what a page says."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

ALL = (
    "view_job",
    "start_job",
    "operate_job",
    "force_redrive_job",
    "pause_job",
    "settle_job",
    "view_job_payload",
    "view_all_scopes",
)


def make_user(name: str, *codenames: str, staff: bool = True) -> User:
    user = User.objects.create_user(name, password="x", is_staff=staff)
    user.user_permissions.set(
        Permission.objects.filter(codename__in=codenames, content_type__app_label="durable_jobs")
    )
    assert user.user_permissions.count() == len(codenames)
    return user


def logged_in(user: User | None, **options: Any) -> Client:
    client = Client(**options)
    if user is not None:
        client.force_login(user)
    return client


@pytest.fixture
def operator(db: None) -> User:
    return make_user("anna", *ALL)


@pytest.fixture
def client(operator: User) -> Client:
    return logged_in(operator)


def url(name: str, *args: Any) -> str:
    return reverse(f"admin:durable_jobs_job_{name}", args=args)


def words(answer: Any) -> str:
    """What a page says, without its marks."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", answer.content.decode(), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def version(client: Client, job: Any, act: str) -> str:
    """The state that a confirmation page was shown for."""
    page = client.get(url("act", job.pk, act)).content.decode()
    found = re.search(r'name="version" value="([^"]+)"', page)
    assert found, page
    return found[1]


def confirm(client: Client, job: Any, act: str, **said: Any) -> Any:
    return client.post(url("act", job.pk, act), {"version": version(client, job, act), **said}, follow=True)


def token(answer: Any) -> str:
    found = re.search(r'name="token" value="([^"]+)"', answer.content.decode())
    assert found, words(answer)
    return found[1]


Page = Callable[..., Any]
