"""Settings of the tests: SQLite in a temporary file, or the database that DATABASE_URL names."""

import atexit
import json
import os
import tempfile
from pathlib import Path

import environ

from project.databases import database

env = environ.Env()

# A file, because threads share it and an in-memory database has one lock for all; one for each process, so
# that two runs do not meet.
SQLITE_FILE = Path(tempfile.gettempdir()) / f"durable-jobs-tests-{os.getpid()}.sqlite3"


def remove_sqlite_file() -> None:
    for path in SQLITE_FILE.parent.glob(f"{SQLITE_FILE.name}*"):
        path.unlink(missing_ok=True)


DATABASES = {
    "default": database(env.str("DATABASE_URL", default=f"sqlite:///{SQLITE_FILE}"), synchronous="NORMAL")
}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    DATABASES["default"]["TEST"] = {"NAME": str(SQLITE_FILE)}
    atexit.register(remove_sqlite_file)
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

SECRET_KEY = "tests"
ALLOWED_HOSTS = ["testserver", "localhost", "127.0.0.1"]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
USE_TZ = True
TIME_ZONE = "UTC"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "django_filters",
    "drf_spectacular",
    "durable_jobs",
    "project.demo",
    "tests",
    "tests.pages.shop",
    "tests.programs.imports",
    "tests.programs.mailings",
    "tests.programs.orders",
    "tests.programs.people",
    "tests.programs.reports",
]

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "rest_framework.authentication.SessionAuthentication",
        "rest_framework.authentication.BasicAuthentication",
    ],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
}
SPECTACULAR_SETTINGS = {"TITLE": "durable_jobs", "VERSION": "1", "SERVE_INCLUDE_SCHEMA": False}

ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# A test gives the processes that it starts settings of their own (`processes.start(..., settings={...})`).
DURABLE_JOBS = {**json.loads(env.str("DURABLE_JOBS_TEST_SETTINGS", default="{}"))}

DEMO_LEASE_SECONDS = env.float("DEMO_LEASE_SECONDS", default=60.0)
DEMO_BATCH_SIZE = env.int("DEMO_BATCH_SIZE", default=100)
DEMO_PAUSE = 0.0
