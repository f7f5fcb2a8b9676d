"""Fixtures for pytest-django. A project asks for them in its conftest.py: `pytest_plugins = ["durable_jobs.testing.pytest"]`.

They are not loaded by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from durable_jobs import testing
from durable_jobs.kinds import Kind
from durable_jobs.models import Job
from durable_jobs.testing import CrashReport


@pytest.fixture
def run_jobs(db: None) -> Callable[[], list[Job]]:
    """`run_until_idle`: does what a worker would do, and answers with the jobs that ran."""
    return testing.run_until_idle


@pytest.fixture
def register_kind() -> Iterator[Callable[[type[Kind]], type[Kind]]]:
    """Registers a kind until the test ends; a decorator, too."""
    with ExitStack() as stack:

        def register(kind_class: type[Kind]) -> type[Kind]:
            stack.enter_context(testing.register_for_test(kind_class))
            return kind_class

        yield register


@pytest.fixture
def crash_test(transactional_db: None) -> Callable[..., CrashReport]:
    """`crash_test`, with the real transactions that it needs."""
    return testing.crash_test


@pytest.fixture
def frozen_worker(db: None) -> Iterator[None]:
    """`freeze_worker` around the whole test: each slice is frozen at its first commit and loses its job."""
    with testing.freeze_worker():
        yield
