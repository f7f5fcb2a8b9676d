"""The act that does the work: `worker`, also known as `manage.py runworker`."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from typing import Any, Final

from django.core.management.base import CommandError

from durable_jobs import database, kinds, store
from durable_jobs.conf import MANUAL_QUEUE
from durable_jobs.logs import tell
from durable_jobs.management import arguments
from durable_jobs.management.acts import Act
from durable_jobs.management.output import Output
from durable_jobs.supervisor import Line, Supervisor, drain_on_change
from durable_jobs.worker import DEFAULT_CONCURRENCY, Worker, leave

MOST_THREADS: Final = 256
MOST_PROCESSES: Final = 64


class Work(Act):
    name = "worker"
    help = "Run durable jobs until stopped."
    epilog = """\
SIGTERM or SIGINT drains: no more claims, running slices are asked to yield at their next boundary, and what
was claimed but not begun goes back. A second signal (half a second later or more) leaves at once.

With --processes this process starts the workers, each an interpreter of its own, and starts another in place of
one that ends: at once, then with growing delays. What a process held that was killed is repaired at once. When
it is killed itself, its workers drain. A first worker that cannot begin ends it all, with that worker's code.

exit codes: 0 drained, or idle with --until-idle; 1 slices still ran when the drain timeout was over;
3 the tables are missing, migrate first; 4 the database does not answer at the start; 70 given up, as processes
ended again and again (--processes); 75 every thread hangs in a step, start a new process; 130 and 143 a second
SIGINT or SIGTERM.
"""
    has_json = False
    has_checks = True
    shows_log = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--queues", type=_names, metavar="Q,Q", help="queues to work on, as a,b (default: all)"
        )
        parser.add_argument(
            "--kinds", type=_names, metavar="K,K", help="kinds to work on, as a,b (default: all registered)"
        )
        parser.add_argument(
            "--concurrency",
            type=arguments.whole(1, MOST_THREADS),
            metavar="N",
            default=DEFAULT_CONCURRENCY,
            help=f"slices that run at a time, 1 to {MOST_THREADS} (default: {DEFAULT_CONCURRENCY})",
        )
        parser.add_argument(
            "--processes",
            type=arguments.whole(1, MOST_PROCESSES),
            metavar="N",
            help=(
                f"start N such workers, 1 to {MOST_PROCESSES}, and replace those that end (default: this process is"
                " the worker)"
            ),
        )
        parser.add_argument(
            "--reload",
            action="store_true",
            help="drain and start again when the project's code changes; for development only",
        )
        parser.add_argument(
            "--drain-timeout",
            type=arguments.seconds,
            metavar="SECONDS",
            help=(
                "seconds that a drain waits for running slices (default: DURABLE_JOBS['DRAIN_TIMEOUT'], here"
                f" {arguments.here('DRAIN_TIMEOUT')})"
            ),
        )
        parser.add_argument(
            "--until-idle",
            action="store_true",
            help="end when nothing is due, running or waiting for a retry (what is scheduled for later may stay)",
        )
        parser.add_argument(
            "--metrics",
            type=_address,
            metavar="[HOST:]PORT",
            help=(
                "answer Prometheus there; with --processes each process at the next port (default host: 127.0.0.1; "
                "needs the extra prometheus)"
            ),
        )

    def run(self, options: dict[str, Any], out: Output) -> int:
        log_to_stderr_by_default(options["verbosity"])
        _refuse_unknown(options["queues"], options["kinds"])
        line = Line.of_this_process()
        if line is None and (options["processes"] or options["reload"]):
            return _supervise(options)
        if options["metrics"]:
            host, port = options["metrics"]
            serve_metrics(host, port, options["processes"] or 1)
        worker = Worker(
            queues=options["queues"],
            kinds=options["kinds"],
            concurrency=options["concurrency"],
            until_idle=options["until_idle"],
            drain_timeout=options["drain_timeout"],
            begun=line.ready if line is not None else None,
        )
        if line is not None:
            line.attach(worker)
            if options["reload"]:
                drain_on_change(worker)
        leave(worker, worker.run())


def _supervise(options: dict[str, Any]) -> int:
    if threading.current_thread() is not threading.main_thread():
        raise CommandError("--processes and --reload need the main thread, which alone gets signals.")
    return Supervisor(
        options["processes"] or 1,
        until_idle=options["until_idle"],
        drain_timeout=options["drain_timeout"],
        reloading=options["reload"],
    ).run()


def _refuse_unknown(queues: list[str] | None, chosen: list[str] | None) -> None:
    unknown = sorted(set(chosen or ()) - set(kinds.names()))
    if unknown:
        raise CommandError(
            f"No kind is called {_quoted(unknown)}. Registered kinds: {_quoted(kinds.names()) or 'none'}."
        )
    if MANUAL_QUEUE in (queues or ()):
        raise CommandError(f"The queue {MANUAL_QUEUE!r} is reserved: workers leave it alone.")
    known = {kind.queue for kind in kinds.all_kinds()}
    if set(queues or ()) <= known:
        return
    unknown = sorted(set(queues or ()) - known - _queues_with_rows())
    if unknown:
        raise CommandError(
            f"No kind and no waiting job has the queue {_quoted(unknown)}. Known queues:"
            f" {_quoted(sorted(known | _queues_with_rows())) or 'none'}."
        )


def _queues_with_rows() -> set[str]:
    """Jobs may be started on a queue that no kind names."""
    try:
        return {route.queue for route in store.routes()} - {MANUAL_QUEUE}
    except Exception:
        # No table or no database: the worker says so itself.
        database.connection().close()
        return set()


def serve_metrics(host: str, port: int, processes: int) -> None:
    """Answer Prometheus at the first free one of as many ports as there are processes."""
    try:
        from durable_jobs import metrics
    except ImportError as error:
        raise CommandError(
            f"--metrics needs the package prometheus-client ({error}): pip install 'durable-jobs[prometheus]'"
        ) from error
    last = port + processes - 1
    try:
        served = metrics.serve(host, range(port, last + 1))
    except OSError as error:
        ports = f"ports {port} to {last}" if processes > 1 else f"port {port}"
        raise CommandError(f"--metrics: no free one at {host}, {ports}: {error}. Name another.") from error
    tell(logging.getLogger("durable_jobs.worker"), logging.INFO, "metrics_served", host=host, port=served)


def log_to_stderr_by_default(verbosity: int) -> None:
    """Show the package's log on stderr, unless the project has configured a handler that gets it."""
    package = logging.getLogger("durable_jobs")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    package.addHandler(handler)
    if package.level == logging.NOTSET:
        package.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("give at least one name, several as a,b")
    return names


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]") or "127.0.0.1", _port(port)


_port = arguments.whole(1, 65_535 - MOST_PROCESSES)


def _quoted(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)
