"""The demo site's pages."""

from django.conf import settings
from django.conf.urls.static import static
from django.contrib import admin
from django.contrib.auth.views import LoginView, LogoutView
from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView

from project.demo.views import follow, home, imports

urlpatterns = [
    path("", home, name="home"),
    path("imports/", imports, name="imports"),
    path("imports/<int:pk>/", follow, name="follow"),
    path("login/", LoginView.as_view(template_name="demo/login.html"), name="login"),
    path("logout/", LogoutView.as_view(next_page="login"), name="logout"),
    path("api/", include("durable_jobs.rest.urls")),
    path("api/schema/", SpectacularAPIView.as_view(), name="schema"),
    path("admin/", admin.site.urls),
    *static(settings.MEDIA_URL, document_root=settings.MEDIA_ROOT),
]
