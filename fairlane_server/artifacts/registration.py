"""Registration of a version with its files: resolved, downloaded, and described by what they are."""

from dataclasses import dataclass, replace
from functools import partial

from fairlane.records import ModelMetric, ModelVersion
from fairlane_server.artifacts.description import Description, described_by
from fairlane_server.artifacts.digest import ArtifactError
from fairlane_server.artifacts.source import StopWait, with_retries
from fairlane_server.artifacts.store import ArtifactStore


@dataclass(frozen=True, slots=True)
class FetchedArtifact:
    """The files of a version as they were found. ``source`` is exact: no alias that may move."""

    source: str
    digest: str
    metrics: tuple[ModelMetric, ...]
    description: Description


def fetch_artifact(store: ArtifactStore, version: ModelVersion, stop: StopWait) -> FetchedArtifact:
    """Get the files that the version's ``source`` names into the cache. If it has a digest, they must have it.

    Raises ArtifactError, StoppedError.
    """
    resolved = with_retries(partial(store.resolve, version.source or ""), stop)
    if version.artifact_digest is None:
        cached = store.add(resolved, stop)
    else:
        cached = store.get(resolved, version.artifact_digest, stop)
    try:
        if not (cached.path / version.path).exists():
            raise ArtifactError(f"path: there is no {version.path!r} in {resolved.source}")
        return FetchedArtifact(resolved.source, cached.digest, resolved.metrics, described_by(cached.path))
    finally:
        cached.release()


def with_artifact(version: ModelVersion, found: FetchedArtifact, *, is_new: bool) -> ModelVersion:
    """The version with the source and the digest of its files. Pure. A new one gets the metrics, the signature and the
    requirements that it does not say itself; those of a published one are what they were when it was registered."""
    named = replace(version, source=found.source, artifact_digest=found.digest)
    if not is_new:
        return named
    return replace(
        named,
        metrics=version.metrics or found.metrics,
        signature=version.signature or found.description.signature,
        requirements=version.requirements or found.description.requirements,
    )
