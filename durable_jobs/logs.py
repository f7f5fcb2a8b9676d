"""One named log event per branch, with the job's ids as fields of the record."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("durable_jobs")


def log(
    event: str, job: Any = None, *, level: int = logging.INFO, exc_info: Any = None, **fields: Any
) -> None:
    """Log `event`, readable as text, with `event`, `job_id`, `kind` and `fields` on the record."""
    if not logger.isEnabledFor(level):
        return
    if job is not None:
        fields = {"job_id": str(job.id), "kind": job.kind, **fields}
    text = " ".join(f"{name}={value}" for name, value in fields.items() if value not in (None, ""))
    # Names of the record's own attributes are taken.
    extra = {
        f"{name}_" if name in ("name", "message", "args") else name: value for name, value in fields.items()
    }
    logger.log(level, "%s %s", event, text, extra={"event": event, **extra}, exc_info=exc_info)
