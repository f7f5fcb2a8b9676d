"""For the tests of a project: run jobs here and now, interrupt them as a deploy does, kill them as a crash does.

Everything works in Django's TestCase and in pytest-django's `db`, unless it says that it needs real
transactions. Signals and after-hooks run after commit, so in a TestCase they need
`captureOnCommitCallbacks(execute=True)`.
"""

from durable_jobs.testing.crash import CrashReport, Difference, crash_test
from durable_jobs.testing.jobs import (
    Killed,
    expire_lease,
    finish,
    freeze_worker,
    interrupt_after,
    kill_after,
    make_job,
    register_for_test,
    run,
    run_slice,
    run_until_idle,
    started,
)

__all__ = [
    "CrashReport",
    "Difference",
    "Killed",
    "crash_test",
    "expire_lease",
    "finish",
    "freeze_worker",
    "interrupt_after",
    "kill_after",
    "make_job",
    "register_for_test",
    "run",
    "run_slice",
    "run_until_idle",
    "started",
]
