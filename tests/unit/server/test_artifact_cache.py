"""The cache of artifacts: shared by processes, bounded, and never half filled."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fairlane_server.artifacts.cache import ArtifactCache, CachedArtifact, DigestMismatchError
from fairlane_server.artifacts.digest import ArtifactError, digest_of_folder
from fairlane_server.artifacts.source import ArtifactUnavailableError, StoppedError
from tests.kit.artifact_kit import FILES, cache_of, cached, contents, never_stop, write_files

KIB = 1 << 10
PATIENCE_S = 60.0


def model(folder: Path, name: str, size_bytes: int = KIB) -> Path:
    """A folder with one file that no other model has."""
    return write_files(folder / name, {"weights": name.encode().ljust(size_bytes, b".")})


def entries(cache: Path) -> set[str]:
    """What is there besides locks."""
    return {path.name for path in cache.iterdir()} - {"locks"}


def entry(origin: Path) -> str:
    return digest_of_folder(origin).replace(":", "-")


def no_download() -> int:
    raise AssertionError("it was downloaded again")


def nothing(_folder: Path) -> None:
    raise AssertionError("it was downloaded again")


@contextmanager
def worker(what: str, cache: Path, origin: Path, max_bytes: int = KIB * KIB) -> Iterator["subprocess.Popen[str]"]:
    """Another process at work on the cache, which is killed at the end."""
    arguments = (sys.executable, "-m", "tests.kit.artifact_worker", what, str(cache), str(origin), str(max_bytes))
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_what_was_downloaded_is_there_and_is_not_downloaded_again(tmp_path: Path) -> None:
    origin, cache = write_files(tmp_path / "origin", FILES), cache_of(tmp_path / "cache")
    first = cached(cache, origin)
    assert contents(first.path) == FILES
    again = cache.get(first.digest, no_download, nothing, never_stop)
    assert again.path == first.path
    assert entries(tmp_path / "cache") == {entry(origin)}


def test_a_download_without_a_known_digest_gets_the_one_it_has(tmp_path: Path) -> None:
    origin, cache = write_files(tmp_path / "origin", FILES), cache_of(tmp_path / "cache")
    for _ in range(2):
        added = cache.add(100_000, lambda folder: void(shutil.copytree(origin, folder, dirs_exist_ok=True)), never_stop)
        assert (added.digest, contents(added.path)) == (digest_of_folder(origin), FILES)
    assert entries(tmp_path / "cache") == {entry(origin)}


def void(_: object) -> None:
    """Any call as one that returns nothing."""


def test_other_files_than_those_registered_are_refused_and_not_kept(tmp_path: Path) -> None:
    origin, cache = write_files(tmp_path / "origin", FILES), cache_of(tmp_path / "cache")
    registered = digest_of_folder(origin)
    (origin / "model.json").write_bytes(b'{"classes": 11}')
    with pytest.raises(DigestMismatchError, match=f"and was registered with {registered}"):
        cached(cache, origin, registered)
    assert entries(tmp_path / "cache") == set()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.json").write_bytes(b'{"classes": 1O}'),
        lambda path: (path / "empty").unlink(),
        lambda path: (path / "more").write_text("x"),
        lambda path: os.truncate(path / "weights/model.pt2", 7),
        lambda path: (path / "out").symlink_to("/etc/hostname"),
    ],
    ids=["another byte", "a file less", "a file more", "a shorter file", "a link"],
)
def test_a_damaged_artifact_is_downloaded_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    origin, cache = write_files(tmp_path / "origin", FILES), cache_of(tmp_path / "cache")
    damage(cached(cache, origin).path)
    assert contents(cached(cache, origin).path) == FILES
    assert entries(tmp_path / "cache") == {entry(origin)}


def test_a_damaged_artifact_stays_until_another_is_there_and_takes_no_room_from_it(tmp_path: Path) -> None:
    origin, size_bytes = write_files(tmp_path / "origin", FILES), sum(map(len, FILES.values()))
    cache = cache_of(tmp_path / "cache", size_bytes)
    with cached(cache, origin).lock:
        damaged = tmp_path / "cache" / entry(origin)
        (damaged / "empty").unlink()

        def away(_folder: Path) -> None:
            raise ArtifactUnavailableError("the source is away")

        with pytest.raises(ArtifactUnavailableError):
            cache.get(digest_of_folder(origin), lambda: size_bytes, away, never_stop)
        assert entries(tmp_path / "cache") == {entry(origin)}
        assert contents(cached(cache, origin).path) == FILES
    assert entries(tmp_path / "cache") == {entry(origin)}


@pytest.mark.parametrize("reason", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_an_artifact_that_cannot_be_read_is_an_error_and_stays(
    tmp_path: Path, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, cache = write_files(tmp_path / "origin", FILES), cache_of(tmp_path / "cache")
    cached(cache, origin).release()
    opened = os.open

    def fail(path: Any, flags: int, mode: int = 0o777) -> int:
        if Path(path).name == "model.json":
            raise OSError(reason, os.strerror(reason))
        return opened(path, flags, mode)

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", fail)
        with pytest.raises(ArtifactError, match=f"'model.json' cannot be read: {os.strerror(reason)}"):
            cache.get(entry(origin).replace("-", ":"), no_download, nothing, never_stop)
    assert contents(tmp_path / "cache" / entry(origin)) == FILES
    assert cached(cache, origin).path.name == entry(origin)


@pytest.mark.parametrize("error", [ArtifactError("bad"), StoppedError(), ArtifactUnavailableError("away")])
def test_a_download_that_fails_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    def fail(folder: Path) -> None:
        write_files(folder, FILES)
        raise error

    cache = cache_of(tmp_path)
    digest = "sha256:" + "0" * 64
    with pytest.raises(type(error)):
        cache.get(digest, lambda: 10, fail, never_stop)
    with pytest.raises(type(error)):
        cache.add(10, fail, never_stop)
    assert entries(tmp_path) == set()


def test_a_digest_that_is_none_is_no_path(tmp_path: Path) -> None:
    for digest in ("../../etc", "sha256:", "sha256:" + "G" * 64, "md5:" + "0" * 64):
        with pytest.raises(ArtifactError, match="is no digest"):
            cache_of(tmp_path / "cache").get(digest, no_download, nothing, never_stop)
    assert not (tmp_path / "cache").exists()


class Models:
    """Models of 1 KiB, and a cache whose clock ticks with each use."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        ticks = itertools.count(1_000)
        self.folder = folder
        self.cache = cache_of(folder / "cache", max_bytes, lambda: float(next(ticks)))

    def use(self, name: str, size_bytes: int = KIB) -> CachedArtifact:
        return cached(self.cache, model(self.folder, name, size_bytes))

    def used(self, *names: str) -> None:
        for name in names:
            self.use(name).release()

    def kept(self, *names: str) -> bool:
        return entries(self.folder / "cache") == {entry(self.folder / name) for name in names}


