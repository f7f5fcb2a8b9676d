# The demo site and its workers in one image; a project of yours needs no more than this.
FROM python:3.13-slim

RUN useradd --create-home --uid 1000 app
WORKDIR /srv/app

COPY pyproject.toml setup.py README.md LICENSE MANIFEST.in ./
COPY durable_jobs durable_jobs
RUN pip install --no-cache-dir ".[all]" "django==5.2.19" "psycopg[binary]==3.3.9" "django-environ==0.14.0" \
    "drf-spectacular==0.30.0" "airportsdata==20260905" "rich==15.0.0"

COPY project project
COPY templates templates
COPY manage.py ./
RUN mkdir media && chown app media

USER app
ENV PYTHONUNBUFFERED=1
# Exec form: the process is PID 1 and hears SIGTERM itself.
CMD ["python", "manage.py", "runworker", "--processes", "2", "--metrics", "0.0.0.0:9808"]
