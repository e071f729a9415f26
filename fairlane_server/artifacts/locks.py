"""Locks on files and folders by ``flock``: they end with the process that holds them, however it ends."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from fairlane_server.artifacts.source import StoppedError, StopWait

_LOOK_EVERY_S = 0.1


class LockTimeoutError(Exception):
    """Another process held the lock for too long."""


class FileLock:
    """A lock that is held until ``release``, also against other locks of this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def try_on(cls, path: Path, *, shared: bool = False) -> "FileLock | None":
        """Lock a file, which is made if needed; None when it is locked otherwise. Raises OSError."""
        return cls._try(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), shared=shared)

    @classmethod
    def try_on_folder(cls, path: Path) -> "FileLock | None":
        """Lock a folder; None when it is locked. Raises OSError."""
        return cls._try(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), shared=False)

    @classmethod
    def _try(cls, descriptor: int, *, shared: bool) -> "FileLock | None":
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @classmethod
    def on(cls, path: Path, stop: StopWait, timeout_s: float, *, shared: bool = False) -> "FileLock":
        """Like ``try_on``, but wait. Raises LockTimeoutError, StoppedError."""
        waited_s = 0.0
        while (lock := cls.try_on(path, shared=shared)) is None:
            if waited_s >= timeout_s:
                raise LockTimeoutError
            if stop(_LOOK_EVERY_S):
                raise StoppedError
            waited_s += _LOOK_EVERY_S
        return lock

    def release(self) -> None:
        """May be repeated."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
