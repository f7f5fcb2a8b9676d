"""C059: a job exists exactly if what started it has committed, wherever that was."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import TestCase

from durable_jobs import service
from durable_jobs.models import Job
from durable_jobs.testing import run_until_idle
from tests.connections import OtherConnection
from tests.slices import made


@pytest.fixture
def kind(registry: None) -> str:
    made()
    return "tests.made"


def elsewhere(other: OtherConnection) -> int:
    """How many jobs another connection sees."""
    return other.run(Job.objects.count)


@pytest.mark.django_db(transaction=True)
class TestWithRealTransactions:
    def test_without_a_transaction_it_is_there_at_once(
        self, kind: str, second_connection: OtherConnection
    ) -> None:
        service.start(kind)
        assert elsewhere(second_connection) == 1

    def test_in_a_block_it_is_there_with_the_commit_of_the_outermost(
        self, kind: str, second_connection: OtherConnection
    ) -> None:
        with transaction.atomic():
            with transaction.atomic():
                service.start(kind)
            assert elsewhere(second_connection) == 0
        assert elsewhere(second_connection) == 1

    @pytest.mark.parametrize("where", ["the outer block", "the inner block"])
    def test_in_a_block_that_fails_it_never_was(
        self, kind: str, second_connection: OtherConnection, where: str
    ) -> None:
        with pytest.raises(KeyError), transaction.atomic():
            if where == "the inner block":
                with pytest.raises(KeyError), transaction.atomic():
                    service.start(kind)
                    raise KeyError
            else:
                with transaction.atomic():
                    service.start(kind)
            raise KeyError
        assert elsewhere(second_connection) == 0
        assert run_until_idle() == []

    def test_a_command_starts_it(self, kind: str, second_connection: OtherConnection) -> None:
        call_command("durable_jobs", "start", kind, verbosity=0)
        assert elsewhere(second_connection) == 1

    @pytest.mark.parametrize("fails", [False, True])
    def test_under_atomic_requests_it_is_there_if_the_view_ends_well(
        self, kind: str, second_connection: OtherConnection, fails: bool
    ) -> None:
        def view(request: Any) -> HttpResponse:
            service.start(kind)
            if fails:
                raise KeyError
            return HttpResponse()

        request = transaction.atomic(view)
        if fails:
            with pytest.raises(KeyError):
                request(HttpRequest())
        else:
            request(HttpRequest())
        assert elsewhere(second_connection) == (0 if fails else 1)

    def test_an_async_view_starts_it_through_a_thread(
        self, kind: str, second_connection: OtherConnection
    ) -> None:
        def start() -> None:
            try:
                with transaction.atomic():
                    service.start(kind)
            finally:
                connections.close_all()

        async def view() -> None:
            await sync_to_async(start, thread_sensitive=False)()

        asyncio.run(view())
        assert elsewhere(second_connection) == 1
        assert [job.status for job in run_until_idle()] == ["completed"]


@pytest.mark.django_db
def test_in_a_testcase_it_is_there_and_can_be_run(kind: str) -> None:
    """No commit ever comes; the row is there in the same transaction."""
    with TestCase.captureOnCommitCallbacks(execute=True):
        service.start(kind)
        assert Job.objects.count() == 1
        assert [job.status for job in run_until_idle()] == ["completed"]
