"""A browser, a user who is logged in, and a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client

from tests.admin.conftest import ALL, make_user
from tests.e2e.browser import Browser
from tests.processes import Process, Processes

WORKER = {"GRACE": 0.5, "TICK": 0.3, "POLL": 0.1}
ENVIRONMENT = {"DEMO_LEASE_SECONDS": "5", "DEMO_BATCH_SIZE": "20"}


@pytest.fixture
def browser(live_server: Any, tmp_path: Path) -> Iterator[Browser]:
    opened = Browser(live_server.url, tmp_path / "profile")
    yield opened
    opened.close()


def log_in(browser: Browser, user: User) -> None:
    client = Client()
    client.force_login(user)
    browser.cookie(settings.SESSION_COOKIE_NAME, client.cookies[settings.SESSION_COOKIE_NAME].value)


@pytest.fixture
def anna(browser: Browser) -> Browser:
    """The browser of an operator who may do everything, the project's own pages included."""
    user = make_user("anna", *ALL)
    User.objects.filter(pk=user.pk).update(is_superuser=True)
    log_in(browser, user)
    return browser


@pytest.fixture
def start_worker(processes: Processes) -> Callable[[], Process]:
    def start() -> Process:
        return processes.manage("runworker", settings=WORKER, environment=ENVIRONMENT)

    return start
