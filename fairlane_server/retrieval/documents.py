"""Documents from files: plain text, Markdown, HTML and PDF, each within bounds; a failure concerns one file alone.

HTML and PDF are parsed in a child process, which is killed when a document takes too long, and replaced. It gets a
document as two messages (format, bytes) and answers with one of JSON: text and title, or why there are none. What a
document does to that process (memory, an endless loop, a crash in C) ends with it.
"""

import json
import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fairlane
from fairlane.closing import Closing
from fairlane_server.processes.parent import die_with_parent
from fairlane_server.processes.watchdog import called_if_late
from fairlane_server.retrieval.parsers import (
    MOST_TITLE_CHARACTERS,
    DocumentFormat,
    DocumentLimits,
    ParsedDocument,
    UnreadableError,
    check_length,
    clean,
    decode,
    parse_html,
    parse_pdf,
)

_START_S = 60.0
_END_S = 10.0
_MOST_GREETING_BYTES = 64
# In JSON, a character beyond the first 65,536 is two escapes of six.
_MOST_BYTES_OF_A_CHARACTER = 12
_BYTES_AROUND_THE_TEXT = 65_536
_SERVE = "from fairlane_server.retrieval.documents import serve; serve()"
_PACKAGES = str(Path(fairlane.__file__).parent.parent)
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONHOME")
"""All that Python needs of the environment. A document that takes its parser over finds no secret in it."""
_RECURSION_LIMIT = 10_000
"""Pages of tables in tables are nested more deeply than Python's own limit lets a parser follow."""


class DocumentError(Exception):
    """One document was not taken; the others are. ``source`` is its name in the collection; ``reason`` is one line
    without its text."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(source, reason)
        self.source = source
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


def read_file(source: str, path: Path, limits: DocumentLimits, within: Path | None = None) -> bytes:
    """The bytes of a regular file of bounded size. Raises DocumentError; a file that is too large is not read.

    With ``within``, a resolved folder, one that links lead to outside of it is not read either.
    """
    try:
        # Without O_NONBLOCK, opening a pipe that took the file's place would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise DocumentError(source, "is no regular file")
            if within is not None and not _is_within(path, found, within):
                raise DocumentError(source, "is reached by a link that leads out of the folder")
            check_size(source, found.st_size, limits)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(limits.max_file_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DocumentError(source, f"cannot be read ({error.strerror or type(error).__name__})") from None
    # It may have grown meanwhile.
    check_size(source, len(data), limits)
    return data


def _is_within(path: Path, opened: os.stat_result, folder: Path) -> bool:
    # What was opened is compared, too: the path may lead elsewhere by now. Raises OSError.
    real = path.resolve(strict=True)
    return real.is_relative_to(folder) and os.path.samestat(real.stat(), opened)


def check_size(source: str, size_bytes: int, limits: DocumentLimits) -> None:
    """Raises DocumentError for a file that is larger than one may be."""
    if size_bytes > limits.max_file_bytes:
        raise DocumentError(
            source, f"has {size_bytes:,} bytes, more than a document may have ({limits.max_file_bytes:,})"
        )


class DocumentReader(Closing):
    """Makes documents of files' bytes. HTML and PDF are parsed in a process of its own, which starts when needed."""

    def __init__(self, limits: DocumentLimits | None = None) -> None:
        self._limits = limits or DocumentLimits()
        self._parser = ParserProcess(self._limits)

    def close(self) -> None:
        self._parser.close()

    def parse(self, source: str, kind: DocumentFormat, data: bytes) -> ParsedDocument:
        """Raises DocumentError, also for a document without any text."""
        try:
            if kind in {DocumentFormat.HTML, DocumentFormat.PDF}:
                parsed = self._parser.parse(kind, data)
            else:
                parsed = parse_plain(kind, data, self._limits)
        except UnreadableError as error:
            raise DocumentError(source, str(error)) from None
        if not parsed.text.strip():
            raise DocumentError(source, without_text(kind, data))
        return parsed


def parse_plain(kind: DocumentFormat, data: bytes, limits: DocumentLimits) -> ParsedDocument:
    """Text or Markdown. Raises UnreadableError."""
    text = clean(decode(data))
    check_length(len(text), limits)
    return ParsedDocument(text, "", markdown=kind is DocumentFormat.MARKDOWN)


