"""A span for each slice, for OpenTelemetry (extra `otel`: its API; the project brings SDK and exporter)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import propagate, trace

from durable_jobs import __version__, runner
from durable_jobs.kinds import Kind
from durable_jobs.models import Job
from durable_jobs.runner import Outcome, SliceResult

TRACEPARENT = "traceparent"
"""The label under which a job keeps who started it: a header as W3C's Trace Context defines it."""


def instrument(tracer_provider: trace.TracerProvider | None = None) -> Callable[[], None]:
    """Make a span of every slice of this process from now on; call what it returns to end that.

    The span is named `slice` and the kind, of kind CONSUMER, with `durable_jobs.job.id`, `.kind`, `.queue`,
    `.tenant`, `.attempt`, `.continuation` and `.outcome`, and a link to the trace in which the job was started
    (`carried`). A failed slice sets the status to error, with the step's exception.
    """
    tracer = trace.get_tracer("durable_jobs", __version__, tracer_provider)

    @contextmanager
    def span_of_slice(kind: Kind, job: Job) -> Iterator[Callable[[SliceResult], None]]:
        attributes: dict[str, Any] = {
            "durable_jobs.job.id": str(job.id),
            "durable_jobs.job.kind": kind.name,
            "durable_jobs.job.queue": job.queue_name,
            "durable_jobs.job.tenant": job.tenant_id,
            "durable_jobs.job.attempt": job.attempts,
            "durable_jobs.job.continuation": job.continuation_seq,
        }
        links = _links(job)
        with tracer.start_as_current_span(
            f"slice {kind.name}", kind=trace.SpanKind.CONSUMER, attributes=attributes, links=links
        ) as span:

            def end(result: SliceResult) -> None:
                span.set_attribute("durable_jobs.outcome", result.outcome.value)
                if result.error is not None:
                    span.record_exception(result.error)
                if result.outcome is Outcome.FAILED or result.error is not None:
                    span.set_status(trace.StatusCode.ERROR, str(result.error or ""))

            yield end

    runner.observers.append(span_of_slice)
    return lambda: runner.observers.remove(span_of_slice)


def carried() -> dict[str, str]:
    """Labels that carry the current trace: `service.start(…, meta=telemetry.carried())`."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


def _links(job: Job) -> list[trace.Link]:
    meta = job.meta if isinstance(job.meta, dict) else {}
    if not isinstance(meta.get(TRACEPARENT), str):
        return []
    texts = {name: value for name, value in meta.items() if isinstance(value, str)}
    context = trace.get_current_span(propagate.extract(texts)).get_span_context()
    return [trace.Link(context)] if context.is_valid else []
