"""How workers hear that a job is due. The rows decide what happens; a transport only carries identities."""

from __future__ import annotations

import threading
from typing import Final

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from durable_jobs.conf import config
from durable_jobs.transports.base import BaseTransport, Delivery, State

__all__ = ["BaseTransport", "Delivery", "State", "current"]

PATHS: Final = {
    "database": "durable_jobs.transports.database.DatabaseTransport",
}

_made: dict[str, BaseTransport] = {}
_guard = threading.Lock()


def current() -> BaseTransport:
    """The transport that `DURABLE_JOBS["TRANSPORT"]` names, made once per process."""
    name = config.TRANSPORT
    with _guard:
        if name not in _made:
            try:
                _made[name] = import_string(PATHS[name])()
            except (KeyError, ImportError) as error:
                known = ", ".join(PATHS)
                raise ImproperlyConfigured(
                    f"DURABLE_JOBS['TRANSPORT'] is {name!r} and cannot be loaded: {error}. Known: {known}."
                ) from error
        return _made[name]
