"""`make screenshots`: a picture of every screen, light and dark, in docs/img."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from django.contrib.auth.models import User

from tests.e2e import scene
from tests.e2e.browser import NARROW, WIDE, Browser

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
    pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="only for `make screenshots`"),
]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "img"
TALLEST = 2000
ALSO_NARROW = {"overview", "jobs", "job-failed"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screens(anna: Browser, scheme: str) -> None:
    pages = scene.build(User.objects.get(username="anna"))
    anna.scheme(scheme)
    for name, page in pages.items():
        take(anna, page, f"{name}-{scheme}", WIDE)
        if name in ALSO_NARROW and scheme == "light":
            take(anna, page, f"{name}-narrow", NARROW)
    anna.size(WIDE)
    anna.open(pages["failures"])
    anna.driver.find_element("name", "all").click()
    anna.click("Redrive (run again)…")
    picture(anna, f"confirm-many-{scheme}", WIDE)


def take(browser: Browser, page: str, name: str, size: tuple[int, int]) -> None:
    browser.size(size)
    browser.open(page)
    picture(browser, name, size)


def picture(browser: Browser, name: str, size: tuple[int, int]) -> None:
    browser.size((size[0], min(max(browser.height(), 400), TALLEST)))
    FOLDER.mkdir(exist_ok=True)
    taken = browser.driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "optimizeForSpeed": False}
    )
    (FOLDER / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))
    browser.size(size)
