"""Folders and S3 as sources of artifacts, and downloads from sources that say or send what they should not."""

import re
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import obstore
import pytest

from fairlane.records import ModelVersion
from fairlane.settings import Settings
from fairlane_server.artifacts.digest import ArtifactError, ListedFile, digest_of_folder
from fairlane_server.artifacts.folder import FolderSource
from fairlane_server.artifacts.s3 import S3Source
from fairlane_server.artifacts.source import ArtifactUnavailableError, ResolvedArtifact, StoppedError, download
from fairlane_server.artifacts.store import artifact_store
from fairlane_server.s3_storage import s3_store
from tests.kit.artifact_kit import FILES, GIB, TamperedSource, contents, never_stop, store_of, write_files
from tests.kit.artifact_source_suite import ArtifactSourceSuite
from tests.kit.s3_storage import s3_storage

BUCKET = "models"


class FolderShelf:
    """Folders below one."""

    beginning = "/"

    def __init__(self, base: Path) -> None:
        self._base = base
        self.source = FolderSource(base)

    def put(self, files: dict[str, bytes]) -> str:
        return str(write_files(self._base / uuid4().hex, files))

    def replace(self, reference: str, files: dict[str, bytes]) -> None:
        shutil.rmtree(reference)
        write_files(Path(reference), files)

    def missing(self) -> str:
        return str(self._base / "none")


class TestFolders(ArtifactSourceSuite):
    """Of this machine."""

    @pytest.fixture
    def shelf(self, tmp_path_factory: pytest.TempPathFactory) -> FolderShelf:
        return FolderShelf(tmp_path_factory.mktemp("shelf"))


class S3Shelf:
    """Prefixes of a bucket."""

    beginning = "s3://"

    def __init__(self, endpoint: str) -> None:
        self.source = S3Source(endpoint)
        self._store = s3_store(BUCKET, endpoint)

    def put(self, files: dict[str, bytes]) -> str:
        reference = f"s3://{BUCKET}/{uuid4().hex}"
        self._write(reference, files)
        return reference

    def replace(self, reference: str, files: dict[str, bytes]) -> None:
        prefix = reference.removeprefix(f"s3://{BUCKET}/")
        for page in obstore.list(self._store, prefix=prefix):
            obstore.delete(self._store, [found["path"] for found in page])
        self._write(reference, files)

    def missing(self) -> str:
        return f"s3://{BUCKET}/none"

    def _write(self, reference: str, files: dict[str, bytes]) -> None:
        prefix = reference.removeprefix(f"s3://{BUCKET}/")
        for name, content in files.items():
            obstore.put(self._store, f"{prefix}/{name}", content)
        # Another artifact, whose prefix begins like this one's.
        obstore.put(self._store, f"{prefix}-other/file", b"x")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_storage(BUCKET) as endpoint:
        yield endpoint


class TestS3(ArtifactSourceSuite):
    """Storage that speaks S3."""

    @pytest.fixture
    def shelf(self, s3: str) -> S3Shelf:
        return S3Shelf(s3)

    def test_an_object_in_place_of_a_folder_is_no_file(self, shelf: S3Shelf, s3: str, tmp_path: Path) -> None:
        reference = shelf.put(FILES)
        url = f"{s3}/{BUCKET}/{reference.rpartition('/')[2]}/weights/"
        with urllib.request.urlopen(urllib.request.Request(url, data=b"", method="PUT"), timeout=10):  # noqa: S310 - ours
            pass
        download(shelf.source, shelf.source.resolve(reference), tmp_path, GIB, never_stop)
        assert contents(tmp_path) == FILES


def test_storage_without_tls_needs_a_word(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = S3Shelf(s3).put(FILES)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    with pytest.raises(ArtifactError, match="AWS_ENDPOINT_URL begins with http://, which AWS_ALLOW_HTTP=true allows"):
        S3Source().resolve(reference)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert len(S3Source().resolve(reference).files) == len(FILES)


class _SlowObject(BaseHTTPRequestHandler):
    """An object of 10 bytes; each answer takes 0.3 s."""

    content = b"0123456789"
    e_tag = '"first"'

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", self.headers["Range"] or "bytes=0-9")
        assert found is not None
        is_other = self.headers["If-Match"] not in (None, self.e_tag)
        body = b"" if is_other else self.content[int(found[1]) : int(found[2]) + 1]
        threading.Event().wait(0.3)
        self.send_response(412 if is_other else 206)
        self.send_header("Content-Range", f"bytes {found[1]}-{found[2]}/{len(self.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", self.e_tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3Source, type[_SlowObject]]]:
    """Storage whose object takes longer than the time of one request."""

    class Handler(_SlowObject):
        pass

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "test")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield S3Source(f"http://127.0.0.1:{server.server_port}", block_bytes=2, timeout_s=1.0), Handler
        server.shutdown()


SLOW = ResolvedArtifact("s3://b/m", "s3://b/m", (ListedFile("a", 10),))


def test_a_file_may_take_longer_than_a_request(slow: tuple[S3Source, type[_SlowObject]], tmp_path: Path) -> None:
    source, _ = slow
    download(source, SLOW, tmp_path, GIB, never_stop)
    assert contents(tmp_path) == {"a": b"0123456789"}


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(slow: tuple[S3Source, type[_SlowObject]]) -> None:
    source, handler = slow
    blocks = source.blocks(SLOW, SLOW.files[0])
    assert next(blocks) == b"01"
    handler.content, handler.e_tag = b"abcdefghij", '"second"'
    with pytest.raises(ArtifactUnavailableError, match="an object was replaced while it was read"):
        next(blocks)
    handler.content = b"abc"
    with pytest.raises(ArtifactError, match="'a' changed its size"):
        next(source.blocks(SLOW, SLOW.files[0]))


