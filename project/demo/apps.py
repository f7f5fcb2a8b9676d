from django.apps import AppConfig


class DemoConfig(AppConfig):
    name = "project.demo"
    label = "demo"
    verbose_name = "Airports"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from project.demo.children import follow_parent

        follow_parent()
