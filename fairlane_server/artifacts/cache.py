"""Artifacts on this machine's disk, one folder for each digest, shared by its processes.

    MODELS_CACHE_DIR/sha256-<digest>/       an artifact, whole
    MODELS_CACHE_DIR/fetch-<bytes>-<random>/ a download; its owner holds a lock on it, and without one it is removed
    MODELS_CACHE_DIR/discarded-<random>/    on its way to be deleted
    MODELS_CACHE_DIR/locks/<digest>.use     shared by those who use the artifact, exclusive for who removes it; its time
                                            is that of the last use
    MODELS_CACHE_DIR/locks/<digest>.fetch   of who downloads it
    MODELS_CACHE_DIR/locks/room             of who makes room

Locks are the kernel's: a process that is killed leaves none. An artifact comes into its place by one rename, and is
read and compared with its digest each time it is asked for: what is damaged is downloaded again, and replaced when that
is verified. What cannot be read is not replaced: others may use it.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fairlane.logs import get_logger
from fairlane_server.artifacts.digest import (
    DIGEST_PATTERN,
    ArtifactError,
    UnreadableError,
    digest_of_folder,
)
from fairlane_server.artifacts.locks import FileLock, LockTimeoutError
from fairlane_server.artifacts.source import StopWait, check_going_on
from fairlane_server.private_files import sync_folder

log = get_logger(__name__)

Fill = Callable[[Path], None]
"""Writes an artifact into an empty folder, durably. Raises ArtifactError, StoppedError."""

_ENTRY = re.compile(r"sha256-[0-9a-f]{64}")
_FETCH = re.compile(r"fetch-([0-9]{1,18})-[0-9a-f]{16}")
_DISCARDED = "discarded-"
_ROOM_TIMEOUT_S = 60.0
_USE_TIMEOUT_S = 60.0
"""Those who make room hold these locks only while they rename and delete."""


class DigestMismatchError(ArtifactError):
    """The files are not those that were registered."""


@dataclass(frozen=True, slots=True)
class CachedArtifact:
    """An artifact in the cache, which stays there until ``release`` or the end of the process."""

    digest: str
    path: Path
    lock: FileLock

    def release(self) -> None:
        self.lock.release()


class ArtifactCache:
    """Any thread of any process may use it; the folder must be on a disk of this machine."""

    def __init__(
        self, folder: Path, max_bytes: int, fetch_timeout_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """``fetch_timeout_s`` bounds the wait for another process that downloads the same artifact."""
        self._folder = folder.absolute()
        self._locks = self._folder / "locks"
        self.max_bytes = max_bytes
        self._fetch_timeout_s = fetch_timeout_s
        self._clock = clock

    def get(self, digest: str, size_bytes: Callable[[], int], fill: Fill, stop: StopWait) -> CachedArtifact:
        """The artifact with this digest, downloaded if it is not there or damaged. ``size_bytes`` is asked for the size
        of the download before it begins.

        Raises DigestMismatchError when the download has another digest, ArtifactError, StoppedError.
        """
        if not DIGEST_PATTERN.fullmatch(digest):
            raise ArtifactError(f"{digest!r} is no digest: sha256: and 64 hexadecimal digits")
        with self._explained():
            use = self._in_use(digest, stop)
            try:
                if not self._is_whole(digest, stop):
                    with FileLock.on(self._lock_of(digest, "fetch"), stop, self._fetch_timeout_s):
                        # Another process may have downloaded it meanwhile.
                        if not self._is_whole(digest, stop):
                            self._fetch(digest, size_bytes(), fill, stop)
                return self._used(digest, use)
            except BaseException:
                use.release()
                raise

    def add(self, size_bytes: int, fill: Fill, stop: StopWait) -> CachedArtifact:
        """Download an artifact whose digest is not known yet. Raises ArtifactError, StoppedError."""
        with self._explained(), self._download(size_bytes, fill, stop) as folder:
            digest = digest_of_folder(folder, self.max_bytes, partial(check_going_on, stop))
            use = self._in_use(digest, stop)
            try:
                with FileLock.on(self._lock_of(digest, "fetch"), stop, self._fetch_timeout_s):
                    if not self._is_whole(digest, stop):
                        self._move_in(folder, digest, stop)
                return self._used(digest, use)
            except BaseException:
                use.release()
                raise

    def _fetch(self, digest: str, size_bytes: int, fill: Fill, stop: StopWait) -> None:
        with self._download(size_bytes, fill, stop, in_place_of=self._entry(digest)) as folder:
            found = digest_of_folder(folder, self.max_bytes, partial(check_going_on, stop))
            if found != digest:
                raise DigestMismatchError(f"it has the digest {found}, and was registered with {digest}")
            self._move_in(folder, digest, stop)

    @contextmanager
    def _download(self, size_bytes: int, fill: Fill, stop: StopWait, in_place_of: Path | None = None) -> Iterator[Path]:
        """A filled folder, which is removed unless it was moved away. What it replaces takes no room."""
        if size_bytes > self.max_bytes:
            raise ArtifactError(f"it has {size_bytes} bytes; MODELS_CACHE_MAX_BYTES is {self.max_bytes}")
        folder = self._folder / f"fetch-{size_bytes}-{secrets.token_hex(8)}"
        with self._room(stop):
            self._make_room(size_bytes, in_place_of)
            folder.mkdir(mode=0o700)
            lock = FileLock.try_on_folder(folder)
        try:
            fill(folder)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                lock.release()

    def _move_in(self, folder: Path, digest: str, stop: StopWait) -> None:
        # Those who make room count a folder under either of its names, never under both or none.
        with self._room(stop):
            self._discard(self._entry(digest))
            folder.rename(self._entry(digest))
            sync_folder(self._folder)

    def _is_whole(self, digest: str, stop: StopWait) -> bool:
        """Whether the artifact is here as it should be. Raises UnreadableError where that cannot be seen."""
        entry = self._entry(digest)
        if not entry.is_dir():
            return False
        try:
            found = digest_of_folder(entry, going_on=partial(check_going_on, stop))
        except UnreadableError:
            raise
        except ArtifactError as error:
            found = str(error)
        if found != digest:
            log.warning("artifact_damaged", digest=digest, found=found)
        return found == digest

    def _make_room(self, size_bytes: int, in_place_of: Path | None) -> None:
        """Remove abandoned downloads, and artifacts that nobody uses, the one used longest ago first, until this much
        fits. Raises ArtifactError when it does not. What is to be replaced stays, and counts as gone."""
        taken_bytes = 0
        entries: list[tuple[float, int, Path]] = []
        for path in list(self._folder.iterdir()):
            if path.name.startswith(_DISCARDED):
                shutil.rmtree(path, ignore_errors=True)
            elif found := _FETCH.fullmatch(path.name):
                taken_bytes += self._bytes_of_download(path, int(found[1]))
            elif _ENTRY.fullmatch(path.name) and path != in_place_of:
                entries.append((self._last_use(path), _bytes_below(path), path))
        taken_bytes += sum(entry_bytes for _, entry_bytes, _ in entries)
        for _, entry_bytes, path in sorted(entries):
            if taken_bytes + size_bytes <= self.max_bytes:
                return
            lock = FileLock.try_on(self._locks / f"{path.name}.use")
            if lock is not None:
                with lock:
                    self._discard(path)
                taken_bytes -= entry_bytes
                log.info("artifact_evicted", digest=path.name.replace("-", ":"), size_bytes=entry_bytes)
        if taken_bytes + size_bytes > self.max_bytes:
            raise ArtifactError(
                f"there is no room for its {size_bytes} bytes: artifacts in use and downloads have {taken_bytes}, and "
                f"MODELS_CACHE_MAX_BYTES is {self.max_bytes}"
            )

    @staticmethod
    def _bytes_of_download(folder: Path, size_bytes: int) -> int:
        """What a download will take; 0 for one whose process is gone, which is removed."""
        try:
            lock = FileLock.try_on_folder(folder)
        except OSError:
            # It has just ended.
            return 0
        if lock is None:
            return size_bytes
        with lock:
            shutil.rmtree(folder, ignore_errors=True)
        return 0

    def _discard(self, entry: Path) -> None:
        """Remove an artifact: by its name at once, whatever interrupts the rest."""
        discarded = self._folder / f"{_DISCARDED}{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            entry.rename(discarded)
            shutil.rmtree(discarded, ignore_errors=True)

    def _entry(self, digest: str) -> Path:
        return self._folder / digest.replace(":", "-")

    def _lock_of(self, digest: str, kind: str) -> Path:
        return self._locks / f"{digest.replace(':', '-')}.{kind}"

    def _room(self, stop: StopWait) -> FileLock:
        return FileLock.on(self._locks / "room", stop, _ROOM_TIMEOUT_S)

    def _in_use(self, digest: str, stop: StopWait) -> FileLock:
        return FileLock.on(self._lock_of(digest, "use"), stop, _USE_TIMEOUT_S, shared=True)

    def _used(self, digest: str, lock: FileLock) -> CachedArtifact:
        now = self._clock()
        os.utime(self._lock_of(digest, "use"), (now, now))
        return CachedArtifact(digest, self._entry(digest), lock)

    def _last_use(self, entry: Path) -> float:
        try:
            return (self._locks / f"{entry.name}.use").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            self._locks.mkdir(mode=0o700, parents=True, exist_ok=True)
            yield
        except LockTimeoutError:
            raise ArtifactError(f"{self._folder}: another process holds its lock for too long") from None
        except OSError as error:
            raise ArtifactError(f"{self._folder} cannot be used: {error.strerror}") from None


def _bytes_below(folder: Path) -> int:
    """The size of what is in a folder; another process may be removing it."""
    size_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size_bytes += Path(parent, name).lstat().st_size
    return size_bytes
