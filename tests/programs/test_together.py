"""All five programs, with real workers: one is killed in the middle, another finishes."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.core.files.base import ContentFile

from durable_jobs import service
from durable_jobs.models import Job
from tests.processes import Process, Processes
from tests.programs.conftest import Answer, Asked, Server
from tests.programs.imports.jobs import start_import
from tests.programs.imports.models import ImportRun, Product, Supplier
from tests.programs.mailings.jobs import start_mailing
from tests.programs.mailings.models import Mail, Mailing
from tests.programs.orders.jobs import start_sync
from tests.programs.orders.models import Order
from tests.programs.people.jobs import BackfillEmail
from tests.programs.people.models import Person
from tests.programs.reports.jobs import YearReport

SETTINGS = {"GRACE": 0.3, "TICK": 0.3}
WORKER = """
import sys
from django.conf import settings
from django.core.management import call_command
from durable_jobs import kinds

settings.MEDIA_ROOT, settings.MAIL_API_URL, settings.ORDERS_API_URL = sys.argv[1:]
settings.ORDERS_API_TOKEN = "good"
for kind in kinds.all_kinds():
    type(kind).lease_seconds = 1.5
    if kind.name in ("imports.csv", "people.backfill_email"):
        type(kind).batch_size = 5
call_command("runworker", "--until-idle", "--concurrency=3")
"""


def test_a_killed_worker_leaves_its_successor_nothing_to_repeat(
    processes: Processes,
    transactional_db: None,
    serve: Callable[[Any], Server],
    settings: Any,
    tmp_path: Path,
) -> None:
    settings.MEDIA_ROOT = str(tmp_path)
    mailed: Counter[str] = Counter()
    workers: list[Process] = []

    def provider(asked: Asked) -> Answer:
        mailed[asked.headers["Idempotency-Key"]] += 1
        if len(mailed) == 40 and len(workers) == 1 and workers[0].running:
            os.kill(workers[0].pid, signal.SIGKILL)
        return Answer()

    def shop(asked: Asked) -> Answer:
        page = int(asked.query.get("cursor", 0))
        orders = [{"id": f"O{page}-{n}", "total": "1.00"} for n in range(5)]
        return Answer(body=json.dumps({"orders": orders, "next": page + 1 if page < 5 else None}).encode())

    run = ImportRun.objects.create(
        supplier=Supplier.objects.create(name="Acme"),
        file=ContentFile(
            "sku,name,price\n" + "\n".join(f"A{n},Name,{n}.10" for n in range(400)), name="prices.csv"
        ),
    )
    mailing = Mailing.objects.create(subject="News", text="It works.")
    Mail.objects.bulk_create(Mail(mailing=mailing, address=f"p{n}@x.example") for n in range(60))
    Person.objects.bulk_create(Person(email=f"P{n}@x.example") for n in range(60))
    jobs = [start_import(run), start_mailing(mailing), start_sync()]
    jobs += [service.start(BackfillEmail), service.start(YearReport, {"year": 2026})]
    addresses = [str(tmp_path), serve(provider).url, serve(shop).url]

    workers.append(processes.python(WORKER, *addresses, settings=SETTINGS))
    assert workers[0].wait() == -9, workers[0].output
    assert Job.objects.filter(status="running").exists()
    workers.append(processes.python(WORKER, *addresses, settings=SETTINGS))
    assert workers[1].wait() == 0, workers[1].output

    assert {Job.objects.get(pk=job.pk).status for job, _ in jobs} == {"completed"}
    run.refresh_from_db()
    assert (run.status, run.rows_done, Product.objects.count()) == ("done", 400, 400)
    assert set(Mail.objects.values_list("state", flat=True)) == {"sent"}
    assert (len(mailed), sum(mailed.values())) == (60, 61)
    assert not Person.objects.filter(email_normalized=None).exists()
    assert Order.objects.count() == 30
