"""One database from one URL, with the options that jobs need on SQLite."""

from typing import Any

import environ


def database(url: str, *, synchronous: str = "FULL") -> dict[str, Any]:
    """The entry for ``DATABASES`` that `url` describes.

    On SQLite: write transactions take their lock when they begin (a transaction that reads first and writes
    later fails at once when another has written in between), the write-ahead log lets readers go on beside a
    writer, and `synchronous` says whether a commit survives a power cut (FULL) or only a crash of the process
    (NORMAL, OFF).
    """
    settings: dict[str, Any] = environ.Env.db_url_config(url)
    if settings["ENGINE"] == "django.db.backends.sqlite3":
        settings.setdefault("OPTIONS", {}).update(
            transaction_mode="IMMEDIATE",
            timeout=20,
            init_command=f"PRAGMA journal_mode=WAL; PRAGMA synchronous={synchronous};",
        )
    return settings
