"""Files and objects by URL: read a range, write a whole one atomically. A path, or ``s3://bucket/key``.

Credentials of S3 come from the environment (``AWS_ACCESS_KEY_ID`` and so on), never from a job.
"""

import io
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from typing_extensions import Buffer

from fairlane_server.private_files import sync_folder
from fairlane_server.s3_storage import s3_store
from producers.backfill.errors import InputChangedError, JobFailedError, NoSuchInputError, UnavailableError
from producers.backfill.job import MEBIBYTE, Fingerprint

BLOCK_BYTES = MEBIBYTE
_PARALLEL_UPLOADS = 2
_UPLOAD_BYTES = 8 * MEBIBYTE


class LocalFile:
    """A file on this machine. All raise JobFailedError; NoSuchInputError if it does not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the content."""
        with _explained(self._path):
            found = self._path.stat()
        return Fingerprint(found.st_size, str(found.st_mtime_ns))

    def read(self, offset: int, length: int, expected: Fingerprint) -> bytes:
        """At most ``length`` bytes from ``offset`` on, fewer at the end. Raises InputChangedError."""
        with _explained(self._path), self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            _check(str(self._path), Fingerprint(found.st_size, str(found.st_mtime_ns)), expected)
            file.seek(offset)
            return file.read(length)

    def open(self) -> IO[bytes]:
        """A seekable file; close it."""
        with _explained(self._path):
            return self._path.open("rb")

    def write(self, blocks: Iterable[bytes]) -> None:
        """Replace the content atomically; durable when this returns."""
        # A name of its own: the same file may be written concurrently.
        beside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        with _explained(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with beside.open("wb") as file:
                    for block in blocks:
                        file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(self._path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
            sync_folder(self._path.parent)

    def delete(self) -> None:
        """Remove the file if it exists."""
        with _explained(self._path):
            self._path.unlink(missing_ok=True)


class S3Object:
    """An object of S3-compatible storage; like ``LocalFile``. All raise UnavailableError too."""

    def __init__(self, url: str, endpoint: str | None) -> None:
        """Raises JobFailedError for a URL that names no object, or settings that the store refuses."""
        parts = urlsplit(url)
        self._url = url
        self._key = parts.path.lstrip("/")
        if not parts.netloc or not self._key:
            raise JobFailedError(f"{url}: names no object; s3://bucket/key does")
        try:
            self._store = s3_store(parts.netloc, endpoint)
        except ValueError as error:
            raise JobFailedError(f"{url}: {error}") from None

    def fingerprint(self) -> Fingerprint:
        import obstore

        with self._explained():
            found = obstore.head(self._store, self._key)
        return Fingerprint(found["size"], found["e_tag"] or found["last_modified"].isoformat())

    def read(self, offset: int, length: int, expected: Fingerprint) -> bytes:
        import obstore

        end = min(offset + length, expected.size_bytes)
        if end <= offset:
            return b""
        options: Any = {"range": (offset, end)}
        if expected.version.startswith('"'):
            options["if_match"] = expected.version
        with self._explained():
            found = obstore.get(self._store, self._key, options=options)
            _check(self._url, Fingerprint(found.meta["size"], found.meta["e_tag"] or expected.version), expected)
            return bytes(found.bytes())

    def open(self) -> IO[bytes]:
        return io.BufferedReader(_SeekableBlob(self, self.fingerprint()), BLOCK_BYTES)

    def write(self, blocks: Iterable[bytes]) -> None:
        import obstore

        # Not ``put`` of the blocks: their source may read other objects, which the store cannot do meanwhile.
        with self._explained():
            file = obstore.open_writer(
                self._store, self._key, buffer_size=_UPLOAD_BYTES, max_concurrency=_PARALLEL_UPLOADS
            )
        for block in blocks:
            with self._explained():
                file.write(block)
        # Without ``close`` there is no object: a failure leaves none behind.
        with self._explained():
            file.close()

    def delete(self) -> None:
        import obstore

        with self._explained():
            obstore.delete(self._store, self._key)

    def delete_below(self) -> None:
        """Remove every object whose key begins with this one and a slash."""
        import obstore

        with self._explained():
            for found in obstore.list(self._store, prefix=self._key):
                obstore.delete(self._store, [entry["path"] for entry in found])

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from obstore import exceptions

        try:
            yield
        except (exceptions.NotFoundError, FileNotFoundError):
            raise NoSuchInputError(f"{self._url}: there is no such object") from None
        except exceptions.PreconditionError:
            raise InputChangedError(f"{self._url} has changed since the job was submitted") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
            raise JobFailedError(f"{self._url}: the credentials of the environment may not do this") from None
        except (exceptions.BaseError, OSError) as error:
            raise UnavailableError(f"{self._url}: {type(error).__name__}") from None


Blob = LocalFile | S3Object


class _SeekableBlob(io.RawIOBase):
    """An object as a seekable file with constant content."""

    def __init__(self, blob: S3Object, fingerprint: Fingerprint) -> None:
        super().__init__()
        self._blob = blob
        self._fingerprint = fingerprint
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._fingerprint.size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        found = self._blob.read(self._position, len(view), self._fingerprint)
        view[: len(found)] = found
        self._position += len(found)
        return len(found)


def file_url(files_url: str, tenant: str, file_id: str) -> str:
    """URL of a file. Both names must be validated or generated: they become part of a path."""
    return f"{files_url.rstrip('/')}/{tenant}/{file_id}"


def blob_of(url: str, endpoint: str | None = None) -> Blob:
    """The file or object of a URL. Raises JobFailedError for an unknown scheme."""
    if url.startswith("s3://"):
        return S3Object(url, endpoint)
    if "://" in url:
        raise JobFailedError(f"{url.partition('://')[0]}: only files and s3:// are known")
    return LocalFile(Path(url))


def absolute(url: str) -> str:
    """The path as an absolute one; other URLs unchanged."""
    return url if not url or "://" in url else str(Path(url).absolute())


def are_same(url: str, other: str) -> bool:
    """Whether two URLs name the same file or object."""
    return _whole(url) == _whole(other)


def _whole(url: str) -> tuple[str, str]:
    if url.startswith("s3://"):
        parts = urlsplit(url)
        return parts.netloc, parts.path.lstrip("/")
    return "", os.path.realpath(url)


def delete_folder(url: str, endpoint: str | None) -> None:
    """Remove everything below a URL. Raises UnavailableError, JobFailedError."""
    blob = blob_of(url, endpoint)
    if isinstance(blob, S3Object):
        blob.delete_below()
    else:
        shutil.rmtree(url, ignore_errors=True)


def blocks_of(blob: Blob, fingerprint: Fingerprint) -> Iterator[bytes]:
    """The content, block by block."""
    offset = 0
    while offset < fingerprint.size_bytes:
        block = blob.read(offset, BLOCK_BYTES, fingerprint)
        if not block:
            return
        yield block
        offset += len(block)


def _check(name: str, found: Fingerprint, expected: Fingerprint) -> None:
    if found != expected:
        raise InputChangedError(
            f"{name} has changed since the job was submitted: {found.size_bytes} bytes, then {expected.size_bytes}"
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NoSuchInputError(f"{path}: there is no such file") from None
    except OSError as error:
        raise JobFailedError(f"{path}: {error.strerror or type(error).__name__}") from None
