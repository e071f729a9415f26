"""Digest of a model's folder: SHA-256 over a list of its files with their sizes and their own digests.

The list has a line for each file, ordered by the bytes of its path: the SHA-256 of the file in hexadecimal digits, its
size in bytes, and its path below the folder with slashes. No part of a path has a control character, so no file can
pass for two. A link to a file within the folder counts as a file with that content. Times, owners, rights and empty
folders do not count.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

DIGEST_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")
MOST_FILES = 10_000
MOST_PATH_BYTES = 1_024
_MOST_FOLDERS = 10_000
_LONGEST_NAME = 255
_BLOCK_BYTES = 1 << 20
_OTHER_FILES = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors of a folder that has other files than it should; all others are no fault of the folder."""
_HEADING = b"fairlane artifact 1\n"


class ArtifactError(Exception):
    """The files of a version cannot be used; the message says which and why, and quotes no secret."""


class UnreadableError(ArtifactError):
    """The disk or this process is in trouble: it says nothing of the files themselves."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of an artifact: its path below the artifact, with slashes, and its size."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DigestedFile:
    """A file and the SHA-256 of its content, in hexadecimal digits."""

    path: str
    size_bytes: int
    sha256: str


def digest_of(files: Iterable[DigestedFile]) -> str:
    """``sha256:`` and the digest of these files, in whatever order they come. Raises ArtifactError."""
    ordered = sorted(files, key=lambda file: file.path.encode())
    check_listing(ListedFile(file.path, file.size_bytes) for file in ordered)
    digest = hashlib.sha256(_HEADING)
    for file in ordered:
        digest.update(f"{file.sha256} {file.size_bytes} {file.path}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def check_listing(files: Iterable[ListedFile], max_bytes: int | None = None) -> int:
    """The size of all files together. Raises ArtifactError for a path that could leave the folder or that two files
    have, for no file, for too many, and for more than ``max_bytes``."""
    seen: set[str] = set()
    total_bytes = 0
    for file in files:
        check_path(file.path)
        if file.path in seen:
            raise ArtifactError(f"{file.path!r} is there twice")
        if file.size_bytes < 0:
            raise ArtifactError(f"{file.path!r} has a size below 0")
        seen.add(file.path)
        total_bytes += file.size_bytes
        if len(seen) > MOST_FILES:
            raise ArtifactError(f"it has more than {MOST_FILES} files")
        if max_bytes is not None and total_bytes > max_bytes:
            raise ArtifactError(f"its files have more than {max_bytes} bytes")
    if not seen:
        raise ArtifactError("it has no files")
    folders = {parent for path in seen for parent in _parents(path)}
    if blocked := sorted(folders & seen):
        raise ArtifactError(f"{blocked[0]!r} is a file and a folder")
    return total_bytes


def check_path(path: str) -> None:
    """Raises ArtifactError unless this is a plain relative path."""
    try:
        length = len(path.encode())
    except UnicodeEncodeError:
        raise ArtifactError(f"{path!r} is not valid Unicode") from None
    if length > MOST_PATH_BYTES:
        raise ArtifactError(f"a path of {length} bytes is too long: at most {MOST_PATH_BYTES}")
    if not path.isprintable() or "\\" in path:
        raise ArtifactError(f"{path!r} has a character that no path may have")
    for part in path.split("/"):
        if part in {"", ".", ".."}:
            raise ArtifactError(f"{path!r} is no path below the artifact")
        if len(part.encode()) > _LONGEST_NAME:
            raise ArtifactError(f"a name in {path!r} is longer than {_LONGEST_NAME} bytes")


def files_below(folder: Path) -> list[ListedFile]:
    """The files of a folder, ordered by path. A link counts as the file that it leads to.

    Raises ArtifactError for what is neither a file nor a folder and for links that lead to folders or out of this one,
    UnreadableError for a folder that cannot be read.
    """
    return sorted(_walk(folder), key=lambda file: file.path.encode())


def digest_of_folder(folder: Path, max_bytes: int | None = None, going_on: Callable[[], None] = lambda: None) -> str:
    """Read every byte of a folder. ``going_on`` is called now and then, and may raise. Raises ArtifactError."""
    listed = files_below(folder)
    check_listing(listed, max_bytes)
    return digest_of(_digested(folder, file, going_on) for file in listed)


def _digested(folder: Path, file: ListedFile, going_on: Callable[[], None]) -> DigestedFile:
    digest = hashlib.sha256()
    size_bytes = 0
    for block in read_blocks(folder, file):
        digest.update(block)
        size_bytes += len(block)
        going_on()
    return DigestedFile(file.path, size_bytes, digest.hexdigest())


def read_blocks(folder: Path, file: ListedFile) -> Iterator[bytes]:
    """The content of a file. Raises ArtifactError when it cannot be read or its size has changed."""
    left_bytes = file.size_bytes
    try:
        # Without waiting, should it have become a pipe.
        descriptor = os.open(folder / file.path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ArtifactError(f"{file.path!r} is no file any more")
            while block := opened.read(_BLOCK_BYTES):
                left_bytes -= len(block)
                if left_bytes < 0:
                    break
                yield block
    except OSError as error:
        raise _read_error(repr(file.path), error) from None
    if left_bytes:
        raise ArtifactError(f"{file.path!r} changed its size while it was read")


def _walk(root: Path) -> Iterator[ListedFile]:
    try:
        base = root.resolve(strict=True)
        found, folders, files = [base], 0, 0
        while found:
            folder = found.pop()
            folders += 1
            if folders > _MOST_FOLDERS:
                raise ArtifactError(f"it has more than {_MOST_FOLDERS} folders")
            with os.scandir(folder) as entries:
                for entry in entries:
                    path = Path(entry.path)
                    name = path.relative_to(base).as_posix()
                    if entry.is_symlink() and not path.resolve().is_relative_to(base):
                        raise ArtifactError(f"{name!r} is a link that leads out of the folder")
                    if entry.is_dir(follow_symlinks=False):
                        found.append(path)
                        continue
                    status = entry.stat()
                    if not stat.S_ISREG(status.st_mode):
                        raise ArtifactError(f"{name!r} is no file")
                    files += 1
                    if files > MOST_FILES:
                        raise ArtifactError(f"it has more than {MOST_FILES} files")
                    yield ListedFile(name, status.st_size)
    except NotADirectoryError:
        raise ArtifactError(f"{root} is no folder") from None
    except OSError as error:
        raise _read_error(str(root), error) from None
    except RuntimeError:
        raise ArtifactError(f"{root} cannot be read: its links go round in a circle") from None


def _read_error(what: str, error: OSError) -> ArtifactError:
    kind = ArtifactError if error.errno in _OTHER_FILES else UnreadableError
    return kind(f"{what} cannot be read: {error.strerror}")


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
