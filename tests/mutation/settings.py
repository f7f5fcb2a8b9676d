"""The tests' settings on a database that outlives the run of one mutant."""

import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    DATABASES["default"]["TEST"] = {"NAME": os.environ["DURABLE_JOBS_MUTATION_DATABASE"]}
