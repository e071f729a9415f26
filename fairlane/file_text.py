"""Text of a file that may be replaced while a process runs, such as a mounted secret."""

import os
from pathlib import Path

MAX_BYTES = 65_536

FileStamp = tuple[int, int, int]
"""Time of the last change in ns, inode, and size in bytes."""


class FileText(str):
    """What a file held at first: a string like any other, of which ``present`` knows the file."""

    __slots__ = ("_content", "_path", "_stamp")

    _path: Path
    _content: str
    _stamp: FileStamp | None

    @classmethod
    def of(cls, path: Path) -> "FileText":
        """The one line of a file. Raises OSError, and ValueError for anything else in it, which quotes nothing."""
        stamp, content = stamp_of(path), read_line(path)
        text = cls(content)
        text._path, text._content, text._stamp = path, content, stamp
        return text

    def now(self) -> str:
        """What the file holds now; what it held before if it cannot be read, or is being written."""
        try:
            # The stamp first: a change in between is found the next time.
            stamp = stamp_of(self._path)
            if stamp != self._stamp:
                self._content, self._stamp = read_line(self._path), stamp
        except (OSError, ValueError):
            pass
        return self._content


def present(text: str) -> str:
    """What the text's file holds now, if it is that of a file; else the text itself."""
    return text.now() if isinstance(text, FileText) else text


def read_line(path: Path) -> str:
    """The file's text without the end of its line. Raises OSError, ValueError."""
    text = read_bounded(path).rstrip("\r\n")
    if not text or "\n" in text:
        raise ValueError(f"must hold one line of at most {MAX_BYTES} bytes")
    return text


def read_bounded(path: Path) -> str:
    """The file's text. Raises OSError, and ValueError, which quotes nothing of it."""
    with path.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"must hold at most {MAX_BYTES} bytes")
    return content.decode()


def stamp_of(path: Path) -> FileStamp:
    """A value that changes when the file is replaced or written. Raises OSError."""
    found = os.stat(path)  # noqa: PTH116 - follows the links of a mounted secret, which are what is replaced
    return found.st_mtime_ns, found.st_ino, found.st_size
