"""Digests of folders: what counts, what does not, and what is refused."""

import os
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.artifacts import digest as module
from fairlane_server.artifacts.digest import (
    ArtifactError,
    DigestedFile,
    ListedFile,
    check_listing,
    digest_of,
    digest_of_folder,
    files_below,
    read_blocks,
)
from tests.kit.artifact_kit import FILES, write_files

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=6)
TREES = st.dictionaries(NAMES, st.binary(max_size=40), min_size=1, max_size=6)
HASHES = st.text("0123456789abcdef", min_size=64, max_size=64)
MANIFESTS = st.dictionaries(NAMES, st.tuples(st.integers(0, 2**60), HASHES), min_size=1, max_size=6)


def digested(files: dict[str, tuple[int, str]]) -> list[DigestedFile]:
    return [DigestedFile(path, *rest) for path, rest in files.items()]


@given(MANIFESTS, st.randoms())
def test_the_order_of_files_does_not_count(files: dict[str, tuple[int, str]], chance: random.Random) -> None:
    shuffled = digested(files)
    chance.shuffle(shuffled)
    assert digest_of(shuffled) == digest_of(digested(files))


@given(MANIFESTS, MANIFESTS)
def test_two_manifests_have_one_digest_only_if_they_are_the_same(
    one: dict[str, tuple[int, str]], other: dict[str, tuple[int, str]]
) -> None:
    assert (digest_of(digested(one)) == digest_of(digested(other))) == (one == other)


@given(TREES, st.data())
def test_any_byte_counts(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes], data: st.DataObject) -> None:
    folder = write_files(tmp_path_factory.mktemp("tree"), tree)
    before = digest_of_folder(folder)
    name = data.draw(st.sampled_from(sorted(tree)))
    content = bytearray(tree[name])
    if content:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        content = bytearray(b"\0")
    (folder / name).write_bytes(content)
    assert digest_of_folder(folder) != before
    (folder / name).write_bytes(tree[name])
    assert digest_of_folder(folder) == before


def test_the_digest_of_a_folder_is_that_of_any_copy(tmp_path: Path) -> None:
    one, other = write_files(tmp_path / "one", FILES), write_files(tmp_path / "other", dict(reversed(FILES.items())))
    os.utime(one / "model.json", (1, 1))
    (one / "model.json").chmod(0o400)
    (other / "an-empty-folder").mkdir()
    (other / "linked").symlink_to("weights/model.pt2")
    write_files(one, {"linked": FILES["weights/model.pt2"]})
    assert digest_of_folder(one) == digest_of_folder(other)
    (other / "linked").rename(other / "renamed")
    assert digest_of_folder(one) != digest_of_folder(other)


def test_the_digest_never_changes_its_meaning(tmp_path: Path) -> None:
    """With another one, no version that was registered before could be loaded. By hand: sha256sum of the heading and of
    a line for each file."""
    known = "sha256:4b3ed1a2168dc4f2d13ad68610dbaf5613885f10393af1a2ba7da0c72ca90aa9"
    assert digest_of_folder(write_files(tmp_path, FILES)) == known


def test_the_documented_commands_compute_the_same_digest(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/model-registries.md").read_text()
    found = re.search(r"^    (\(echo .*\n +.*sha256sum)$", page, re.MULTILINE)
    assert found is not None
    write_files(tmp_path, FILES | {" a b ": b"x", "a b": b"y", "B": b"z"})
    (tmp_path / "link").symlink_to("weights/model.pt2")
    shell = subprocess.run(
        ("/bin/bash", "-c", found[1]), cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
    )
    assert f"sha256:{shell.stdout.split()[0]}" == digest_of_folder(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../up",
        "a/../b",
        "a//b",
        "a/",
        "./a",
        "a\\b",
        "a\nb",
        "a\0b",
        "x" * 300,
        "a/" * 600,
        "\udc80",
    ],
)
def test_paths_that_could_be_anything_else_are_refused(path: str) -> None:
    with pytest.raises(ArtifactError):
        check_listing([ListedFile(path, 1)])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "no files"),
        ([ListedFile("a", 1), ListedFile("a", 1)], "twice"),
        ([ListedFile("a", -1)], "below 0"),
        ([ListedFile("a", 1), ListedFile("a/b", 1)], "a file and a folder"),
        ([ListedFile("a", 60), ListedFile("b", 41)], "more than 100 bytes"),
        ([ListedFile(str(number), 0) for number in range(module.MOST_FILES + 1)], "more than 10000 files"),
    ],
)
def test_listings_that_no_folder_can_have_are_refused(files: list[ListedFile], reason: str) -> None:
    with pytest.raises(ArtifactError, match=reason):
        check_listing(files, 100)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "model", FILES)
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to("../secret")
    with pytest.raises(ArtifactError, match="'link' is a link that leads out of the folder"):
        files_below(folder)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: (folder / "again").symlink_to("weights"),
        lambda folder: os.mkfifo(folder / "pipe"),
        lambda folder: (folder / "circle").symlink_to("circle"),
        lambda folder: (folder / "nothing").symlink_to("missing"),
    ],
    ids=["a link to a folder", "a pipe", "a circle of links", "a link to nothing"],
)
def test_what_is_neither_a_file_nor_a_folder_is_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(write_files(tmp_path, FILES))
    with pytest.raises(ArtifactError):
        files_below(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "none"):
        with pytest.raises(ArtifactError):
            files_below(path)


@pytest.mark.parametrize("size", [3, 5])
def test_a_file_that_changes_its_size_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "a").write_bytes(b"four")
    with pytest.raises(ArtifactError, match="changed its size"):
        b"".join(read_blocks(tmp_path, ListedFile("a", size)))
