"""Settings of the processes that tests start: the tests' own, without screens and API.

These run jobs and need neither; importing them takes as long as all the rest of a start.
"""

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as _INSTALLED_APPS

INSTALLED_APPS = [
    # Its tables stay, but it looks for nothing to show.
    "django.contrib.admin.apps.SimpleAdminConfig" if app == "django.contrib.admin" else app
    for app in _INSTALLED_APPS
    if app not in ("rest_framework", "django_filters", "drf_spectacular")
]
ROOT_URLCONF = "tests.job_settings"
urlpatterns: list[object] = []
