"""One named event per branch: the name and the facts as fields of the record, and in a readable line."""

from __future__ import annotations

import logging
from typing import Any

_TAKEN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "event"}
"""Attributes that a record has of its own, which logging refuses: a fact of such a name gets an underscore."""

_logger = logging.getLogger("durable_jobs.jobs")


def tell(
    logger: logging.Logger,
    level: int,
    event: str,
    sentence: str = "",
    *,
    error: BaseException | None = None,
    **facts: Any,
) -> None:
    """Log `event` with `facts`; each fact is a field of the record (`record.job_id`), `event` is one too.

    `error` adds its traceback.
    """
    if not logger.isEnabledFor(level):
        return
    facts = {f"{name}_" if name in _TAKEN else name: value for name, value in facts.items()}
    fields = {name: value if isinstance(value, int | float) else str(value) for name, value in facts.items()}
    words = [event, *(f"{name}={value}" for name, value in fields.items())]
    text = " ".join(words) + (f": {sentence}" if sentence else "")
    logger.log(level, "%s", text, exc_info=error, extra={"event": event, **fields})


def log(
    event: str,
    job: Any = None,
    *,
    level: int = logging.INFO,
    error: BaseException | None = None,
    **facts: Any,
) -> None:
    """`tell` with a job's id and kind among the facts; facts that are None or empty are left out."""
    if not _logger.isEnabledFor(level):
        return
    if job is not None:
        facts = {"job_id": job.id, "kind": job.kind, **facts}
    given = {name: value for name, value in facts.items() if value is not None and value != ""}
    tell(_logger, level, event, error=error, **given)
