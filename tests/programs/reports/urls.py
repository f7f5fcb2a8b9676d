from django.urls import path

from . import views

urlpatterns = [
    path("reports/<int:year>/", views.create, name="report-create"),
    path("reports/<uuid:job_id>/status/", views.status, name="report-status"),
    path("reports/<uuid:job_id>/file/", views.file, name="report-file"),
]
