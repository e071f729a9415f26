"""Documents from files: plain text, Markdown, HTML and PDF, each within bounds; a failure concerns one file alone."""

import os
import stat
from pathlib import Path
from typing import Self

from fairlane_server.retrieval.parser_process import ParserProcess
from fairlane_server.retrieval.parsers import (
    DocumentFormat,
    DocumentLimits,
    ParsedDocument,
    UnreadableError,
    check_length,
    clean,
    decode,
)


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


class DocumentReader:
    """Makes documents of files' bytes. HTML and PDF are parsed in a process of its own, which starts when needed."""

    def __init__(self, limits: DocumentLimits | None = None) -> None:
        self._limits = limits or DocumentLimits()
        self._parser = ParserProcess(self._limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._parser.close()

    def parse(self, source: str, kind: DocumentFormat, data: bytes) -> ParsedDocument:
        """Raises DocumentError, also for a document without any text."""
        try:
            if kind in {DocumentFormat.HTML, DocumentFormat.PDF}:
                parsed = self._parser.parse(kind, data)
            else:
                text = clean(decode(data))
                check_length(len(text), self._limits)
                parsed = ParsedDocument(text, "", markdown=kind is DocumentFormat.MARKDOWN)
        except UnreadableError as error:
            raise DocumentError(source, str(error)) from None
        if not parsed.text.strip():
            hint = " (the text of scanned pages is not read)" if kind is DocumentFormat.PDF and data else ""
            raise DocumentError(source, f"holds no text{hint}")
        return parsed
