"""Metrics, traces and JSON logs as docs/monitoring.md tells them, on a worker that runs."""

from __future__ import annotations

import importlib
import io
import json
import logging
import logging.config
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from django.core.management import CommandError, call_command
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from durable_jobs import kinds, metrics, runner, service, telemetry
from durable_jobs.kinds import Done, Kind, Retry, Yield
from durable_jobs.logs import log
from durable_jobs.testing import finish, make_job, register_for_test
from tests.postgres import ROOT, wait_until
from tests.processes import Processes
from tests.worker_kinds import Quick

PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


class Watched(Kind):
    """Yields once, then is done or fails as its input says."""

    name = "tests.watched"
    retry = Retry(failures=1)

    def step(self, ctx: Any) -> Any:
        if ctx.job.continuation_seq == 0:
            return Yield()
        if ctx.input == "fail":
            raise ValueError("as ordered")
        return Done()


@pytest.fixture
def watched(db: None) -> Iterator[None]:
    before = list(runner.observers)
    with register_for_test(Watched):
        yield
    runner.observers[:] = before


def told(registry: CollectorRegistry) -> dict[str, dict[tuple[str, ...], float]]:
    """What a scrape gets: values by name and labels' values."""
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_the_tables_are_told(watched: None) -> None:
    registry = CollectorRegistry()
    registry.register(metrics.JobsCollector())
    for status in ("pending", "pending", "parked", "retrying", "expired"):
        make_job(status, kind=Watched)
    service.start(Watched, run_after=timedelta(hours=1))
    found = told(registry)
    states = found["durable_jobs_jobs"]
    assert states[("waiting",)] == 2 and states[("scheduled",)] == 1 and states[("parked",)] == 1
    assert states[("retrying",)] == 1 and states[("running",)] == 1
    assert found["durable_jobs_queue_due_jobs"][("default",)] >= 2
    assert found["durable_jobs_queue_oldest_due_seconds"][("default",)] >= 0
    assert found["durable_jobs_queue_workers"][("default",)] == found["durable_jobs_workers"][()] == 0
    assert found["durable_jobs_healthy"][("database",)] == 1 and found["durable_jobs_pauses"][()] == 0


