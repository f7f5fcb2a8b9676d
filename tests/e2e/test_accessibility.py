"""axe-core finds nothing wrong with any page, light or dark, wide or narrow."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User

from tests.e2e import scene
from tests.e2e.browser import NARROW, WIDE, Browser

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

OWN = {"subject", "app"}
"""Pages that are Django's own but for a part of them: what axe says of the rest is not ours."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_no_violations(anna: Browser, scheme: str, size: tuple[int, int]) -> None:
    pages = scene.build(User.objects.get(username="anna"))
    anna.size(size)
    anna.scheme(scheme)
    found = {}
    for name, page in pages.items():
        anna.open(page)
        wrong = [one for one in anna.violations() if name not in OWN or "jobs-" in one]
        if wrong:
            found[name] = wrong
        assert not anna.is_too_wide() or name in OWN, name
    if size == WIDE:
        anna.open(pages["failures"])
        anna.driver.find_element("name", "all").click()
        anna.click("Redrive (run again)…")
        if wrong := anna.violations():
            found["confirm-many"] = wrong
    assert not found, "\n".join(f"{name}: {one}" for name, wrong in found.items() for one in wrong)
