"""Program (b): a paginated API, its 429, its 401."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from durable_jobs import service, store
from durable_jobs.exceptions import ForceRequired
from durable_jobs.models import Job
from durable_jobs.runner import Outcome
from durable_jobs.testing import finish, interrupt_after, kill_after, run, run_slice
from tests.programs.conftest import Answer, Asked, Server
from tests.programs.orders.jobs import SyncOrders, start_sync
from tests.programs.orders.models import Order

PAGES, PER_PAGE = 5, 10
KEY = "good"


class Shop:
    """Gives its orders a page at a time; `refusals` are given first."""

    def __init__(self) -> None:
        self.pages = [
            [{"id": f"O{number}", "total": f"{number}.50"} for number in range(first, first + PER_PAGE)]
            for first in range(0, PAGES * PER_PAGE, PER_PAGE)
        ]
        self.refusals: list[Answer] = []

    def __call__(self, asked: Asked) -> Answer:
        if asked.headers.get("Authorization") != f"Bearer {KEY}":
            return Answer(401)
        if self.refusals:
            return self.refusals.pop(0)
        page = int(asked.query.get("cursor", 0))
        following = page + 1 if page + 1 < len(self.pages) else None
        return Answer(body=json.dumps({"orders": self.pages[page], "next": following}).encode())


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def server(shop: Shop, serve: Callable[[Any], Server], settings: Any, db: None) -> Server:
    server = serve(shop)
    settings.ORDERS_API_URL, settings.ORDERS_API_TOKEN = server.url, KEY
    return server


def asked_cursors(server: Server) -> list[str | None]:
    return [request.query.get("cursor") for request in server.requests]


def assert_all_there() -> None:
    assert Order.objects.count() == PAGES * PER_PAGE
    assert Order.objects.get(ref="O49").total == Decimal("49.50")


ALL_CURSORS = [None, "1", "2", "3", "4"]


def test_every_page_is_fetched_once(server: Server) -> None:
    job = finish(start_sync().job)
    assert (job.status, job.processed_count) == ("completed", 50)
    assert asked_cursors(server) == ALL_CURSORS
    assert_all_there()


@pytest.mark.parametrize("block", [interrupt_after, kill_after])
def test_stopped_after_each_page_it_fetches_none_twice(server: Server, block: Any) -> None:
    """The last slice finds everything done, and asks the provider nothing more."""
    with block(1):
        job = run(SyncOrders)
    assert (job.status, job.processed_count) == ("completed", 50)
    assert asked_cursors(server) == ALL_CURSORS
    assert_all_there()


def test_a_429_waits_as_long_as_the_provider_says_and_counts_no_failure(server: Server, shop: Shop) -> None:
    shop.refusals = [Answer(429, headers={"Retry-After": "3600"})]
    job = start_sync().job
    assert run_slice(job).outcome is Outcome.YIELDED
    job = Job.objects.get(pk=job.pk)
    assert job.next_run_at is not None
    assert 3590 < (job.next_run_at - store.now()).total_seconds() <= 3600
    assert (job.status, job.consecutive_failures, job.attempts) == ("pending", 0, 1)
    assert finish(job).status == "completed"
    assert asked_cursors(server) == [None, *ALL_CURSORS]


def test_twenty_429s_do_not_fail_it(server: Server, shop: Shop) -> None:
    shop.refusals = [Answer(429, headers={"Retry-After": "1"})] * 20
    assert run(SyncOrders).status == "completed"


def test_an_error_of_the_provider_is_tried_again(server: Server, shop: Shop) -> None:
    shop.refusals = [Answer(503)] * 7
    job = run(SyncOrders)
    assert job.status == "completed"
    assert job.events.filter(event="slice_failed").count() == 7
    assert_all_there()


def test_a_refused_key_fails_at_once_and_a_redrive_needs_force(server: Server, settings: Any) -> None:
    settings.ORDERS_API_TOKEN = "expired"
    job = run(SyncOrders)
    assert (job.status, job.verdict, len(server.requests)) == ("failed", "unrecoverable", 1)
    with pytest.raises(ForceRequired):
        service.redrive(job.id)
    settings.ORDERS_API_TOKEN = KEY
    assert finish(service.redrive(job.id, force=True)).status == "completed"
    assert_all_there()


def test_a_page_that_cannot_be_stored_fails_the_job_and_a_redrive_goes_on_there(
    server: Server, shop: Shop
) -> None:
    shop.pages[2][3]["total"] = "n/a"
    job = run(SyncOrders)
    assert (job.status, job.consecutive_failures, Order.objects.count()) == ("failed", 8, 20)
    shop.pages[2][3]["total"] = "23.50"
    server.requests.clear()
    assert finish(service.redrive(job.id)).status == "completed"
    assert asked_cursors(server) == ["2", "3", "4"]
    assert_all_there()


def test_from_the_start_it_brings_the_same_orders_up_to_date(server: Server, shop: Shop) -> None:
    shop.pages[4][9]["total"] = "n/a"
    job = run(SyncOrders)
    shop.pages[4][9]["total"] = "49.50"
    shop.pages[0][0]["total"] = "99.00"
    job = finish(service.redrive(job.id, restart=True))
    assert (job.status, job.processed_count) == ("completed", 50)
    assert Order.objects.get(ref="O0").total == 99
    assert_all_there()


def test_a_second_cron_run_gives_the_sync_at_work(server: Server) -> None:
    first, second = start_sync(), start_sync()
    assert (second.created, second.job.id) == (False, first.job.id)
    finish(first.job)
    assert start_sync().created
