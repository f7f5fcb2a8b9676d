"""Program (d): many e-mails through a provider, none of them twice."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from durable_jobs import runner, service, store
from durable_jobs.exceptions import RestartNotAllowed
from durable_jobs.models import Job
from durable_jobs.reconciler import Reconciler
from durable_jobs.runner import Outcome
from durable_jobs.testing import finish, interrupt_after, kill_after, run_slice
from tests.connections import OtherConnection
from tests.processes import Processes
from tests.programs.conftest import Answer, Asked, Server
from tests.programs.mailings.jobs import start_mailing
from tests.programs.mailings.models import Mail, Mailing

MANY, PEOPLE, FEW = 200, 80, 30


class Provider:
    """Sends one mail for each key. `before` may answer in its place; `after` sees what it has sent."""

    def __init__(self) -> None:
        self.keys: Counter[str] = Counter()
        self.mailed: Counter[str] = Counter()
        self.before: Callable[[str], Answer | None] = lambda address: None
        self.after: Callable[[str], None] = lambda address: None

    def __call__(self, asked: Asked) -> Answer:
        key, address = asked.headers["Idempotency-Key"], json.loads(asked.body)["to"]
        refusal = self.before(address)
        if refusal is not None:
            return refusal
        self.keys[key] += 1
        if self.keys[key] == 1:
            self.mailed[address] += 1
        self.after(address)
        return Answer()

    @property
    def asked_again(self) -> int:
        return sum(self.keys.values()) - len(self.keys)

    def assert_once_each(self, people: int = PEOPLE) -> None:
        assert len(self.mailed) == people
        assert set(self.mailed.values()) == {1}


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def server(provider: Provider, serve: Callable[[Any], Server], settings: Any) -> Server:
    server = serve(provider)
    settings.MAIL_API_URL = server.url
    return server


def new_mailing(people: int = PEOPLE) -> Mailing:
    mailing = Mailing.objects.create(subject="News", text="It works.")
    Mail.objects.bulk_create(Mail(mailing=mailing, address=f"p{n}@x.example") for n in range(people))
    return mailing


@pytest.fixture
def mailing(server: Server, db: None) -> Mailing:
    return new_mailing()


def states(mailing: Mailing) -> dict[str, int]:
    return Counter(Mail.objects.filter(mailing=mailing).values_list("state", flat=True))


class TestMailing:
    def test_everybody_is_mailed_once(self, server: Server, db: None, provider: Provider) -> None:
        job = finish(start_mailing(mailing := new_mailing(MANY)).job)
        assert (job.status, job.processed_count, job.total_count) == ("completed", MANY, MANY)
        assert states(mailing) == {"sent": MANY}
        assert provider.asked_again == 0
        provider.assert_once_each(MANY)

    @pytest.mark.parametrize("block", [interrupt_after, kill_after])
    def test_stopped_after_each_commit_it_mails_everybody_once(
        self, server: Server, db: None, provider: Provider, block: Any
    ) -> None:
        with block(1):
            job = finish(start_mailing(new_mailing(FEW)).job)
        assert (job.status, job.processed_count) == ("completed", FEW)
        assert provider.asked_again == 0
        provider.assert_once_each(FEW)

    def test_a_second_start_gives_the_same_job(self, mailing: Mailing, provider: Provider) -> None:
        first = start_mailing(mailing)
        assert start_mailing(mailing) == (first.job, False)
        finish(first.job)
        again = start_mailing(mailing)
        assert (again.created, again.job.status) == (False, "completed")
        provider.assert_once_each()

    def test_a_429_in_the_middle_costs_no_failure_and_nobody_a_second_request(
        self, mailing: Mailing, provider: Provider
    ) -> None:
        asked: list[str] = []

        def before(address: str) -> Answer | None:
            asked.append(address)
            return Answer(429, headers={"Retry-After": "600"}) if len(asked) % 30 == 0 else None

        provider.before = before
        job = start_mailing(mailing).job
        assert run_slice(job).outcome is Outcome.YIELDED
        assert states(mailing) == {"sent": 29, "sending": 1, "queued": PEOPLE - 30}
        job = Job.objects.get(pk=job.pk)
        assert job.next_run_at is not None
        assert 590 < (job.next_run_at - store.now()).total_seconds() <= 600
        job = finish(job)
        assert (job.status, job.processed_count, job.interruptions) == ("completed", PEOPLE, 0)
        assert job.events.filter(event="slice_failed").count() == 0
        assert provider.asked_again == 0
        provider.assert_once_each()

    def test_an_outage_of_the_provider_is_tried_again(self, mailing: Mailing, provider: Provider) -> None:
        failing = [Answer(503)] * 4
        provider.before = lambda address: failing.pop() if address == "p70@x.example" and failing else None
        assert finish(start_mailing(mailing).job).status == "completed"
        assert provider.asked_again == 0
        provider.assert_once_each()

    def test_an_address_that_the_provider_refuses_stops_nobody_elses_mail(
        self, mailing: Mailing, provider: Provider
    ) -> None:
        provider.before = lambda address: Answer(422) if address == "p70@x.example" else None
        job = finish(start_mailing(mailing).job)
        assert (job.status, job.processed_count) == ("completed", PEOPLE)
        assert states(mailing) == {"sent": PEOPLE - 1, "refused": 1}
        assert Mail.objects.get(state="refused").address == "p70@x.example"
        provider.assert_once_each(PEOPLE - 1)

    def test_who_is_added_while_it_runs_is_mailed_too(self, mailing: Mailing, provider: Provider) -> None:
        job = start_mailing(mailing).job
        with interrupt_after(10):
            run_slice(job)
        Mail.objects.create(mailing=mailing, address="late@x.example")
        assert finish(job).status == "completed"
        assert provider.mailed["late@x.example"] == 1
        provider.assert_once_each(PEOPLE + 1)

    def test_from_the_start_is_not_offered(self, mailing: Mailing, provider: Provider) -> None:
        provider.before = lambda address: Answer(500)
        job = finish(start_mailing(mailing).job)
        with pytest.raises(RestartNotAllowed):
            service.redrive(job.id, restart=True)

    def test_a_redrive_goes_on_with_those_who_were_not_mailed(
        self, mailing: Mailing, provider: Provider
    ) -> None:
        provider.before = lambda address: Answer(500) if address == "p70@x.example" else None
        job = finish(start_mailing(mailing).job)
        assert (job.status, sum(provider.mailed.values())) == ("failed", 70)
        provider.before = lambda address: None
        assert finish(service.redrive(job.id)).status == "completed"
        assert provider.asked_again == 0
        provider.assert_once_each()

    def test_a_worker_that_was_taken_for_dead_mails_nobody_twice(
        self,
        transactional_db: None,
        server: Server,
        provider: Provider,
        second_connection: OtherConnection,
    ) -> None:
        """Its own request is under way when another mails everybody; then it ends, quietly."""
        job = start_mailing(mailing := new_mailing()).job
        claimed = store.claim(job.id, 0, 0, "frozen", 60)
        assert isinstance(claimed, Job)

        def taken(address: str) -> None:
            provider.after = lambda address: None
            second_connection.run(Reconciler("tests").repair_dead, "frozen")
            assert second_connection.run(finish, job).status == "completed"

        provider.after = lambda address: taken(address) if address == "p9@x.example" else None
        assert runner.run_slice(claimed, owner="frozen").outcome is Outcome.LEASE_LOST
        assert states(mailing) == {"sent": PEOPLE}
        assert provider.asked_again == 1
        provider.assert_once_each()


class TestKill:
    def test_sigkill_between_sending_and_writing_it_down_mails_nobody_twice(
        self, processes: Processes, transactional_db: None, server: Server, provider: Provider
    ) -> None:
        """The provider has the mail, the database does not know: it is asked again, with the same key."""
        job = start_mailing(mailing := new_mailing(MANY)).job

        def kill(address: str) -> None:
            if len(provider.mailed) == 121:
                os.kill(doomed.pid, signal.SIGKILL)

        provider.after = kill
        doomed = processes.python(WORKER, str(job.id), server.url)
        assert doomed.wait() == -9, doomed.output
        assert states(mailing) == {"sent": 120, "sending": 1, "queued": MANY - 121}
        provider.after = lambda address: None
        assert Reconciler("tests").repair_dead("doomed").redriven == 1
        job = finish(job)
        assert (job.status, job.processed_count) == ("completed", MANY)
        assert provider.asked_again == 1
        provider.assert_once_each(MANY)


WORKER = """
import sys, uuid
from django.conf import settings
from durable_jobs import store
from durable_jobs.runner import run_slice

settings.MAIL_API_URL = sys.argv[2]
run_slice(store.claim(uuid.UUID(sys.argv[1]), 0, 0, "doomed", 60), owner="doomed")
"""
