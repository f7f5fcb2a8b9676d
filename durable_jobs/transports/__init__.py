"""How workers hear that a job is due. The rows decide what happens; a transport only carries identities."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from durable_jobs.conf import config
from durable_jobs.transports.base import BaseTransport, BrokerTransport, Delivery, State

__all__ = ["BaseTransport", "BrokerTransport", "Delivery", "State", "current", "use"]

PATHS: Final = {
    "database": "durable_jobs.transports.database.DatabaseTransport",
    "celery": "durable_jobs.transports.celery.CeleryTransport",
    "memory": "durable_jobs.transports.memory.MemoryTransport",
}

_made: dict[str, BaseTransport] = {}
_used: list[BaseTransport] = []
_guard = threading.Lock()


def current() -> BaseTransport:
    """The transport that `DURABLE_JOBS["TRANSPORT"]` names, made once per process."""
    if _used:
        return _used[-1]
    name = config.TRANSPORT
    with _guard:
        if name not in _made:
            _made[name] = _make(name)
        transport = _made[name]
    if transport.only_with_debug and not settings.DEBUG:
        raise ImproperlyConfigured(
            f"DURABLE_JOBS['TRANSPORT'] is {name!r} and DEBUG is off: its messages are lost with the process. "
            "Use 'database', or 'celery' with a broker."
        )
    return transport


def _make(name: str) -> BaseTransport:
    try:
        made = import_string(PATHS.get(name, name))()
    except ImportError as error:
        known = ", ".join(PATHS)
        raise ImproperlyConfigured(
            f"DURABLE_JOBS['TRANSPORT'] is {name!r} and cannot be loaded: {error}. Known: {known}."
        ) from error
    if not isinstance(made, BaseTransport):
        raise ImproperlyConfigured(
            f"DURABLE_JOBS['TRANSPORT'] is {name!r}, which is no durable_jobs.transports.BaseTransport."
        )
    return made


@contextmanager
def use(transport: BaseTransport) -> Iterator[None]:
    """In this block `transport` is the current one in every thread of this process, whatever the setting says."""
    _used.append(transport)
    try:
        yield
    finally:
        _used.remove(transport)
