"""Settings of the benchmarks: the tests' database, where every commit survives a power cut, and few apps."""

from project.databases import database
from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, SQLITE_FILE, env

DATABASES["default"] = {
    **database(env.str("DATABASE_URL", default=f"sqlite:///{SQLITE_FILE}"), synchronous="FULL"),
    "TEST": DATABASES["default"].get("TEST", {}),
}
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "durable_jobs",
    "benchmarks",
]
DURABLE_JOBS = env.json("BENCH_DURABLE_JOBS", default={})
ROOT_URLCONF = "benchmarks.urls"
