"""Settings of the peers that are Django apps. Connections are kept, unless a contestant is to show what that saves."""

from environ import Env

from project.databases import database

env = Env()
DATABASES = {"default": database(env.str("DATABASE_URL"), synchronous="FULL")}
DATABASES["default"]["CONN_MAX_AGE"] = env.int("BENCH_CONN_MAX_AGE", default=600)
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = "benchmarks"
USE_TZ = True
INSTALLED_APPS = ["django_tasks", "django_tasks_db"]
if "postgresql" in DATABASES["default"]["ENGINE"]:
    INSTALLED_APPS.append("procrastinate.contrib.django")
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
