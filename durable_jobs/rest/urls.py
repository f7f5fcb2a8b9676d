"""The addresses of the REST API: `path("api/", include("durable_jobs.rest.urls"))`."""

from __future__ import annotations

from rest_framework.routers import SimpleRouter

from durable_jobs.rest.views import viewsets

app_name = "durable_jobs"

router = SimpleRouter()
for prefix, viewset, basename in viewsets():
    router.register(prefix, viewset, basename=basename)

urlpatterns = router.urls
