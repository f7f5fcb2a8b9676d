"""The Celery app of the tests, in the tests themselves and in the workers that they start."""

from __future__ import annotations

import json
import os

from celery import Celery

BROKER, OPTIONS = "DURABLE_JOBS_TEST_BROKER", "DURABLE_JOBS_TEST_BROKER_OPTIONS"

app = Celery("tests", set_as_current=True)
app.conf.update(
    broker_url=os.environ.get(BROKER, "redis://127.0.0.1:1/0"),
    broker_transport_options=json.loads(os.environ.get(OPTIONS, "{}")),
    broker_connection_retry_on_startup=True,
    broker_connection_retry=True,
    task_default_queue="tests",
    task_reject_on_worker_lost="DURABLE_JOBS_TEST_REJECT" in os.environ,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
)
