"""A second connection to the tests' database: a race needs two."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections

Result = TypeVar("Result")


class OtherConnection:
    """A thread with a database connection of its own, on which functions run one after the other.

    `run` waits for the function's result. `begin` leaves it running, perhaps blocked by a lock; `join` or the
    future waits for it. `enter` and `leave` keep a context manager, such as ``transaction.atomic()``, open
    across calls::

        other.enter(transaction.atomic())
        other.run(Job.objects.select_for_update().get, pk=job.pk)
        blocked = third.begin(service.cancel, job.pk)
        other.leave()
        blocked.result(5)
    """

    def __init__(self, alias: str = DEFAULT_DB_ALIAS) -> None:
        self.alias = alias
        self.connection: Any = None
        self._open = contextlib.ExitStack()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread = threading.Thread(target=self._serve, name="tests-other-connection", daemon=True)
        self._thread.start()

    def begin(self, act: Callable[..., Result], *arguments: Any, **named: Any) -> Future[Result]:
        """Run ``act(*arguments, **named)`` in the other thread and do not wait for it."""
        future: Future[Result] = Future()
        self._last = future
        self._calls.put((future, lambda: act(*arguments, **named)))
        return future

    def run(self, act: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Run ``act(*arguments, **named)`` in the other thread and wait for its result, 30 s at most."""
        return self.begin(act, *arguments, **named).result(30)

    def join(self, timeout: float = 30) -> Any:
        """The result of the last function begun; TimeoutError when it is still blocked after `timeout` s."""
        return self._last.result(timeout) if self._last is not None else None

    @property
    def busy(self) -> bool:
        """Whether the last function begun has not ended yet."""
        return self._last is not None and not self._last.done()

    def enter(self, context: contextlib.AbstractContextManager[Result]) -> Result:
        """Enter a context manager in the other thread; it stays open until `leave`."""
        return self.run(self._open.enter_context, context)

    def leave(self, error: BaseException | None = None) -> None:
        """Close what `enter` opened, as after `error` when one is given (a transaction then rolls back)."""
        self.run(lambda: self._open.__exit__(type(error) if error else None, error, None))

    def close(self) -> None:
        """Cancel a statement that still blocks, roll back what is open, close the connection."""
        self._calls.put(None)
        if self.busy:
            with contextlib.suppress(Exception):
                self._interrupt()
        self._thread.join(5)
        if self._thread.is_alive():
            raise AssertionError(
                "A function given to OtherConnection is still running: let it end in the test."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        self.connection = connections[self.alias]
        try:
            while (call := self._calls.get()) is not None:
                future, act = call
                try:
                    future.set_result(act())
                except BaseException as error:
                    future.set_exception(error)
        finally:
            abandoned = RuntimeError("The test left this open.")
            with contextlib.suppress(Exception):
                self._open.__exit__(type(abandoned), abandoned, None)
            connections.close_all()

    def _interrupt(self) -> None:
        raw = self.connection.connection
        if raw is None:
            return
        if self.connection.vendor == "postgresql":
            raw.cancel_safe(timeout=2)
        else:
            raw.interrupt()
