"""What the tests of the store share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store import rows


@pytest.fixture(autouse=True)
def no_users_remembered() -> Iterator[None]:
    """The users of one test are gone in the next."""
    rows.users.clear()
    yield
    rows.users.clear()
