from django.contrib import admin
from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/", include("durable_jobs.rest.urls")),
    path("schema/", SpectacularAPIView.as_view(), name="schema"),
]
