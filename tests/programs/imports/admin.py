from django.contrib import admin, messages
from django.shortcuts import redirect

from durable_jobs.exceptions import LockKeyHeld

from .jobs import start_import
from .models import ImportRun


@admin.register(ImportRun)
class ImportRunAdmin(admin.ModelAdmin):
    list_display = ["supplier", "night", "status", "rows_done"]
    fields = ["supplier", "file", "status", "rows_done"]

    def get_readonly_fields(self, request, obj=None):
        return ["status", "rows_done"] if obj is None else self.fields

    def save_model(self, request, obj, form, change):
        super().save_model(request, obj, form, change)
        if not change:
            start_import(obj, created_by=request.user)

    def changeform_view(self, request, *args, **kwargs):
        try:
            return super().changeform_view(request, *args, **kwargs)
        except LockKeyHeld:  # raised through the admin's own transaction: the run is gone again
            messages.error(request, "This supplier's last import is still at work. Nothing was saved.")
            return redirect(request.path)
