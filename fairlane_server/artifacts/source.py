"""Port of the places that hold artifacts, and the download from any of them into a folder."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from fairlane.backoff import Backoff
from fairlane.records import ModelMetric
from fairlane_server.artifacts.digest import ArtifactError, ListedFile, check_listing
from fairlane_server.private_files import sync_folder

_T = TypeVar("_T")

StopWait = Callable[[float], bool]
"""Waits at most so many seconds; True as soon as the work is to end."""

_ATTEMPTS = 4
_BACKOFF = Backoff(first_s=0.5, longest_s=10.0)
_SPARE_BYTES = 64 << 20
"""Of a disk: never taken by a download."""


class ArtifactUnavailableError(ArtifactError):
    """The source does not answer; another try may succeed."""


class StoppedError(Exception):
    """The process is to end before the work is done."""


@dataclass(frozen=True, slots=True)
class ResolvedArtifact:
    """An artifact at its source.

    ``source`` is the reference of exactly this artifact: an alias is resolved to the version that has it now. Where the
    source can replace the bytes, the digest says whether it did. ``location`` is where the files are. ``metrics`` are
    what the source knows of the version.
    """

    source: str
    location: str
    files: tuple[ListedFile, ...]
    metrics: tuple[ModelMetric, ...] = ()


class ArtifactSource(Protocol):
    """A kind of storage or registry. Every error is an ArtifactError; ArtifactUnavailableError where another try may
    succeed. Names and sizes that it returns are checked by its callers."""

    def resolve(self, reference: str) -> ResolvedArtifact:
        """Find an artifact and list its files."""

    def blocks(self, artifact: ResolvedArtifact, file: ListedFile) -> Iterator[bytes]:
        """The content of one file, in blocks of at most some MiB."""


def check_going_on(stop: StopWait) -> None:
    """Raises StoppedError once the work is to end."""
    if stop(0):
        raise StoppedError


def download(source: ArtifactSource, artifact: ResolvedArtifact, folder: Path, max_bytes: int, stop: StopWait) -> None:
    """Write the files of an artifact into an empty folder; durable on return.

    Names and sizes are checked before the first byte is written, and each file against its size while it is read.
    Nothing is unpacked. Raises ArtifactError, StoppedError.
    """
    total_bytes = check_listing(artifact.files, max_bytes)
    free_bytes = shutil.disk_usage(folder).free - _SPARE_BYTES
    if total_bytes > free_bytes:
        raise ArtifactError(f"{artifact.source} needs {total_bytes} bytes of disk; free are {max(0, free_bytes)}")
    folders = {folder}
    for file in artifact.files:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        folders.update(parent for parent in target.parents if parent.is_relative_to(folder))
        with_retries(partial(_write, source, artifact, file, target, stop), stop)
    for one in folders:
        sync_folder(one)


def with_retries(call: Callable[[], _T], stop: StopWait) -> _T:
    """Call this up to 4 times while a source does not answer. Raises what it raises, and StoppedError."""
    attempt = 1
    while True:
        try:
            return call()
        except ArtifactUnavailableError:
            if attempt == _ATTEMPTS:
                raise
        if stop(_BACKOFF.delay_s(attempt, random.random())):  # noqa: S311 - jitter
            raise StoppedError
        attempt += 1


def _write(source: ArtifactSource, artifact: ResolvedArtifact, file: ListedFile, target: Path, stop: StopWait) -> None:
    left_bytes = file.size_bytes
    try:
        with target.open("wb") as opened:
            for block in source.blocks(artifact, file):
                left_bytes -= len(block)
                if left_bytes < 0:
                    raise ArtifactError(
                        f"{artifact.source}: {file.path!r} is longer than the {file.size_bytes} bytes listed"
                    )
                opened.write(block)
                check_going_on(stop)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise ArtifactError(f"{target} cannot be written: {error.strerror}") from None
    if left_bytes:
        raise ArtifactUnavailableError(f"{artifact.source}: {file.path!r} ended {left_bytes} bytes early")
