"""What every source of artifacts does. A test class takes it over and says in the fixture ``shelf`` which one."""

from pathlib import Path
from typing import Protocol

import pytest

from fairlane_server.artifacts.digest import ArtifactError, digest_of_folder
from fairlane_server.artifacts.source import ArtifactSource, download
from tests.kit.artifact_kit import FILES, GIB, contents, never_stop, store_of, write_files


class Shelf(Protocol):
    """A source and a place behind it."""

    source: ArtifactSource
    beginning: str
    """That of its references."""

    def put(self, files: dict[str, bytes]) -> str:
        """A new artifact; its reference."""

    def replace(self, reference: str, files: dict[str, bytes]) -> None:
        """Other files in its place."""

    def missing(self) -> str:
        """The reference of an artifact that is not there."""


class ArtifactSourceSuite:
    """Needs the fixture ``shelf``."""

    def test_what_is_downloaded_is_what_is_there(self, shelf: Shelf, tmp_path: Path) -> None:
        artifact = shelf.source.resolve(shelf.put(FILES))
        assert {file.path: file.size_bytes for file in artifact.files} == {name: len(FILES[name]) for name in FILES}
        download(shelf.source, artifact, tmp_path, GIB, never_stop)
        assert contents(tmp_path) == FILES

    def test_what_it_resolves_to_is_exact(self, shelf: Shelf) -> None:
        exact = shelf.source.resolve(shelf.put(FILES)).source
        assert shelf.source.resolve(exact).source == exact

    def test_large_files_come_whole(self, shelf: Shelf, tmp_path: Path) -> None:
        files = {"weights": bytes(range(251)) * 100_000}
        download(shelf.source, shelf.source.resolve(shelf.put(files)), tmp_path, GIB, never_stop)
        assert contents(tmp_path) == files

    def test_the_digest_of_a_folder_is_the_same_wherever_it_is(self, shelf: Shelf, tmp_path: Path) -> None:
        store = store_of(tmp_path / "cache", {shelf.beginning: lambda: shelf.source})
        artifact = store.resolve(shelf.put(FILES))
        expected = digest_of_folder(write_files(tmp_path / "same", FILES))
        assert store.digest(artifact, never_stop) == expected
        assert store.add(artifact, never_stop).digest == expected

    def test_replaced_files_are_found(self, shelf: Shelf, tmp_path: Path) -> None:
        store = store_of(tmp_path, {shelf.beginning: lambda: shelf.source})
        reference = shelf.put(FILES)
        registered = store.digest(store.resolve(reference), never_stop)
        other = FILES | {"model.json": b'{"classes": 11}'}
        shelf.replace(reference, other)
        assert store.digest(store.resolve(reference), never_stop) != registered
        with pytest.raises(ArtifactError, match="and was registered with"):
            store.get(store.resolve(reference), registered, never_stop)

    def test_what_is_not_there_is_said(self, shelf: Shelf) -> None:
        with pytest.raises(ArtifactError):
            shelf.source.resolve(shelf.missing())

    def test_files_that_vanish_are_said(self, shelf: Shelf, tmp_path: Path) -> None:
        reference = shelf.put(FILES)
        artifact = shelf.source.resolve(reference)
        shelf.replace(reference, {"other": b"x"})
        with pytest.raises(ArtifactError):
            download(shelf.source, artifact, tmp_path, GIB, never_stop)
