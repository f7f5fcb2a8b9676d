"""Guarantees that can be taken away, to see that the soak notices: `python -m tests.soak --break fence`.

In the workers' processes alone; whoever looks at the rows and judges them is as he should be.
"""

from __future__ import annotations

import os
from typing import Final

BREAK_VARIABLE: Final = "DURABLE_JOBS_SOAK_BREAK"
BREAKS: Final = ("fence", "hooks")
"""`fence`: every statement of a lease matches, whoever owns the job by now. `hooks`: a job ends without them."""


def break_what_is_asked() -> None:
    """In a worker, before its first statement: take away what its environment names."""
    wanted = os.environ.get(BREAK_VARIABLE)
    if wanted == "fence":
        _forget_owner_and_epoch()
    elif wanted == "hooks":
        from durable_jobs import lifecycle

        lifecycle._run_hooks = lambda kind, job: None
        lifecycle._complete_mirrored = lambda owner, kind, endings: lifecycle._complete_whole(owner, endings)


def _forget_owner_and_epoch() -> None:
    """Whoever once had a job writes it as long as it runs, and no beat tells him that it is not his."""
    from durable_jobs import store

    store._OWNED = "id = :id AND status = 'running'"
    beat = store._BEAT_MANY._templates
    for vendor, conditions in OF_A_BEAT.items():
        for condition, instead in conditions.items():
            assert condition in beat[vendor], "the statement has changed"
            beat[vendor] = beat[vendor].replace(condition, instead)


OF_A_BEAT: Final = {
    "postgresql": {
        " AND {job}.lease_epoch = (SELECT epochs FROM given)[width_bucket(id, (SELECT ids FROM given))]": "",
        " AND {job}.lease_epoch = mine.mine_epoch": "",
        "{job}.lease_owner = :owner": "{job}.status = 'running'",
    },
    "sqlite": {" AND lease_epoch = mine_epoch": "", "+lease_owner = :owner": "status = 'running'"},
}
