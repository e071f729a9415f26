"""Artifacts in folders of this machine, such as a mounted share."""

from collections.abc import Iterator
from pathlib import Path

from fairlane_server.artifacts.digest import ArtifactError, ListedFile, files_below, read_blocks
from fairlane_server.artifacts.source import ResolvedArtifact


class FolderSource:
    """References are paths, relative to ``base`` unless absolute."""

    def __init__(self, base: Path) -> None:
        self._base = base.absolute()

    def resolve(self, reference: str) -> ResolvedArtifact:
        if "\0" in reference:
            raise ArtifactError(f"{reference!r} is no path")
        folder = self._base / reference
        return ResolvedArtifact(reference, str(folder), tuple(files_below(folder)))

    def blocks(self, artifact: ResolvedArtifact, file: ListedFile) -> Iterator[bytes]:
        return read_blocks(Path(artifact.location), file)
