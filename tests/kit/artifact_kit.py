"""Artifacts of tests: folders, sources that misbehave, and caches."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from fairlane_server.artifacts.cache import ArtifactCache, CachedArtifact
from fairlane_server.artifacts.digest import ListedFile, digest_of_folder
from fairlane_server.artifacts.folder import FolderSource
from fairlane_server.artifacts.source import ArtifactSource, ResolvedArtifact, StopWait, download
from fairlane_server.artifacts.store import ArtifactStore, OpenSource

GIB = 1 << 30
FILES = {"model.json": b'{"classes": 10}', "weights/model.pt2": bytes(range(256)) * 40, "empty": b""}


def never_stop(seconds: float) -> bool:
    """A wait that nothing ends early."""
    return threading.Event().wait(seconds)


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def cache_of(folder: Path, max_bytes: int = GIB, clock: Callable[[], float] = time.time) -> ArtifactCache:
    return ArtifactCache(folder, max_bytes, 60.0, clock)


def store_of(folder: Path, sources: dict[str, OpenSource] | None = None, max_bytes: int = GIB) -> ArtifactStore:
    """A store with its cache in ``folder``; folders are absolute paths."""
    return ArtifactStore(sources or {}, FolderSource(Path("/")), cache_of(folder, max_bytes))


def cached(
    cache: ArtifactCache, origin: Path, digest: str | None = None, stop: StopWait = never_stop
) -> CachedArtifact:
    """The folder ``origin`` in the cache, under the digest that it has or is said to have."""
    source = FolderSource(origin.parent)
    artifact = source.resolve(origin.name)
    size_bytes = sum(file.size_bytes for file in artifact.files)

    def fill(folder: Path) -> None:
        download(source, artifact, folder, cache.max_bytes, stop)

    return cache.get(digest or digest_of_folder(origin), lambda: size_bytes, fill, stop)


class TamperedSource:
    """A source whose answers a test changes."""

    def __init__(
        self,
        source: ArtifactSource,
        files: Callable[[tuple[ListedFile, ...]], tuple[ListedFile, ...]] = lambda files: files,
        blocks: Callable[[Iterator[bytes]], Iterator[bytes]] = lambda blocks: blocks,
    ) -> None:
        self._source = source
        self._files = files
        self._blocks = blocks

    def resolve(self, reference: str) -> ResolvedArtifact:
        artifact = self._source.resolve(reference)
        return replace(artifact, files=self._files(artifact.files))

    def blocks(self, artifact: ResolvedArtifact, file: ListedFile) -> Iterator[bytes]:
        return self._blocks(self._source.blocks(artifact, file))
