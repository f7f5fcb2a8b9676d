"""The REST API: jobs to be looked at, started, cancelled, redriven and paused over HTTP.

Optional: the extra `rest` brings Django REST framework and django-filter. Nothing else of the package imports this
one. Either include its addresses::

    path("api/", include("durable_jobs.rest.urls"))

or register the viewsets of `durable_jobs.rest.views` with the project's own router. With drf-spectacular installed
the schema is complete; without it nothing is missed.
"""

from importlib.util import find_spec

if missing := [name for name in ("rest_framework", "django_filters") if find_spec(name) is None]:
    raise ImportError(
        f"The REST API of durable_jobs needs {' and '.join(missing)}: pip install 'durable-jobs[rest]'",
        name=missing[0],
    )
