"""A second admin site, with a name and an address of its own."""

from django.contrib import admin
from django.urls import path

from durable_jobs.admin import register

site = admin.AdminSite(name="ops")
register(site)

urlpatterns = [path("admin/", admin.site.urls), path("ops/", site.urls)]
