"""Parsing in a child process, which is killed when a document takes too long, and replaced."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import fairlane
from fairlane_server.processes.watchdog import called_if_late
from fairlane_server.retrieval.documents.document import (
    MOST_TITLE_CHARACTERS,
    DocumentLimits,
    Format,
    ParsedDocument,
    UnreadableError,
)

_START_S = 60.0
_END_S = 10.0
_MOST_GREETING_BYTES = 64
# In JSON, a character beyond the first 65,536 is two escapes of six.
_MOST_BYTES_OF_A_CHARACTER = 12
_BYTES_AROUND_THE_TEXT = 65_536
_WORKER = "fairlane_server.retrieval.documents.worker"
_PACKAGES = str(Path(fairlane.__file__).parent.parent)


class ParserProcess:
    """Parses HTML and PDF, one document at a time. For one thread."""

    def __init__(self, limits: DocumentLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it does. May be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_END_S)

    def parse(self, kind: Format, data: bytes) -> ParsedDocument:
        """Raises UnreadableError, also for a document that takes too long or ends its parser."""
        connection = self._running()
        late = threading.Event()
        try:
            with self._ended_after(self._limits.max_parse_s, late):
                connection.send_bytes(kind.encode())
                connection.send_bytes(data)
                answer = json.loads(connection.recv_bytes(self._most_bytes()))
        except (EOFError, OSError):
            self.close()
            if late.is_set():
                reason = f"takes longer to parse than a document may ({self._limits.max_parse_s:g} s)"
            else:
                reason = "made its parser crash"
            raise UnreadableError(reason) from None
        except BaseException:
            # Ctrl-C in between: the next answer would be this document's.
            self.close()
            raise
        if "reason" in answer:
            raise UnreadableError(answer["reason"])
        return ParsedDocument(answer["text"], answer["title"], markdown=kind is not Format.PDF)

    def _most_bytes(self) -> int:
        """Of an answer. A longer one is not read: its process is ended as if it had crashed."""
        characters = self._limits.max_characters + MOST_TITLE_CHARACTERS
        return characters * _MOST_BYTES_OF_A_CHARACTER + _BYTES_AROUND_THE_TEXT

    def _running(self) -> Connection:
        if self._connection is None:
            self._connection = self._start()
        return self._connection

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            paths = [_PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
            # -P: a folder of documents is no place to import from. A session of its own: Ctrl-C is for us to answer.
            command = [sys.executable, "-P", "-m", _WORKER, str(theirs.fileno()), json.dumps(asdict(self._limits))]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        connection = Connection(ours.detach())
        try:
            with self._ended_after(_START_S, threading.Event()):
                connection.recv_bytes(_MOST_GREETING_BYTES)
        except (EOFError, OSError):
            connection.close()
            self.close()
            raise UnreadableError("no parser could be started for it") from None
        except BaseException:
            connection.close()
            self.close()
            raise
        return connection

    @contextmanager
    def _ended_after(self, timeout_s: float, late: threading.Event) -> Iterator[None]:
        """Kill the process when the block takes longer: what the block waits for then ends as well."""
        process = self._process
        assert process is not None  # noqa: S101 - it was started a line before

        def end() -> None:
            late.set()
            process.kill()

        with called_if_late(timeout_s, end):
            yield
