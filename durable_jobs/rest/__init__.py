"""The REST API: jobs to be looked at, started, cancelled, redriven and paused over HTTP.

Optional: the extra `rest` brings Django REST framework and django-filter. Nothing else of the package imports this
one. Either include its addresses::

    path("api/", include("durable_jobs.rest.urls"))

or register the viewsets of `durable_jobs.rest.views` with the project's own router. With drf-spectacular installed
the schema is complete; without it nothing is missed.
"""
