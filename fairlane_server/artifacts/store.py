"""Artifacts of versions: found at their sources, kept in the cache of this machine."""

import hashlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fairlane.logs import get_logger
from fairlane.records import ModelVersion
from fairlane.settings import Settings
from fairlane_server.artifacts.cache import ArtifactCache, CachedArtifact
from fairlane_server.artifacts.digest import ArtifactError, DigestedFile, check_listing, digest_of
from fairlane_server.artifacts.folder import FolderSource
from fairlane_server.artifacts.source import ArtifactSource, ResolvedArtifact, StopWait, check_going_on, download

if TYPE_CHECKING:
    from fairlane_server.artifacts.mlflow import MlflowSource

log = get_logger(__name__)

MLFLOW = "models:/"
S3 = "s3://"

OpenSource = Callable[[], ArtifactSource]


class ArtifactStore:
    """Sources by the beginnings of their references, and a cache. Any thread may use it."""

    def __init__(self, sources: dict[str, OpenSource], folders: ArtifactSource, cache: ArtifactCache) -> None:
        """A source is opened when a reference first begins with its key; what no key begins is a folder."""
        self._openers = sources
        self._opened: dict[str, ArtifactSource] = {}
        self._folders = folders
        self.cache = cache

    def resolve(self, reference: str) -> ResolvedArtifact:
        """Find an artifact. Raises ArtifactError."""
        resolved = self._source(reference).resolve(reference)
        check_listing(resolved.files, self.cache.max_bytes)
        return resolved

    def add(self, artifact: ResolvedArtifact, stop: StopWait) -> CachedArtifact:
        """Download an artifact whose digest is not known. Raises ArtifactError, StoppedError."""
        return self.cache.add(_size_of(artifact), partial(self._download, artifact, stop=stop), stop)

    def get(self, artifact: ResolvedArtifact, digest: str, stop: StopWait) -> CachedArtifact:
        """The artifact if it has this digest. Raises DigestMismatchError, ArtifactError, StoppedError."""
        fill = partial(self._download, artifact, stop=stop)
        return self.cache.get(digest, partial(_size_of, artifact), fill, stop)

    def of_version(self, version: ModelVersion, stop: StopWait) -> CachedArtifact:
        """The files of a version with a digest; its source is asked only when they are not in the cache.

        Raises DigestMismatchError, ArtifactError, StoppedError.
        """
        if version.artifact_digest is None or version.source is None:
            raise ArtifactError(f"version {version.version} of {version.model} has no digest or no source")
        found: list[ResolvedArtifact] = []

        def size_bytes() -> int:
            found.append(self._exact(version.source or ""))
            return _size_of(found[0])

        def fill(folder: Path) -> None:
            log.info("artifact_download", model=version.model, version=version.version, source=version.source)
            self._download(found[0], folder, stop)

        return self.cache.get(version.artifact_digest, size_bytes, fill, stop)

    def digest(self, artifact: ResolvedArtifact, stop: StopWait) -> str:
        """Read every byte at the source and keep none. Raises ArtifactError, StoppedError."""
        check_listing(artifact.files, self.cache.max_bytes)
        source = self._source(artifact.source)
        digested: list[DigestedFile] = []
        for file in artifact.files:
            content, size_bytes = hashlib.sha256(), 0
            for block in source.blocks(artifact, file):
                content.update(block)
                size_bytes += len(block)
                check_going_on(stop)
                if size_bytes > file.size_bytes:
                    break
            digested.append(DigestedFile(file.path, size_bytes, content.hexdigest()))
        return digest_of(digested)

    def _exact(self, reference: str) -> ResolvedArtifact:
        artifact = self.resolve(reference)
        if artifact.source != reference:
            raise ArtifactError(f"{reference} is {artifact.source} now and may change: a version names the latter")
        return artifact

    def _download(self, artifact: ResolvedArtifact, folder: Path, stop: StopWait) -> None:
        download(self._source(artifact.source), artifact, folder, self.cache.max_bytes, stop)

    def _source(self, reference: str) -> ArtifactSource:
        for beginning, opener in self._openers.items():
            if reference.startswith(beginning):
                if beginning not in self._opened:
                    self._opened[beginning] = opener()
                return self._opened[beginning]
        if "://" in reference or reference.startswith("models:"):
            known = ", ".join(self._openers)
            raise ArtifactError(f"{reference}: no such source; known: {known} and folders")
        return self._folders


def artifact_store(settings: Settings) -> ArtifactStore:
    """The sources that the settings allow, and the cache of MODELS_CACHE_DIR."""
    cache = ArtifactCache(settings.models_cache_dir, settings.models_cache_max_bytes, settings.models_cache_timeout_s)
    sources: dict[str, OpenSource] = {S3: _s3_source, MLFLOW: partial(mlflow_source, settings)}
    return ArtifactStore(sources, FolderSource(settings.models_dir), cache)


def _s3_source() -> ArtifactSource:
    _check_installed("obstore", S3)
    from fairlane_server.artifacts.s3 import S3Source

    return S3Source()


def mlflow_source(settings: Settings) -> "MlflowSource":
    """MLflow's registry as the settings name it. Raises ArtifactError."""
    _check_installed("httpx", MLFLOW)
    from fairlane_server.artifacts.mlflow import MlflowServer, MlflowSource
    from fairlane_server.artifacts.s3 import S3Source

    if settings.mlflow_tracking_uri is None:
        raise ArtifactError(f"{MLFLOW} needs MLFLOW_TRACKING_URI, the address of the MLflow server")
    server = MlflowServer(
        settings.mlflow_tracking_uri,
        settings.mlflow_tracking_token,
        settings.mlflow_tracking_username,
        settings.mlflow_tracking_password,
        settings.mlflow_tracking_server_cert_path,
    )
    return MlflowSource(server, S3Source())


def _check_installed(package: str, beginning: str) -> None:
    if find_spec(package) is None:
        raise ArtifactError(f"{beginning} needs the package {package}: pip install 'fairlane[artifacts]'")


def _size_of(artifact: ResolvedArtifact) -> int:
    return sum(file.size_bytes for file in artifact.files)
