"""What an operator does, in a real browser, with a real worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from selenium.webdriver.common.by import By

from durable_jobs import service
from durable_jobs.models import Job
from durable_jobs.testing import make_job
from project.demo.jobs import LOCK_KEY, start_import
from project.demo.models import ImportRun
from tests.admin.conftest import ALL, make_user, url
from tests.e2e.browser import NARROW, Browser
from tests.e2e.conftest import log_in
from tests.processes import Process
from tests.slices import change, row

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]


def bar(browser: Browser) -> float:
    return float(browser.driver.find_element(By.CSS_SELECTOR, "#jobs-live progress").get_attribute("value"))


def test_an_import_is_started_watched_cancelled_and_redriven(
    anna: Browser, start_worker: Callable[[], Process]
) -> None:
    start_worker()
    anna.open(url("overview"))
    anna.click("Start a job")
    anna.click("demo.airports")
    anna.fill("limit", "2000")
    anna.click("Start")
    anna.wait_for("The job was started.")

    # The bar moves, and the page is still the same one.
    anna.driver.execute_script("window.stillHere = true")
    anna.wait(lambda: bar(anna) > 0, "the bar stands still")
    first = bar(anna)
    anna.wait(lambda: bar(anna) > first, "the bar stands still")
    assert anna.driver.execute_script("return window.stillHere === true")
    assert " of 2,000" in anna.text and "Running" in anna.text

    anna.click("Cancel")
    anna.fill("reason", "wrong data set")
    anna.click("Yes: Cancel")
    anna.wait_for("was requested")
    anna.wait(lambda: "Ended" in anna.text and anna.all(".jobs-cancelled"), "the cancel is not seen")
    [job], [run] = Job.objects.all(), ImportRun.objects.all()
    assert (job.status, run.status) == ("cancelled", "cancelled")
    assert 0 < run.rows_done < 2000 and "wrong data set" in anna.text
    assert "Only what failed" in anna.text or "only what failed" in anna.text
    assert not anna.complaints()


def test_a_failed_import_is_redriven_from_its_checkpoint(
    anna: Browser, start_worker: Callable[[], Process]
) -> None:
    run = ImportRun.objects.create(source="airports")
    job = start_import(run, limit=60, pause=0.0)
    fail(job, run)
    change(job, processed_count=40, total_count=60)
    anna.open(url("change", job.pk))
    anna.click("Redrive (run again)")
    anna.click("Yes: Redrive (run again)")
    anna.wait_for("waits for a worker")
    run.refresh_from_db()
    assert (row(job).status, run.status) == ("pending", "queued")
    start_worker()
    anna.wait(lambda: anna.all("#jobs-live .jobs-completed"), "it does not end")
    run.refresh_from_db()
    assert (row(job).status, run.status) == ("completed", "done")
    anna.open(f"/admin/demo/importrun/{run.pk}/change/")
    assert "Completed" in anna.text and "demo.airports" in anna.text
    assert not anna.complaints()


def fail(job: Job, run: ImportRun, **columns: Any) -> None:
    """As if its last slice had failed."""
    ImportRun.objects.filter(pk=run.pk).update(status="failed")
    change(
        job, status="failed", next_run_at=None, pending_since=None, finished_at=job.created_at, error_class="transient",
        error_type="requests.exceptions.ConnectionError", error_message="the source does not answer", **columns,
    )  # fmt: skip


def test_a_pause_is_seen_and_named_as_the_reason(anna: Browser) -> None:
    job = start_import(ImportRun.objects.create(source="airports"), limit=20)
    anna.open(url("overview"))
    anna.click("Pause… imports")
    anna.fill("reason", "Migration of the disks")
    anna.click("Pause")
    anna.wait_for("Paused: queue imports")
    anna.open(url("change", job.pk))
    assert anna.all(".jobs-banner") and "Migration of the disks" in anna.text
    assert anna.all("#jobs-live .jobs-paused") and "Unpause." in anna.text
    anna.open(url("changelist"))
    assert "Paused (queue imports)" in anna.text
    anna.driver.find_element(By.CSS_SELECTOR, ".jobs-banner a").click()
    anna.click("Unpause")
    anna.wait_for("Unpaused: queue imports")
    assert not anna.all(".jobs-banner") and not anna.complaints()


def test_a_redrive_that_a_lock_forbids_leads_to_the_holder(anna: Browser) -> None:
    run = ImportRun.objects.create(source="airports")
    failed = start_import(run, limit=20)
    fail(failed, run)
    holder = start_import(ImportRun.objects.create(source="airports"), limit=20)
    anna.open(url("change", failed.pk))
    assert f"Job {holder.pk} holds its lock key {LOCK_KEY}." in anna.text
    anna.open(url("act", failed.pk, "redrive"))
    assert "Yes" not in anna.text
    anna.click("Open that job")
    assert url("change", holder.pk) in anna.driver.current_url
    # It was free when the page was shown, and is held when the button is pressed.
    service.cancel(holder.pk)
    anna.open(url("act", failed.pk, "redrive"))
    start_import(ImportRun.objects.create(source="airports"), limit=20)
    anna.click("Yes: Redrive (run again)")
    anna.wait_for("is held by job")
    assert row(failed).status == "failed"


def test_a_mixed_selection_is_cancelled(anna: Browser) -> None:
    live = [make_job(state, kind="demo.gone") for state in ("pending", "running", "retrying")]
    ended = [make_job(state, kind="demo.gone") for state in ("completed", "failed")]
    anna.open(f"{url('changelist')}?kind=demo.gone")
    anna.driver.find_element(By.ID, "jobs-tick-all").click()
    anna.click("Cancel…")
    assert "Cancel: 5 jobs" in anna.text and "2 jobs · not_cancellable" in anna.text
    anna.fill("reason", "wrong customer")
    anna.click("Yes: Cancel")
    anna.wait_for("changed 3 of 5 jobs, skipped 2 (not_cancellable 2)")
    assert anna.driver.current_url.endswith("?kind=demo.gone")
    assert all(row(job).cancel_requested_at for job in live) and not any(
        row(job).cancel_requested_at for job in ended
    )


@pytest.mark.parametrize("script", [True, False])
def test_a_bulk_goes_on_by_itself_or_by_a_button(
    live_server: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, script: bool
) -> None:
    from durable_jobs.admin import acts

    monkeypatch.setattr(acts, "JOBS_A_REQUEST", 3)
    jobs = []
    for _ in range(8):
        run = ImportRun.objects.create(source="airports")
        job = start_import(run, limit=20)
        fail(job, run, lock_key=None)
        jobs.append(job)
    browser = Browser(live_server.url, tmp_path / "profile", script=script)
    try:
        log_in(browser, make_user("anna", *ALL))
        browser.open(f"{url('changelist')}?phase=human")
        browser.driver.find_element(By.NAME, "all").click()
        browser.click("Redrive (run again)…")
        browser.click("Yes: Redrive (run again)")
        while not script and "Go on" in browser.text:
            browser.click("Go on")
        browser.wait_for("changed 8 of 8 jobs")
        assert {row(job).status for job in jobs} == {"pending"}
        assert {row(job).redrives for job in jobs} == {1}
        if not script:
            # Everything else works as well.
            browser.open(url("change", jobs[0].pk))
            browser.click("Cancel")
            browser.click("Yes: Cancel")
            browser.wait_for("The job is cancelled.")
    finally:
        browser.close()


def test_a_forced_redrive_needs_its_permission(browser: Browser) -> None:
    run = ImportRun.objects.create(source="airports")
    job = start_import(run, limit=20)
    fail(job, run, verdict="unrecoverable")
    user = make_user("ben", "view_job", "operate_job", "view_all_scopes")
    log_in(browser, user)
    browser.open(url("change", job.pk))
    assert "You lack the permission." in browser.text
    browser.open(url("act", job.pk, "force"))
    assert "403" in browser.text or "Forbidden" in browser.text
    log_in(browser, make_user("cleo", "view_job", "operate_job", "force_redrive_job", "view_all_scopes"))
    browser.open(url("change", job.pk))
    browser.click("Force a redrive")
    browser.fill("reason", "repaired by hand")
    browser.click("Yes: Force a redrive")
    browser.wait_for("waits for a worker")
    assert row(job).status == "pending"


def test_the_list_is_worked_by_keyboard(anna: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    make_job("pending", kind="demo.gone")
    anna.open(url("changelist"))
    reached = []
    for _ in range(60):
        anna.driver.switch_to.active_element.send_keys(Keys.TAB)
        now = anna.driver.switch_to.active_element
        reached.append(now.get_attribute("name") or now.text)
    assert {"q", "phase", "ids", "act", "demo.gone"} <= set(reached)


def test_a_narrow_screen_and_a_language_from_right_to_left(anna: Browser) -> None:
    job = make_job("failed", kind="demo." + "very_long_" * 18)
    anna.size(NARROW)
    pages = (url("overview"), url("changelist"), url("change", job.pk), url("act", job.pk, "cancel"), url("pause"),
             url("start"), "/admin/durable_jobs/jobevent/")  # fmt: skip
    for language in ("en", "ar"):
        anna.cookie("django_language", language)
        for page in pages:
            anna.open(page)
            assert not anna.is_too_wide(), (language, page)
            assert not anna.complaints(), (language, page)
    assert anna.driver.find_element(By.TAG_NAME, "html").get_attribute("dir") == "rtl"


def test_hostile_values_do_nothing_in_a_browser(anna: Browser) -> None:
    from tests.admin.test_acts import HOSTILE

    job = make_job(
        "failed", kind=HOSTILE[:150], input={HOSTILE: HOSTILE}, subject_type="a.b", subject_id=HOSTILE
    )
    change(job, error_type=HOSTILE, error_message=HOSTILE, queue_name=HOSTILE, progress_message=HOSTILE)
    service.pause(queue=HOSTILE, reason=HOSTILE, actor=HOSTILE)
    for page in (
        url("overview"),
        url("changelist"),
        url("change", job.pk),
        url("act", job.pk, "cancel"),
        "/admin/durable_jobs/pause/",
    ):
        anna.open(page)
        assert "<script>alert(1)</script>" in anna.text, page
        assert not anna.all("img[onerror]") and not anna.complaints(), page


def test_login_leads_back(browser: Browser) -> None:
    User.objects.create_superuser("root", password="pass")
    browser.open(url("overview"))
    browser.fill("username", "root")
    browser.fill("password", "pass")
    browser.driver.find_element(By.CSS_SELECTOR, "[type=submit]").click()
    browser.wait_for("Is it moving?")
