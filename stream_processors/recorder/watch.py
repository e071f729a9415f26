"""A thread of the recorder that looks at the tables at an interval."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

_STOP_TIMEOUT_S = 15.0


class Watch(ABC):
    """``on_failure`` is called on the thread with the error that ended it."""

    def __init__(self, name: str, interval_s: float, on_failure: Callable[[BaseException], None]) -> None:
        self._interval_s = interval_s
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def look(self) -> None:
        """Look once. A server that does not answer is logged, and no error."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect; the thread does so at its end."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it, after the look that is under way."""
        self._stopping.set()
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.look()
                self._stopping.wait(self._interval_s)
        except Exception as error:  # noqa: BLE001 - handed to the owner
            self._on_failure(error)
        finally:
            self.close()
