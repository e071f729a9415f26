"""Blocking calls of a client library that knows no timeout, made one after the other and waited for only so long."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


class Sequence:
    """Runs each call on a daemon thread once the one before it is over. For one caller at a time."""

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def call(self, work: Callable[[], ResultT], timeout_s: float) -> ResultT:
        """The result of ``work``, or what it raised.

        Raises:
            TimeoutError: it is not over after ``timeout_s``; it goes on, and later calls wait for its end.
        """
        outcome: Future[ResultT] = Future()
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            try:
                outcome.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised by the caller's wait
                outcome.set_exception(error)

        # A daemon: a broker that never answers must not keep the process from ending.
        self._last = threading.Thread(target=run, name="fairlane-blocking-call", daemon=True)
        self._last.start()
        return outcome.result(timeout_s)
