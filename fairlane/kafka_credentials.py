"""User and password of Kafka, in a file that may be replaced while a process runs.

The file has the form that ``fairlane access`` writes: KAFKA_SASL_USERNAME and KAFKA_SASL_PASSWORD, one NAME=VALUE a
line, and perhaps KAFKA_SASL_MECHANISM. Both values are in one file, because a rotation changes both at once.
"""

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from fairlane.file_text import FileStamp, read_bounded, stamp_of

# Not structlog: the client's package logs through the application's logging.
log = logging.getLogger(__name__)

_USERNAME = "KAFKA_SASL_USERNAME"
_PASSWORD = "KAFKA_SASL_PASSWORD"  # noqa: S105 - the name of a setting
_MECHANISM = "KAFKA_SASL_MECHANISM"
_NAMES = (_USERNAME, _PASSWORD, _MECHANISM)


@dataclass(frozen=True, slots=True)
class KafkaCredentials:
    """``mechanism``: None when the file does not name one."""

    username: str
    password: str = field(repr=False)
    mechanism: str | None = None

    @classmethod
    def parse(cls, text: str) -> "KafkaCredentials":
        """Raises ValueError, which quotes nothing of the text: a line is of another form, or the end is missing."""
        if not text.endswith("\n"):
            raise ValueError("its last line has no end: it is not written completely")
        found: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, separator, value = line.partition("=")
            if not separator or name not in _NAMES:
                raise ValueError(f"line {number} is not NAME=VALUE, with a name of {', '.join(_NAMES)}")
            if name in found:
                raise ValueError(f"{name} is in it twice")
            found[name] = value
        for name in (_USERNAME, _PASSWORD):
            if not found.get(name):
                raise ValueError(f"{name} is missing")
        return cls(found[_USERNAME], found[_PASSWORD], found.get(_MECHANISM))

    @classmethod
    def read(cls, path: Path) -> "KafkaCredentials":
        """Raises OSError, and ValueError, which quotes nothing of the file."""
        return cls.parse(read_bounded(path))


class CredentialsFile:
    """What the file holds now. A file that is missing, incomplete or names another mechanism changes nothing: that is
    logged once, without its content."""

    def __init__(self, path: Path, first: KafkaCredentials, mechanism: str | None) -> None:
        """``first``: what it held at the start; ``mechanism``: that of the process, which no client can change."""
        self._path = path
        self._mechanism = mechanism
        self._lock = threading.Lock()
        self._last = first
        self._stamp: FileStamp | None = None
        """Of the last content that was read, usable or not."""
        self._was_missing = False

    def now(self) -> KafkaCredentials:
        with self._lock:
            try:
                # The stamp first: a change in between is found the next time.
                stamp = stamp_of(self._path)
                if stamp == self._stamp:
                    return self._last
                self._stamp = stamp
                self._last = self._read()
                self._was_missing = False
            except OSError as error:
                self._stamp = None
                if not self._was_missing:
                    self._complain(type(error).__name__)
                self._was_missing = True
            except UnicodeDecodeError:
                self._complain("it is not UTF-8")
            except ValueError as error:
                self._complain(str(error))
            return self._last

    def _read(self) -> KafkaCredentials:
        found = KafkaCredentials.read(self._path)
        if found.mechanism not in (None, self._mechanism):
            raise ValueError(f"{_MECHANISM} is not that of the start, {self._mechanism}: only a restart changes it")
        return found

    def _complain(self, reason: str) -> None:
        log.error("kafka_credentials_unusable file=%s reason=%s", self._path, reason)
