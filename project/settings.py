"""Settings of the demo site. Every value comes from the environment or has a default for one machine."""

from pathlib import Path

import environ

from project.databases import database

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()
environ.Env.read_env(BASE_DIR / ".env")

DEBUG = env.bool("DEBUG", default=True)
SECRET_KEY = env.str("SECRET_KEY", default="for-the-demo-only-set-SECRET_KEY-anywhere-else")
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "rest_framework",
    "django_filters",
    "drf_spectacular",
    "durable_jobs",
    "project.demo",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "project.urls"
WSGI_APPLICATION = "project.wsgi.application"
ASGI_APPLICATION = "project.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
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

DATABASES = {"default": database(env.str("DATABASE_URL", default=f"sqlite:///{BASE_DIR / 'demo.sqlite3'}"))}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_I18N = True
USE_TZ = True

LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "imports"

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.SessionAuthentication"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
}
SPECTACULAR_SETTINGS = {"TITLE": "durable_jobs demo", "VERSION": "1", "SERVE_INCLUDE_SCHEMA": False}

STATIC_URL = "static/"
MEDIA_URL = "media/"
MEDIA_ROOT = env.path("MEDIA_ROOT", default=str(BASE_DIR / "media"))

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {name}: {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"durable_jobs": {"handlers": ["console"], "level": env.str("LOG_LEVEL", default="INFO")}},
}

DURABLE_JOBS = {
    "GRACE": env.float("DURABLE_JOBS_GRACE", default=20.0),
    "TICK": env.float("DURABLE_JOBS_TICK", default=15.0),
    "RELEASE": env.str("RELEASE", default=""),
    "SCOPE_FROM_REQUEST": "project.demo.scopes.scope_of_request",
}

# The demo's imports: how long a lease lasts, how many rows a batch has, and how long each batch waits for its
# source. Short and slow in `manage.py demo` and `serve`, so that a person sees something.
DEMO_LEASE_SECONDS = env.float("DEMO_LEASE_SECONDS", default=60.0)
DEMO_BATCH_SIZE = env.int("DEMO_BATCH_SIZE", default=100)
DEMO_PAUSE = env.float("DEMO_PAUSE", default=0.0)
DEMO_FOLDER = Path(env.str("DEMO_FOLDER", default=str(BASE_DIR / ".demo")))
