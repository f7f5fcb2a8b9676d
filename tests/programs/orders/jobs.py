import json
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from django.conf import settings

from durable_jobs import service
from durable_jobs.kinds import Done, ErrorClass, Kind, Retry, RetryAfter, Yield, register

from .models import Order


@register
class SyncOrders(Kind):
    name = "orders.sync"
    queue = "orders_api"
    orphan_policy = "redrive"
    allow_restart = True
    retry = Retry(failures=8, first_delay=5, longest_delay=600)

    def step(self, ctx):
        state = ctx.checkpoint or {"cursor": None, "done": False}
        while not state["done"]:
            if ctx.should_yield():
                return Yield()
            page = fetch_page(state["cursor"])
            state = {"cursor": page["next"], "done": page["next"] is None}
            with ctx.fenced():
                save(page["orders"])
                ctx.save_checkpoint(state, advance=len(page["orders"]))
        return Done()

    def classify(self, error):
        if isinstance(error, HTTPError) and error.code in (401, 403):
            return ErrorClass.UNRECOVERABLE


def fetch_page(cursor):
    query = urlencode({"cursor": cursor} if cursor else {})
    request = Request(
        f"{settings.ORDERS_API_URL}?{query}", headers={"Authorization": f"Bearer {settings.ORDERS_API_TOKEN}"}
    )
    try:
        with urlopen(request, timeout=30) as response:
            return json.load(response)
    except HTTPError as error:
        if error.code == 429:
            raise RetryAfter.from_header(error.headers["Retry-After"]) from error
        raise


def save(orders):
    rows = {order["id"]: Order(ref=order["id"], total=order["total"]) for order in orders}
    Order.objects.bulk_create(
        rows.values(), update_conflicts=True, unique_fields=["ref"], update_fields=["total"]
    )


def start_sync():
    """What cron calls; while a sync is at work it gives that one."""
    return service.start(SyncOrders, lock_key="orders.sync", if_locked="return")
