"""The screens in another language: every text is translated, and what is compiled is what is written."""

from __future__ import annotations

import gettext
import os
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone, translation

import durable_jobs
from durable_jobs import explain, service
from durable_jobs.models import Job
from durable_jobs.testing import make_job
from tests.admin.conftest import ALL, logged_in, make_user, url, words
from tests.slices import change, made, own_registry

PACKAGE = Path(durable_jobs.__file__).parent
CATALOG = Path("locale/de/LC_MESSAGES/django.po")
needs_gettext = pytest.mark.skipif(shutil.which("xgettext") is None, reason="GNU gettext is not installed")


@pytest.fixture
def german(db: None, settings: Any) -> Client:
    settings.LANGUAGE_CODE = "de"
    return logged_in(make_user("anna", *ALL))


def test_the_screens_speak_german(german: Client) -> None:
    with own_registry():
        made()
        job = make_job("expired", kind="tests.made")
        change(job, lease_expires_at=timezone.now() - timedelta(minutes=11))
        failed = make_job("failed", kind="tests.made")
        service.pause(queue="slow", reason="Umzug", actor="anna")
        page = words(german.get(url("change", job.pk)))
        assert (
            "Festgefahren" in page and "hat die Lease nicht erneuert; sie ist vor 11 min abgelaufen." in page
        )
        assert "Reconciler eines beliebigen Workers parkt ihn" in page and "Erneut ausführen" in page
        assert "Pausiert: Warteschlange slow. Umzug" in page
        assert "Was ist festgefahren?" in words(german.get(url("overview")))
        assert "Diese Arbeit erneut ausführen?" in words(german.get(url("act", failed.pk, "redrive")))
        for name in ("changelist", "start", "pause"):
            assert german.get(url(name)).status_code == 200
        # Codes are for programs.
        assert [reason.code for reason in explain.explain(Job.objects.get(pk=job.pk))] == ["lease_expired"]


def test_spans_and_what_a_user_reads_are_translated() -> None:
    with translation.override("de"):
        assert explain.span(3 * 86_400) == "3 T"
        assert explain.public_message(Job(status="pending"), explain.Phase.STOPPING) == "Wird abgebrochen."


@needs_gettext
@pytest.mark.any_database
def test_no_text_is_left_untranslated(tmp_path: Path) -> None:
    """As `make messages` would find them."""
    ignored = shutil.ignore_patterns("__pycache__", "*.mo")
    copied = Path(shutil.copytree(PACKAGE, tmp_path / "durable_jobs", ignore=ignored))
    renewed = [
        sys.executable,
        "-P",
        "-m",
        "django",
        "makemessages",
        "-l",
        "de",
        "--no-wrap",
        "--add-location=never",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DJANGO_")}
    subprocess.run(renewed, cwd=copied, env=environment, check=True, capture_output=True, timeout=60)
    written = (copied / CATALOG).read_text()
    entries = written.split("\n\n")[1:]
    wanting = [
        entry for entry in entries if "#, fuzzy" in entry or re.search(r'^msgstr(\[\d\])? ""$', entry, re.M)
    ]
    assert not wanting and len(entries) > 300
    compiled = tmp_path / "django.mo"
    subprocess.run(["msgfmt", "--check-format", "-o", compiled, PACKAGE / CATALOG], check=True, timeout=60)
    assert texts(compiled) == texts((PACKAGE / CATALOG).with_suffix(".mo")), "run `make messages`"


def texts(compiled: Path) -> Any:
    with compiled.open("rb") as file:
        return gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
