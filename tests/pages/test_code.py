"""The code of each page does what the page says."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.test import TestCase

from durable_jobs import service, signals
from durable_jobs.models import Job
from durable_jobs.service import ALL_SCOPES, Scope
from durable_jobs.testing import finish, kill_after, make_job
from tests.pages.conftest import PYTHON, Page, text_of
from tests.pages.shop.models import Export, Order, Product
from tests.postgres import ROOT

OF_THEIR_OWN = {
    "django_tasks": "tests/tasks/test_docs.py",
    "monitoring": "tests/test_monitoring.py",
    "programs": "tests/programs/test_documentation.py",
    "receipts": "tests/receipts/test_docs.py",
    "tutorial": "tests/tutorial.py",
}
"""Pages all of whose Python is run by other tests than those of this folder."""


def test_the_mirror_of_the_page_follows_its_job(page: Page) -> None:
    names = page("hooks")
    Product.objects.bulk_create(Product() for _ in range(700))
    export = Export.objects.create()
    job = finish(names["start_export"](export).job)
    export.refresh_from_db()
    assert (job.status, export.status, export.rows) == ("completed", "done", 700)
    other = Export.objects.create()
    service.cancel(names["start_export"](other).job.id)
    other.refresh_from_db()
    assert other.status == "cancelled"


def test_the_hooks_of_the_page_follow_their_job(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    names = page("hooks")
    order = Order.objects.create(state="charging")
    told: list[int] = []
    monkeypatch.setitem(names, "notify", told.append)

    def refused(amount: Any, idempotency_key: str) -> None:
        raise ConnectionError("the provider is away")

    monkeypatch.setitem(names, "charge", refused)
    with TestCase.captureOnCommitCallbacks(execute=True):
        job = finish(service.start("shop.charge", {"order": order.pk}).job)
    order.refresh_from_db()
    assert (job.status, order.state) == ("failed", "open") and "the provider is away" in order.problem
    keys: list[str] = []
    monkeypatch.setitem(names, "charge", lambda amount, idempotency_key: keys.append(idempotency_key))
    service.redrive(job.id)
    order.refresh_from_db()
    assert (order.state, order.problem) == ("charging", "")
    finish(job)
    order.refresh_from_db()
    assert order.state == "paid" and len(keys) == 1 and order.pk in told


def test_the_job_that_must_follow_exists_exactly_if_the_end_does(page: Page) -> None:
    page("hooks")
    order = Order.objects.create()
    finish(service.start("shop.ship", {"order": order.pk}).job)
    follower = Job.objects.get(kind="shop.charge")
    assert follower.idempotency_key == f"charge:{order.pk}"


def test_the_keys_of_the_page_hold(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    names = page("keys")
    assert capsys.readouterr().out.strip() == str(Job.objects.get(lock_key="prices").id)
    job = service.start("shop.invoice", {"lines": [1, 2, 3]}).job
    finish(job)
    first = dict(names["sent"])
    assert sorted(first.values()) == [1, 2, 3]
    finish(service.start("shop.invoice", {"lines": [1]}).job)
    assert len(names["sent"]) == 4


def test_the_scopes_of_the_page_keep_tenants_apart(page: Page) -> None:
    names = page("tenants")
    request = SimpleNamespace(user=AnonymousUser())
    assert names["scope_of"](request) is None
    profile = SimpleNamespace(tenant="acme", operated_tenants=["acme", "dune"])
    user = SimpleNamespace(is_authenticated=True, is_superuser=False, profile=profile)
    assert names["scope_of"](SimpleNamespace(user=user)) == Scope("acme")
    assert names["scopes_of"](SimpleNamespace(user=user)) == [Scope("acme"), Scope("dune")]
    user.is_superuser = True
    assert names["scopes_of"](SimpleNamespace(user=user)) is ALL_SCOPES


def test_the_kinds_of_a_deploy_take_over_what_the_old_ones_left(page: Page) -> None:
    page("deploys")
    Product.objects.bulk_create(Product() for _ in range(3))
    old = make_job(kind="shop.reprice_all")
    assert finish(old).status == "completed"
    assert finish(service.start("shop.reindex").job).status == "completed"


def test_the_parts_of_a_backfill_cover_every_row_once(page: Page) -> None:
    names = page("backfill")
    Product.objects.bulk_create(Product(cost=number) for number in range(40))
    with kill_after(1):
        started = names["start_backfill"](3)
        for one in started:
            finish(one.job)
    assert [one.created for one in names["start_backfill"](3)] == [False] * 3
    assert all(product.price == product.cost * 2 for product in Product.objects.all())


def test_the_calls_of_the_service_page_work(page: Page) -> None:
    names = page("service")
    assert names["created"]
    assert names["phase"] and names["explain"]


def test_the_receiver_of_the_page_hears_failures(page: Page) -> None:
    names = page("events")
    job = make_job("failed", kind="shop.reprice")
    try:
        signals.send(signals.job_failed, job)
        assert names["failures"] == [("shop.reprice", None)]
    finally:
        signals.job_failed.disconnect(names["tell_somebody"], sender="shop.reprice")


@pytest.mark.parametrize(
    "name",
    [
        "test_an_order_is_priced",
        "test_a_view_starts_it",
        "test_a_deploy_in_the_middle_changes_nothing",
        "test_a_worker_that_wakes_up_late_writes_nothing",
    ],
)
def test_the_tests_of_the_testing_page_pass(page: Page, name: str) -> None:
    page("testing")[name]()


@pytest.mark.parametrize(
    "name",
    ["test_wherever_it_dies_every_product_is_there_once", "test_the_provider_sees_each_message_once"],
)
@pytest.mark.django_db(transaction=True)
def test_the_crash_tests_of_the_testing_page_pass(page: Page, name: str) -> None:
    page("testing")[name]()


def test_every_test_of_the_testing_page_is_run(page: Page) -> None:
    here = (ROOT / "tests/pages/test_code.py").read_text()
    told = [name for name in page("testing") if name.startswith("test_")]
    assert told and [name for name in told if f'"{name}"' not in here] == []


def test_the_job_that_was_a_task_goes_on_where_it_was(page: Page) -> None:
    products = Product.objects.bulk_create([Product(price=100) for _ in range(250)])
    names = page("celery")
    job = names["reprice"](3)
    with kill_after(1):
        ended = finish(job)
    assert ended.status == "completed" and ended.redrives > 0
    assert set(
        Product.objects.filter(pk__in=[one.pk for one in products]).values_list("price", flat=True)
    ) == {103}


def test_every_page_with_code_is_run() -> None:
    code = "".join(path.read_text() for path in (ROOT / "tests" / "pages").glob("test_*.py"))
    here = set(re.findall(r'page\("(\w+)"', code))
    pages = ["README", "CONTRIBUTING", *(path.stem for path in (ROOT / "docs").glob("*.md"))]
    with_code = {name for name in pages if PYTHON.search(text_of(name))}
    assert with_code == here | set(OF_THEIR_OWN)


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_a_page_that_is_run_elsewhere_is_read_there(name: str) -> None:
    assert f"{name}.md" in (ROOT / OF_THEIR_OWN[name]).read_text()