def without_text(kind: DocumentFormat, data: bytes) -> str:
    """The reason why a document without any text is not taken."""
    return "holds no text" + (" (the text of scanned pages is not read)" if kind is DocumentFormat.PDF and data else "")


class ParserProcess(Closing):
    """Parses HTML and PDF, one document at a time. For one thread.

    ``serve`` is the code of the process, and ``arguments`` are those that it gets behind its file descriptor and the
    limits.
    """

    def __init__(self, limits: DocumentLimits, serve: str = _SERVE, *arguments: str) -> None:
        self._limits = limits
        self._serve = serve
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def close(self) -> None:
        """End the process, whatever it does. May be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_END_S)

    def parse(self, kind: DocumentFormat, data: bytes) -> ParsedDocument:
        """Raises UnreadableError, also for a document that takes too long or ends its parser."""
        answer = self.ask(kind, data)
        return ParsedDocument(answer["text"], answer["title"], markdown=kind is not DocumentFormat.PDF)

    def ask(self, kind: DocumentFormat, data: bytes) -> dict[str, Any]:
        """The answer of the process to one document. Raises UnreadableError as ``parse``."""
        if self._connection is None:
            self._connection = self._start()
        connection = self._connection
        late = threading.Event()
        try:
            with self._ended_after(self._limits.max_parse_s, late):
                connection.send_bytes(kind.encode())
                connection.send_bytes(data)
                answer: dict[str, Any] = json.loads(connection.recv_bytes(self.most_bytes()))
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
        return answer

    def most_bytes(self) -> int:
        """Bound of an answer. A longer one is not read: its process is ended as if it had crashed."""
        characters = self._limits.max_characters + MOST_TITLE_CHARACTERS
        return characters * _MOST_BYTES_OF_A_CHARACTER + _BYTES_AROUND_THE_TEXT

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            paths = [_PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
            # -P: a folder of documents is no place to import from. A session of its own: Ctrl-C is for us to answer.
            told = (str(theirs.fileno()), json.dumps(asdict(self._limits)), *self._arguments)
            command = [sys.executable, "-P", "-c", self._serve, *told]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**_passed_on(os.environ), "PYTHONPATH": os.pathsep.join(paths)},
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


def _passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in _PASSED_ON if name in environment}


Answer = Mapping[str, Any]


def answer(kind: DocumentFormat, data: bytes, limits: DocumentLimits) -> Answer:
    """``text`` and ``title`` of a document. Raises UnreadableError, and whatever a parser raises."""
    parsed = parse_pdf(data, limits) if kind is DocumentFormat.PDF else parse_html(data, limits)
    return {"text": parsed.text, "title": parsed.title[:MOST_TITLE_CHARACTERS]}


def serve(answer_of: Callable[[DocumentFormat, bytes, DocumentLimits], Answer] = answer) -> None:
    """Main function of the parser process; its arguments are a file descriptor and the limits in JSON. It answers
    ``reason`` where there is no answer."""
    die_with_parent(signal.SIGKILL)
    connection, limits = Connection(int(sys.argv[1])), DocumentLimits(**json.loads(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_AS, (limits.max_parser_bytes, limits.max_parser_bytes))
    sys.setrecursionlimit(_RECURSION_LIMIT)
    # What they say about a document may quote it.
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send_bytes(b"ready")
        while True:
            kind = DocumentFormat(connection.recv_bytes().decode())
            connection.send_bytes(json.dumps(_said(answer_of, kind, connection.recv_bytes(), limits)).encode())


def _said(
    answer_of: Callable[[DocumentFormat, bytes, DocumentLimits], Answer],
    kind: DocumentFormat,
    data: bytes,
    limits: DocumentLimits,
) -> Answer:
    try:
        return answer_of(kind, data, limits)
    except UnreadableError as error:
        return {"reason": str(error)}
    except MemoryError:
        return {"reason": f"needs more memory to parse than a document may ({limits.max_parser_bytes >> 20:,} MiB)"}
    except Exception as error:  # noqa: BLE001 - a parser may raise anything, and the next document is still to come
        return {"reason": f"made its parser fail ({type(error).__name__})"}
