"""Detect calls that never return, which the caller's own timeout cannot."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from time import monotonic

_LOOKS_PER_LIMIT = 10


@contextlib.contextmanager
def called_if_late(timeout_s: float, call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` on a thread of its own when the block takes longer than ``timeout_s``; it should make the block
    end. On exit, ``call`` is cancelled or has returned."""
    timer = threading.Timer(timeout_s, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


class Watchdog:
    """Watch the calls of one thread from another.

    A client library in C may block beyond its timeout; the blocked thread cannot detect that.
    """

    def __init__(self, limit_s: float, on_hang: Callable[[str], None]) -> None:
        """``on_hang`` is called once, with the call's name, on the watchdog's thread."""
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._call: tuple[str, float] | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Context manager: the call inside must return within the limit."""
        self._call = name, monotonic()
        try:
            yield
        finally:
            self._call = None

    def _watch(self) -> None:
        while not self._stopped.wait(self._limit_s / _LOOKS_PER_LIMIT):
            call = self._call
            if call is not None and monotonic() - call[1] > self._limit_s:
                self._on_hang(call[0])
                return