def test_the_artifact_used_longest_ago_makes_room(tmp_path: Path) -> None:
    models = Models(tmp_path, 3 * KIB)
    models.used("a", "b", "c", "a", "d")
    assert models.kept("a", "c", "d")
    models.used("e")
    assert models.kept("a", "d", "e")
    models.used("f" * 3, "a")
    assert models.kept("f" * 3, "a", "e")


def test_what_is_in_use_is_never_removed(tmp_path: Path) -> None:
    models = Models(tmp_path, 2 * KIB)
    held, other = models.use("a"), models.use("b")
    with pytest.raises(ArtifactError, match="there is no room for its 1024 bytes"):
        models.use("c")
    assert models.kept("a", "b")
    other.release()
    models.used("c")
    assert models.kept("a", "c")
    assert contents(held.path) == contents(tmp_path / "a")


def test_more_than_the_bound_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    models = Models(tmp_path, 2 * KIB)
    models.used("a")
    with pytest.raises(ArtifactError, match="it has 2049 bytes; MODELS_CACHE_MAX_BYTES is 2048"):
        models.use("b", 2 * KIB + 1)
    assert models.kept("a")


def test_an_artifact_is_in_use_until_its_process_is_killed(tmp_path: Path) -> None:
    models = Models(tmp_path, KIB)
    origin = model(tmp_path, "theirs")
    with worker("hold", tmp_path / "cache", origin, KIB) as process:
        assert line_of(process) == "holds"
        with pytest.raises(ArtifactError, match="there is no room"):
            models.use("ours")
        process.kill()
        process.wait(PATIENCE_S)
        models.used("ours")
    assert models.kept("ours")


def test_a_killed_download_is_not_taken_for_whole_and_makes_room(tmp_path: Path) -> None:
    origin = model(tmp_path, "big")
    with worker("hang", tmp_path / "cache", origin, KIB) as process:
        assert line_of(process) == "half"
        (partial,) = entries(tmp_path / "cache")
        assert partial.startswith("fetch-1024-")
        with pytest.raises(ArtifactError, match="there is no room"):
            Models(tmp_path, KIB).use("small")
        process.kill()
        process.wait(PATIENCE_S)
    models = Models(tmp_path, KIB)
    assert contents(models.use("big").path) == contents(origin)
    assert models.kept("big")


def test_of_two_processes_one_downloads_and_both_have_it(tmp_path: Path) -> None:
    origin = model(tmp_path, "shared")
    with (
        worker("slow", tmp_path / "cache", origin) as one,
        worker("slow", tmp_path / "cache", origin) as other,
    ):
        # Whoever is first waits for a line; the other one for the lock.
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
        said = [process.communicate(timeout=PATIENCE_S)[0].split() for process in (one, other)]
    assert sorted(said) == [["downloads", "has"], ["has"]]
    assert entries(tmp_path / "cache") == {entry(origin)}


def test_a_wait_for_another_process_ends_with_the_process_that_waits(tmp_path: Path) -> None:
    origin = model(tmp_path, "shared")
    with worker("hang", tmp_path / "cache", origin) as process:
        assert line_of(process) == "half"
        waits = iter([False, False, False, True])
        with pytest.raises(StoppedError):
            cached(cache_of(tmp_path / "cache"), origin, stop=lambda _: next(waits, True))
        short = ArtifactCache(tmp_path / "cache", KIB * KIB, 0.2)
        with pytest.raises(ArtifactError, match="another process holds its lock for too long"):
            cached(short, origin)


@pytest.mark.full
def test_processes_that_are_killed_at_any_moment_leave_no_damage(tmp_path: Path) -> None:
    origins = [model(tmp_path, name, 64 * KIB) for name in ("a", "b", "c")]
    cache = tmp_path / "cache"
    for number in range(30):
        with worker("use", cache, origins[number % 3], 130 * KIB) as process:
            line_of(process)
            # From the first byte to the last.
            for _ in range(number):
                line_of(process)
        for path in cache.glob("sha256-*"):
            assert digest_of_folder(path).replace(":", "-") == path.name
    for origin in origins:
        found = cached(cache_of(cache, 130 * KIB), origin)
        assert contents(found.path) == contents(origin)
        found.release()
    assert {path.name.partition("-")[0] for path in cache.iterdir()} == {"sha256", "locks"}