def test_two_scrapes_within_seconds_ask_the_tables_once(
    watched: None, django_assert_num_queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    with django_assert_num_queries(0):
        registry.register(metrics.JobsCollector())
    first = told(registry)
    make_job(kind=Watched)
    with django_assert_num_queries(0):
        assert told(registry) == first
    monkeypatch.setattr(metrics, "FRESH", 0.0)
    assert told(registry)["durable_jobs_jobs"][("waiting",)] == 1


def test_slices_are_counted_by_outcome(watched: None) -> None:
    registry = CollectorRegistry()
    metrics.observe(registry)
    finish(service.start(Watched).job)
    finish(service.start(Watched, "fail").job)
    found = told(registry)
    slices = found["durable_jobs_slices_total"]
    assert slices == {
        ("tests.watched", "yielded"): 2,
        ("tests.watched", "completed"): 1,
        ("tests.watched", "failed"): 1,
    }
    assert found["durable_jobs_slice_seconds_count"] == {("tests.watched",): 4}
    assert found["durable_jobs_slices_running"] == {("tests.watched",): 0}


def test_the_page_and_the_dashboard_name_the_metrics_that_there_are(watched: None) -> None:
    registry = CollectorRegistry()
    registry.register(metrics.JobsCollector())
    metrics.observe(registry)
    finish(service.start(Watched).job)
    service.start(Watched)
    found = set(told(registry))
    named = set(re.findall(r"^\| `(durable_jobs_\w+)`", PAGE, re.MULTILINE))
    assert named == {
        re.sub(r"_(bucket|count|sum)$", "", name) for name in found if not name.endswith("_created")
    }
    dashboard = (ROOT / "docs" / "grafana.json").read_text(encoding="utf-8")
    used = set(re.findall(r"durable_jobs_\w+", " ".join(_expressions(json.loads(dashboard)))))
    alerted = set(re.findall(r"durable_jobs_\w+", "".join(re.findall(r"expr: (.*)", PAGE))))
    assert used and alerted and used | alerted <= found


def _expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.django_db(transaction=True)
def test_every_process_of_a_supervisor_answers_prometheus(processes: Processes) -> None:
    port = free_ports(2)
    addresses = [f"http://127.0.0.1:{number}/metrics" for number in (port, port + 1)]
    worker = processes.manage(
        "runworker",
        "--processes",
        "2",
        "--metrics",
        str(port),
        settings={"DISCOVER": ["worker_kinds"], "POLL": 0.1},
    )
    wait_until(lambda: all(map(_answers, addresses)) or not worker.running, 40, "no answer")
    with register_for_test(Quick):
        jobs = [service.start(Quick, number).job for number in range(6)]

    def counted() -> float:
        scrapes = [parsed(_read(address)).get("durable_jobs_slices_total", {}) for address in addresses]
        return sum(scrape.get((Quick.name, "completed"), 0) for scrape in scrapes)

    wait_until(lambda: counted() == len(jobs), 15, "not all were counted")
    assert all(parsed(_read(address))["durable_jobs_healthy"][("database",)] == 1 for address in addresses)
    worker.terminate()
    assert worker.wait() == 0


def _answers(address: str) -> bool:
    try:
        return bool(_read(address))
    except (URLError, ConnectionError):
        return False


def _read(address: str) -> str:
    with urlopen(address, timeout=10) as answer:
        return str(answer.read().decode())


def free_ports(number: int) -> int:
    """The first of so many free ports, in the range that no outgoing connection takes."""
    for first in range(20_000, 30_000, number):
        with ExitStack() as bound:
            try:
                for port in range(first, first + number):
                    bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def test_a_port_that_is_taken_is_said(db: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=rf"no free one at 127.0.0.1, port {port}.*Name another"):
            call_command("runworker", metrics=("127.0.0.1", port), until_idle=True)


@pytest.mark.parametrize("text", ["x", "0", "70000", "127.0.0.1:", ":-1"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="metrics"):
        call_command("runworker", "--metrics", text)


def test_without_the_client_the_extra_is_named(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "durable_jobs.metrics")
    package = importlib.import_module("durable_jobs")
    monkeypatch.delattr(package, "metrics")
    with pytest.raises(CommandError, match=r"durable-jobs\[prometheus\]"):
        call_command("runworker", "--metrics", "9808")


@pytest.fixture
def spans(watched: None) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    end = telemetry.instrument(provider)
    yield exporter
    end()


def test_each_slice_has_a_span_that_leads_to_its_start(spans: InMemorySpanExporter) -> None:
    with TracerProvider().get_tracer("site").start_as_current_span("request") as request:
        job = service.start(Watched, meta={"page": "7", **telemetry.carried()}).job
    finish(job)
    first, last = spans.get_finished_spans()
    assert [span.name for span in (first, last)] == ["slice tests.watched"] * 2
    assert first.attributes and last.attributes
    assert first.attributes["durable_jobs.job.id"] == str(job.id)
    assert first.attributes["durable_jobs.outcome"] == "yielded"
    assert last.attributes["durable_jobs.outcome"] == "completed"
    assert first.links[0].context.trace_id == request.get_span_context().trace_id
    assert first.context and first.context.trace_id != request.get_span_context().trace_id
    assert first.status.status_code is StatusCode.UNSET


def test_a_failed_slice_has_its_error_on_the_span(spans: InMemorySpanExporter) -> None:
    finish(service.start(Watched, "fail", meta={"traceparent": "nonsense"}).job)
    span = spans.get_finished_spans()[-1]
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "as ordered"
    assert [event.name for event in span.events] == ["exception"] and not span.links


def test_the_logging_of_the_page_gives_one_object_a_line(db: None) -> None:
    (block,) = [block for block in BLOCKS if "LOGGING" in block]
    names: dict[str, Any] = {}
    exec(block, names)
    package = logging.getLogger("durable_jobs")
    before = package.handlers[:], package.level, package.propagate
    stream = io.StringIO()
    names["LOGGING"]["handlers"]["stderr"]["stream"] = stream
    try:
        logging.config.dictConfig(names["LOGGING"])
        log("slice_failed", make_job(), failures=2, error_type="ValueError")
    finally:
        package.handlers[:], package.level, package.propagate = before
    line = json.loads(stream.getvalue())
    assert line["event"] == "slice_failed" and line["failures"] == 2 and line["kind"] == "tests.made"


def test_the_page_s_other_code_runs(watched: None) -> None:
    registry = CollectorRegistry()
    code = next(block for block in BLOCKS if "JobsCollector" in block)
    exec(code.replace("from prometheus_client import REGISTRY\n", ""), {"REGISTRY": registry})
    assert "durable_jobs_jobs" in told(registry)
    before = len(runner.observers)
    exec(next(block for block in BLOCKS if "telemetry.instrument()" in block), {})
    assert len(runner.observers) == before + 1


def test_the_events_worth_a_search_are_logged_somewhere() -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith("Worth a search"))
    code = "".join(path.read_text() for path in Path(kinds.__file__).parent.glob("**/*.py"))
    assert all(f'"{event}"' in code for event in re.findall(r"`(\w+)`", line))
