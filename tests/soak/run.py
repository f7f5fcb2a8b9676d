"""One soak: everybody at once, then rest, then the audit."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import InterfaceError, OperationalError, connections, transaction
from django.test import Client

from durable_jobs import database, service
from durable_jobs.exceptions import DurableJobsError, HookFailed
from durable_jobs.models import LIVE, Job
from tests.postgres import Server
from tests.processes import Processes
from tests.soak.checks import Findings, Watch, audit
from tests.soak.crew import Actor, Crew, version
from tests.soak.kinds import KINDS
from tests.soak.models import Order

SETTLE_SECONDS = 120.0
MOST_WAITING = 20
"""More live jobs than this, and no new one arrives until there are fewer: what was taken from a stopped worker soon
is in another one's hands."""
BERTHS = 6
"""Lock keys, which a fifth of the jobs wants."""
RESTART_EVERY = 30.0


class Soak:
    """Runs for `seconds`, and answers with a report."""

    def __init__(
        self, seconds: float, seed: int, server: Server | None, folder: Path, *, broken: str | None = None
    ) -> None:
        self.seconds, self.seed, self.server = seconds, seed, server
        self.findings = Findings()
        self.processes = Processes(folder)
        self.crew = Crew(self.processes, self.findings, self._chance("crew"), broken)
        self._operator = self._chance("operator")
        self._outages = self._chance("outages")

    def run(self) -> dict[str, Any]:
        call_command("migrate", run_syncdb=True, verbosity=0)
        # One for each thread: Django's test client keeps the exception of a request, and gives it to whoever asks.
        self.clients = {act: self._signed_in() for act in ("cancel", "redrive")}
        # Refused clicks and answers during an outage are counted, not told.
        logging.getLogger("django.request").setLevel(logging.CRITICAL)
        logging.getLogger("durable_jobs").setLevel(logging.CRITICAL)
        named = version()
        began, load = time.monotonic(), os.getloadavg()
        try:
            self.crew.start()
            self._trouble()
            self._settle()
            self.crew.end()
            audit(self.findings)
            self.crew.read_logs()
        finally:
            self.crew.wake_all()
            self.processes.end()
        left = Counter(Job.objects.values_list("status", flat=True))
        connections.close_all()
        counts = self.findings.counts
        counts["jobs"] = left.total()
        return {
            "version": named,
            "seconds": round(time.monotonic() - began, 1),
            "load_average_before_and_after": [load[0], os.getloadavg()[1]],
            "counts": {name: round(counts[name], 1) for name in sorted(counts) if counts[name]},
            "jobs": dict(sorted(left.items())),
            "violations": self.findings.violations,
        }

    def _trouble(self) -> None:
        stop = threading.Event()
        watch = Watch(self.findings)
        actors = [
            self._actor(self.start_some, 0.4, stop),
            self._actor(self.cancel_one, 1.5, stop),
            self._actor(self.redrive_one, 1.5, stop),
            self._actor(watch.look, 1.0, stop),
            Actor(self.crew.strike, 1.0, self._chance("strikes"), stop),
        ]
        if self.server is not None:
            actors.append(Actor(self.restart, min(RESTART_EVERY, self.seconds / 4), self._outages, stop))
            actors.append(Actor(self.cut, 5.0, self._chance("cuts"), stop))
        for actor in actors:
            actor.start()
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            self.crew.keep()
            time.sleep(0.1)
        stop.set()
        for actor in actors:
            actor.join(60)
            if actor.is_alive():
                self.findings.violate("somebody hangs", who=actor.name)

    def _settle(self) -> None:
        """No more trouble: what is live comes to its end."""
        connections.close_all()
        self.crew.wake_all()
        began = time.monotonic()
        watch = Watch(self.findings)
        while Job.objects.filter(status__in=LIVE).exists():
            self.crew.keep()
            watch.look()
            if time.monotonic() - began > SETTLE_SECONDS:
                return
            time.sleep(0.5)
        self.findings.count("seconds to settle", time.monotonic() - began)

    # --- people ---

    def start_some(self) -> None:
        if Job.objects.filter(status__in=LIVE).count() >= MOST_WAITING:
            self.findings.count("arrivals put off")
            return
        items = self._operator.randint(10, 120)
        locked = self._operator.random() < 0.2
        options = {"lock_key": f"berth {self._operator.randrange(BERTHS)}"} if locked else {}
        with transaction.atomic():
            order = Order.objects.create()
            kind = self._operator.choice(KINDS)
            service.start(
                kind, {"items": items}, subject=order, idempotency_key=f"order {order.pk}", **options
            )

    def cancel_one(self) -> None:
        self._click("cancel", LIVE)

    def redrive_one(self) -> None:
        self._click("redrive", ("failed",))

    def _click(self, act: str, statuses: Any) -> None:
        ids = list(Job.objects.filter(status__in=statuses).order_by("-id").values_list("id", flat=True)[:100])
        if not ids:
            return
        job_id = self._operator.choice(ids)
        self.findings.count(f"{act}s clicked")
        if self._operator.random() < 0.5:
            answer = self.clients[act].post(
                f"/api/jobs/{job_id}/{act}/", {"reason": "soak"}, "application/json"
            )
            self.findings.count(f"{act} through the API answered {answer.status_code}")
            if answer.status_code >= 500:
                self.findings.violate("the API breaks", act=act, said=answer.content[:1000])
        else:
            getattr(service, act)(job_id, actor="soak", reason="soak")

    # --- the database ---

    def restart(self) -> None:
        assert self.server is not None
        self.server.stop(self._outages.choice(("fast", "immediate")))
        time.sleep(self._outages.uniform(0.2, 4.0))
        self.server.start()
        self.findings.count("restarts of PostgreSQL")

    def cut(self) -> None:
        """Cut a third of all connections."""
        assert self.server is not None
        try:
            with psycopg.connect(self.server.url_of("postgres"), connect_timeout=5, autocommit=True) as own:
                row = own.execute(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE random() < 0.33"
                    " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
                ).fetchone()
        except psycopg.OperationalError:
            return
        self.findings.count("connections cut", row[0] if row else 0)

    # --- inside ---

    def _actor(self, act: Callable[[], None], rest: float, stop: threading.Event) -> Actor:
        """One who uses the database: refusals and outages are counted, whatever else it meets is a violation."""
        name = act.__name__

        def careful() -> None:
            try:
                act()
            except HookFailed:
                self.findings.count(f"{name}: a hook failed")
            except DurableJobsError as refusal:
                self.findings.count(f"{name}: refused as {refusal.code}")
            except (OperationalError, InterfaceError) as error:
                if database.is_outage(error):
                    self.findings.count(f"{name}: met an outage")
                else:
                    self.findings.violate("an act failed", act=name, error=repr(error))
                connections.close_all()
            except Exception as error:
                self.findings.violate("an act failed", act=name, error=repr(error))

        careful.__name__ = name
        return Actor(careful, rest, self._chance(name), stop)

    def _chance(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}:{name}")

    def _signed_in(self) -> Client:
        user = get_user_model().objects.create_superuser(
            f"operator {get_user_model().objects.count()}", password=os.urandom(8).hex()
        )
        client = Client()
        client.force_login(user)
        return client