@pytest.mark.parametrize("reference", ["s3://", "s3://bucket", "s3://bucket/", "s3:///key", "s3://bucket/key?x=1"])
def test_what_names_no_folder_of_a_bucket_is_refused(reference: str) -> None:
    with pytest.raises(ArtifactError, match="names no folder of a bucket"):
        S3Source().resolve(reference)


def listed(*paths: str) -> Callable[[tuple[ListedFile, ...]], tuple[ListedFile, ...]]:
    """Other names for the files of a listing."""
    return lambda _: tuple(ListedFile(path, 1) for path in paths)


@pytest.mark.parametrize("path", ["../outside", "/outside", "a/../../outside", "a\0b", ""])
def test_no_name_of_a_file_leads_out_of_the_folder(tmp_path: Path, path: str) -> None:
    origin, into = write_files(tmp_path / "origin", FILES), tmp_path / "into"
    into.mkdir()
    source = TamperedSource(FolderSource(tmp_path), files=listed(path))
    with pytest.raises(ArtifactError):
        download(source, source.resolve(origin.name), into, GIB, never_stop)
    assert not contents(into)
    assert not (tmp_path / "outside").exists()


def test_a_file_that_is_longer_than_it_says_ends_while_it_is_read(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", {"a": b"1"})
    (tmp_path / "into").mkdir()

    def endless(_: Iterator[bytes]) -> Iterator[bytes]:
        while True:
            yield b"x" * 1_000

    source = TamperedSource(FolderSource(tmp_path), blocks=endless)
    with pytest.raises(ArtifactError, match="'a' is longer than the 1 bytes listed"):
        download(source, source.resolve("origin"), tmp_path / "into", GIB, never_stop)


def test_more_bytes_than_allowed_are_refused_before_the_first_is_read(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", FILES)
    with pytest.raises(ArtifactError, match="more than 100 bytes"):
        download(FolderSource(tmp_path), FolderSource(tmp_path).resolve("origin"), tmp_path / "into", 100, never_stop)


def test_more_bytes_than_the_disk_has_are_refused(tmp_path: Path) -> None:
    artifact = ResolvedArtifact("big", "big", (ListedFile("a", 1 << 60),))
    with pytest.raises(ArtifactError, match="needs 1152921504606846976 bytes of disk; free are "):
        download(FolderSource(tmp_path), artifact, tmp_path, 1 << 61, never_stop)


class Unsteady:
    """Blocks whose source fails, so many times, after a few bytes."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    def __call__(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        whole = b"".join(blocks)
        if self.left:
            self.left -= 1
            yield whole[:2]
            raise ArtifactUnavailableError("away")
        yield whole


def at_once(_seconds: float) -> bool:
    """A wait that takes no time."""
    return False


def test_a_source_that_is_away_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", {"a": b"12345"})
    (tmp_path / "into").mkdir()
    source = TamperedSource(FolderSource(tmp_path), blocks=Unsteady(3))
    download(source, source.resolve("origin"), tmp_path / "into", GIB, at_once)
    assert contents(tmp_path / "into") == {"a": b"12345"}
    tries = Unsteady(4)
    source = TamperedSource(FolderSource(tmp_path), blocks=tries)
    with pytest.raises(ArtifactUnavailableError):
        download(source, source.resolve("origin"), tmp_path / "into", GIB, at_once)
    assert tries.left == 0


def test_a_download_ends_with_its_process(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", {"a": b"12345"})
    (tmp_path / "into").mkdir()
    with pytest.raises(StoppedError):
        download(
            FolderSource(tmp_path), FolderSource(tmp_path).resolve("origin"), tmp_path / "into", GIB, lambda _: True
        )


def version(source: str, digest: str) -> ModelVersion:
    return ModelVersion("m", "1", "p", "torch", ("classify",), ".", 1, 0, source=source, artifact_digest=digest)


def test_the_files_of_a_version_are_asked_for_once(tmp_path: Path) -> None:
    origin = write_files(tmp_path / "origin", FILES)
    store = store_of(tmp_path / "cache")
    one = version(str(origin), digest_of_folder(origin))
    assert contents(store.of_version(one, never_stop).path) == FILES
    shutil.rmtree(origin)
    assert contents(store.of_version(one, never_stop).path) == FILES


def test_a_source_that_may_become_another_is_refused(tmp_path: Path) -> None:
    origin = write_files(tmp_path / "origin", FILES)

    class Alias(FolderSource):
        def resolve(self, reference: str) -> ResolvedArtifact:
            return replace(super().resolve(str(origin)), source="alias:3")

    store = store_of(tmp_path / "cache", {"alias:": lambda: Alias(tmp_path)})
    with pytest.raises(ArtifactError, match="alias:latest is alias:3 now and may change: a version names the latter"):
        store.of_version(version("alias:latest", digest_of_folder(origin)), never_stop)
    assert store.of_version(version("alias:3", digest_of_folder(origin)), never_stop).digest == digest_of_folder(origin)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("gs://bucket/model", "no such source; known: s3://, models:/ and folders"),
        ("models:name", "no such source"),
        ("models:/name/1", "models:/ needs MLFLOW_TRACKING_URI"),
        ("none", "none cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_resolved_says_why(tmp_path: Path, reference: str, reason: str) -> None:
    store = artifact_store(Settings(models_cache_dir=tmp_path / "cache", models_dir=tmp_path))
    with pytest.raises(ArtifactError, match=reason):
        store.resolve(reference)
