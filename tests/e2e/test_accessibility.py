"""axe-core finds nothing wrong with any page, light or dark, wide or narrow."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User

from durable_jobs.admin import acts
from tests.e2e import scene
from tests.e2e.browser import NARROW, WIDE, Browser

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

OWN = {"subject", "app", "pauses", "workers", "job-history"}
"""Pages that are Django's own but for a part of them: what axe says of the rest is not ours."""


def violations_of_a_bulk_under_way(browser: Browser) -> list[str]:
    """Confirm what is shown, and look at the page between two of its parts."""
    stay = "HTMLFormElement.prototype.requestSubmit = () => {}"
    browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": stay})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acts, "JOBS_A_REQUEST", 2)
        browser.click("Yes: Redrive (run again)")
    browser.wait_for("skipped 2")
    return browser.violations()


def violations_of_a_wrong_form(browser: Browser, page: str) -> list[str]:
    browser.open(page)
    browser.driver.execute_script("document.querySelector('form.jobs-confirm').noValidate = true")
    browser.fill("limit", "0")
    browser.click("Start")
    browser.wait_for("greater than or equal to 1")
    return browser.violations()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_no_violations(anna: Browser, scheme: str, size: tuple[int, int]) -> None:
    pages = scene.build(User.objects.get(username="anna")) | scene.others()
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
        if wrong := violations_of_a_bulk_under_way(anna):
            found["bulk"] = wrong
        if wrong := violations_of_a_wrong_form(anna, pages["start-form"]):
            found["start-form with errors"] = wrong
    assert not found, "\n".join(f"{name}: {one}" for name, wrong in found.items() for one in wrong)
