"""What the tests of receipts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from durable_jobs.models import local_diagnostics
from tests.store import rows


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Users and diagnostics of one test are gone in the next."""
    rows.users.clear()
    local_diagnostics.clear()
    yield
    rows.users.clear()
