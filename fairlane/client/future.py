"""A value that another thread sets once. Thousands are open at a time: waiting costs, holding does not."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class Future(Generic[ValueT]):
    """Kept once with a value, or broken with an error. Thread-safe.

    Unlike ``concurrent.futures.Future`` it makes its event only when somebody waits, and shares a lock with others.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_value")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._done = False
        self._value: ValueT | None = None
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    @property
    def done(self) -> bool:
        return self._done

    def keep(self, value: ValueT) -> bool:
        """Set the value; False when it was settled before."""
        return self._settle(value, None)

    def break_with(self, error: Exception) -> bool:
        """Set the error that ``get`` raises; False when it was settled before."""
        return self._settle(None, error)

    def get(self) -> ValueT:
        """The value; raises the error instead if there is one. Only after ``done``."""
        if self._error is not None:
            raise self._error
        assert self._done  # noqa: S101 - a mistake in this package, not of a caller
        return self._value  # type: ignore[return-value]  # None only where ValueT allows it

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call this once it is settled, on the settling thread, or at once. It must be short and never raise."""
        with self._lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        """Undo ``when_done``; nothing happens if it was called already."""
        with self._lock:
            if self._callbacks is not None and callback in self._callbacks:
                self._callbacks.remove(callback)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is settled; False when that took longer than ``timeout_s``."""
        if self._done:
            return True
        event = threading.Event()
        wake = event.set
        self.when_done(wake)
        try:
            return event.wait(timeout_s)
        finally:
            self.forget(wake)

    def _settle(self, value: ValueT | None, error: Exception | None) -> bool:
        with self._lock:
            if self._done:
                return False
            self._value = value
            self._error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()
        return True
